"""Measures batches of a validation set with the job's `measure`, the same on every machine.

The model is in evaluation mode meanwhile, without gradients, under the batch's own seed. The numbers of all
batches are weighted by their samples and added in the canonical tree. Knows no leases and no messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from w5xde.learn.job.job import BatchFailed
from w5xde.learn.model.seeding import seed_everything
from w5xde.tree import PairwiseTree, Span, batch_seed

# The epoch by which batches of a validation set are seeded: no epoch of the training has this number.
SEED_EPOCH = -1

Measure = Callable[[nn.Module, Any], Any]


def metrics_of(found: Any) -> dict[str, float]:
    """What an evaluation returned, as numbers by name: a single number is called `score`."""
    if not isinstance(found, dict):
        found = {"score": found}
    return {str(name): float(value) for name, value in found.items()}


def measure_batch(
    measure: Measure, module: nn.Module, batch: Any, *, seed: int, number: int, is_bf16: bool = False
) -> dict[str, float]:
    """Measure one batch of the validation set, which is on the model's device."""
    seed_everything(batch_seed(seed, SEED_EPOCH, number))
    with evaluation_mode(module), torch.no_grad():
        if is_bf16:
            device = next(module.parameters()).device.type
            with torch.autocast(device, dtype=torch.bfloat16):
                return metrics_of(measure(module, batch))
        return metrics_of(measure(module, batch))


def in_order(found: dict[str, float], names: Sequence[str]) -> list[float]:
    """The metrics in the order of their names; BatchFailed if they are others."""
    if found.keys() != set(names):
        raise BatchFailed(
            f"measure() returned {', '.join(sorted(found)) or 'nothing'}, and {', '.join(names)} before"
        )
    return [found[name] for name in names]


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; each of its modules has the mode of before afterwards."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, is_training in modes:
            each.training = is_training


def weighted_means(sizes: Sequence[int], rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each metric over all samples, from the means over the samples of each batch."""

    def add(left: list[float], right: list[float]) -> list[float]:
        return [one + other for one, other in zip(left, right, strict=True)]

    tree: PairwiseTree[list[float]] = PairwiseTree(len(sizes), add)
    for number, (size, row) in enumerate(zip(sizes, rows, strict=True)):
        tree.put(Span(number, number + 1), [size * value for value in row])
    return [total / sum(sizes) for total in tree.take(Span(0, len(sizes)))]
