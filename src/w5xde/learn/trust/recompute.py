"""A second opinion: what a node gave, computed again and compared. On like machines the bits are the same.

On others they differ by rounding: how much is usual is learned from those that agree, and only what is far
outside of it is called wrong; and only if our own computation, made again, gives our own bits again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from w5xde.learn.job.job import BatchFailed
from w5xde.learn.model.layout import Blueprint, Vector
from w5xde.learn.step.finite import can_hold_nan
from w5xde.learn.train.trainer import Task, Trainer
from w5xde.tree import Span

# Relative differences that are rounding whoever computes; and how many times what is usual among pairs that
# agree, but not in their bits, is still believed.
ROUNDING = {"fp32": 1e-3, "bf16": 3e-2}
FAR_FACTOR = 20.0
# Nobody's rounding is as large as this: beyond it an update is wrong, whatever was learned.
DIFFERENCE_MAX = 0.2
# How fast what is usual follows what is found: nobody can lead it far alone.
FOLLOW = 1.05
# How often we compute before we blame.
OWN_TRIES = 3


class SecondOpinion:
    """Computes leases on a model of its own. One thread uses it at a time."""

    def __init__(self, trainer: Trainer, precision: str) -> None:
        self._trainer = trainer
        self._blueprint: Blueprint = trainer.blueprint
        self._rounding = ROUNDING[precision]
        # The median of the differences between pairs that agree, as far as it is known.
        self._usual_difference = 0.0
        # How large gradients usually are: next to nothing, nothing can be compared.
        self._usual_norm = 0.0

    @property
    def tolerance(self) -> float:
        return min(DIFFERENCE_MAX, max(self._rounding, FAR_FACTOR * self._usual_difference))

    def wrong_with(self, given: Vector, params: memoryview, task: Task) -> str:
        """What is wrong with an update for the task, computed on these parameters; nothing if it is right.

        What cannot be computed here either says nothing about the node.
        """
        first = self._compute(params, task)
        if first is None or first.is_same(given):
            return ""
        for _ in range(OWN_TRIES - 1):
            again = self._compute(params, task)
            if again is None or not again.is_same(first):
                # Something else on this machine drew from our generator, or the job is not repeatable.
                return ""
        name, difference = self._difference(first, given)
        if difference <= self.tolerance:
            usual = self._usual_difference or difference
            self._usual_difference = usual * (FOLLOW if difference > usual else 1 / FOLLOW)
            return ""
        return (
            f"it differs by {difference:.2g} of its size, most in {name} ({self.tolerance:.2g} is rounding)"
        )

    def _compute(self, params: memoryview, task: Task) -> Vector | None:
        self._trainer.load(params, whole=True)
        try:
            return self._trainer.compute(task).vector
        except BatchFailed:
            return None

    def _difference(self, ours: Vector, theirs: Vector) -> tuple[str, float]:
        """The relative difference of two updates, and the entry in which most of it is."""
        worst, most = "", -1.0
        apart = size = 0.0
        entries = self._blueprint.layout.entries
        for group, mine, other in zip(self._blueprint.moving_groups, ours.parts, theirs.parts, strict=True):
            if not can_hold_nan(group.dtype):
                if not torch.equal(mine, other):
                    return entries[group.entries[0]].name, math.inf
                continue
            at = 0
            for i in group.entries:
                count = math.prod(entries[i].shape)
                a, b = mine[at : at + count], other[at : at + count]
                at += count
                gap = _square(a - b)
                apart += gap
                size += max(_square(a), _square(b))
                if gap > most:
                    worst, most = entries[i].name, gap
        norm = math.sqrt(size)
        self._usual_norm = max(0.99 * self._usual_norm, norm if apart < size else 0.0)
        return worst, math.sqrt(apart) / max(norm, 1e-3 * self._usual_norm, 1e-30)


def _square(part: torch.Tensor) -> float:
    wide = torch.view_as_real(part).double() if part.is_complex() else part.double()
    return float((wide * wide).sum())


def task_of(epoch: int, span: Span, sizes: Sequence[int], first: int, batches: Sequence[Any]) -> Task:
    """The task that a node was given for batches `span` of a step that begins with batch `first`."""
    listed = [
        (first + place, sizes[place], batch)
        for place, batch in zip(range(span.start, span.stop), batches, strict=True)
    ]
    return Task(epoch, span, len(sizes), sum(sizes), listed)
