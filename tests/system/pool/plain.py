"""A pool that is none: `backward` in one process, in ordinary PyTorch. What `w5xde.Pool` must agree with.

Shares no code with the pool. Of w5xde it knows only the seed of each part; the rest is written the way
anybody would write it: parts one after the other, each with its weight, and buffers that meet in the middle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.learn.reference import meeting, put_buffers, seed_all
from w5xde.tree import batch_seed


class PlainPool:
    """Computes every part here."""

    def __init__(
        self, model: nn.Module, losses: dict[str, Callable[[Any, Any], Tensor]], seed: int = 0
    ) -> None:
        self.model = model
        self._losses = losses
        self._seed = seed
        self._calls = 0

    def backward(
        self,
        batch: Any,
        loss: str | None = None,
        *,
        parts: int | None = None,
        samples: Sequence[int] | None = None,
    ) -> Tensor:
        function = self._losses[loss or next(iter(self._losses))]
        values = batch if parts is None else split(batch, parts)
        sizes = list(samples or [rows(value) for value in values])
        generators = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        start = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        left: list[dict[str, Tensor]] = []
        mean = 0.0
        for number, (size, value) in enumerate(zip(sizes, values, strict=True)):
            put_buffers(self.model, start)
            seed_all(batch_seed(self._seed, self._calls, number))
            found = function(self.model, value)
            (found * (size / sum(sizes))).backward()
            mean += float(found.detach()) * size / sum(sizes)
            left.append({name: buffer.detach().clone() for name, buffer in self.model.named_buffers()})
        put_buffers(self.model, {name: meeting(start[name], [each[name] for each in left]) for name in start})
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])  # noqa: NPY002
        self._calls += 1
        return torch.tensor(mean)


def rows(value: Any) -> int:
    """The rows of the first tensor; 1 if there is none."""
    if isinstance(value, Tensor):
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((rows(item) for item in items if isinstance(item, Tensor)), 1)


def split(batch: Any, parts: int) -> list[Any]:
    """Every tensor in as many chunks, the first ones longer; numbers as they are."""
    if isinstance(batch, Tensor):
        return list(torch.tensor_split(batch, min(parts, len(batch))))
    if isinstance(batch, dict):
        columns = [split(item, parts) for item in batch.values()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=False)]
    if isinstance(batch, (list, tuple)):
        columns = [split(item, parts) for item in batch]
        return [type(batch)(row) for row in zip(*columns, strict=False)]
    return [batch] * parts
