"""Ratios and their confidence intervals. Knows nothing of what was measured."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

RESAMPLES = 4000
CONFIDENCE = 0.95


def quotient(one: float | None, other: float | None) -> float | None:
    """One over the other; None if either is unknown or the other is 0."""
    return one / other if one is not None and other else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The median of paired ratios and its 95 % confidence interval."""

    ratio: float
    low: float
    high: float
    ratios: list[float]

    @property
    def verdict(self) -> str:
        """Ahead or behind only if the whole interval is on one side of 1."""
        return "ahead" if self.low > 1 else "behind" if self.high < 1 else "even"

    def summary(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def compare(ratios: Sequence[float], seed: int = 0) -> Comparison:
    """Bootstrap the median: medians of many samples of the ratios, drawn by a seeded generator."""
    draws = random.Random(seed)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Comparison(statistics.median(ratios), medians[tail], medians[-1 - tail], list(ratios))
