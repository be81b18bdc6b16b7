"""Measures validation batches again on the coordinator, and compares: bit for bit, or within rounding.

Unlike machines differ by rounding, and a sample that lies between two answers may count for the other one.
Knows no leases, nodes or sockets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from w5xde.learn.job.job import BatchFailed
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.train.trainer import Trainer
from w5xde.learn.trust.recompute import OWN_TRIES, ROUNDING, Opinion

# So many samples of a batch may be counted differently by another kind of machine.
SAMPLES_BETWEEN = 2


class Remeasurer:
    """Measures batches again. Only one thread may use it at a time."""

    def __init__(self, trainer: Trainer, names: Sequence[str], precision: str) -> None:
        self._trainer = trainer
        self._names = names
        self._rounding = ROUNDING[precision]
        # The largest size of each metric so far: a difference is not measured relative to one near zero.
        self._sizes = [0.0] * len(names)

    def check(
        self, rows: Sequence[Sequence[float]], params: Replica, batches: Sequence[tuple[int, int, Any]]
    ) -> Opinion:
        """Compare the metrics of these batches (number, samples and value each) with our own."""
        self._trainer.load(params.state, whole=True)
        try:
            own = self._measure(batches)
            if _same(own, rows):
                return Opinion()
            for _ in range(OWN_TRIES - 1):
                if not _same(self._measure(batches), own):
                    return Opinion(unknown="it comes out differently each time that it is measured here")
        except BatchFailed as error:
            return Opinion(unknown=f"it cannot be measured here: {error}")
        for (number, samples, _), ours, theirs in zip(batches, own, rows, strict=True):
            for place, (mine, given) in enumerate(zip(ours, theirs, strict=True)):
                if not self._is_near(place, mine, given, samples):
                    name = self._names[place]
                    return Opinion(f"{name} of validation batch {number} is {given:g}, and {mine:g} here")
        return Opinion()

    def _measure(self, batches: Sequence[tuple[int, int, Any]]) -> list[list[float]]:
        return [self._trainer.measure(value, number) for number, _, value in batches]

    def _is_near(self, place: int, mine: float, given: float, samples: int) -> bool:
        if not (math.isfinite(mine) and math.isfinite(given)):
            return mine == given or (math.isnan(mine) and math.isnan(given))
        size = self._sizes[place] = max(self._sizes[place], abs(mine))
        return abs(mine - given) <= (self._rounding + SAMPLES_BETWEEN / samples) * max(size, abs(given))


def _same(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> bool:
    """Whether all numbers are equal; those that are not numbers count as equal."""
    return [[repr(number) for number in row] for row in ours] == [
        [repr(number) for number in row] for row in theirs
    ]
