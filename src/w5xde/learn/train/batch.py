"""One batch of a lease, and what computing it gives. Knows neither how it is computed nor what a lease is."""

from __future__ import annotations

from typing import Any, NamedTuple

from w5xde.learn.model.digest import same_loss
from w5xde.learn.model.layout import Vector

# Epoch, number in the epoch, and weight in the step, by which the gradient is multiplied.
BatchId = tuple[int, int, float]


class WeightedBatch(NamedTuple):
    """A batch with its weight in its step: the share of the step's samples that it has."""

    epoch: int
    # Its place in the epoch.
    number: int
    weight: float
    value: Any
    # How many steps are planned before its step.
    step: int = 0

    @property
    def id(self) -> BatchId:
        return self[:3]


class BatchGradient(NamedTuple):
    """The weighted gradient of a batch, its loss, and the trained parameters that had no gradient.

    Parameters are numbered in the order of `Blueprint.trained`.
    """

    vector: Vector
    loss: float
    absent: frozenset[int]

    def is_same(self, other: BatchGradient) -> bool:
        """Whether both have the same bits, also where a number is NaN."""
        return self.vector.is_same(other.vector) and same_loss(self.loss, other.loss)
