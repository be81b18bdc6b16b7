"""The learning rate of one step: the optimizer's own, times a factor that makes late updates' steps smaller.

Scales the rates in an optimizer's groups, and refuses an optimizer that has none. Does not know how late an
update is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from w5xde.errors import JobError, UsageError


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rate of every group that has one by a factor, until the block ends."""
    before = [(group, group["lr"]) for group in optimizer.param_groups if _has_rate(group)]
    for group, rate in before:
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in before:
            group["lr"] = rate


def learning_rates(optimizer: Optimizer) -> list[float]:
    """The learning rate of every group that has one."""
    return [float(group["lr"]) for group in optimizer.param_groups if _has_rate(group)]


def require_every_rate(optimizer: Optimizer) -> None:
    """Raise UsageError if a group of the optimizer has no learning rate that could be changed."""
    if not all(map(_has_rate, optimizer.param_groups)):
        raise UsageError(
            f"{type(optimizer).__name__} has no learning rate that could be changed",
            code="W5-265",
            fix="leave out --override",
        )


def require_rates(optimizer: Optimizer) -> None:
    """Raise JobError if a group of the optimizer has no learning rate that can be scaled."""
    if not all(map(_has_rate, optimizer.param_groups)):
        raise JobError(
            f"the delay correction cannot scale the learning rate of {type(optimizer).__name__}",
            code="W5-234",
            why="late updates make smaller steps, and a group of the optimizer has no number as its lr",
            fix="use --no-delay-correction, or give the optimizer a learning rate:  lr=1e-3",
        )


def _has_rate(group: dict[str, Any]) -> bool:
    # The usual type first: the others are slower to recognise.
    return isinstance(group.get("lr"), (float, Real, Tensor))
