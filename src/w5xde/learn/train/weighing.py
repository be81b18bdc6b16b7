"""Weights of batches: what a batch counts in the mean of its step, if the job says so (`Job.weight`).

Weights are counted in a unit that is about what a sample weighs, so that weighted gradients have the size of
others. Knows no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from w5xde.learn.job.job import BatchFailed, describe
from w5xde.tree import Span, halves

# Sums of weights below this are finite, and so are their products with losses.
WEIGHT_MAX = 1e30
# In units, what weighs less counts as nothing: dividing by it would leave the range of a float32.
WEIGHT_MIN = 1e-20


def weigh(weight: Callable[[Any], Any], batch: Any, name: str) -> float:
    """The weight of a batch, which messages call `name`. Raises BatchFailed if it is none."""
    try:
        with torch.no_grad():
            found = float(weight(batch))
    except Exception as error:
        raise BatchFailed(f"weight() failed on {name}: {describe(error)} (W5-255)") from error
    if not 0 <= found < WEIGHT_MAX:
        raise BatchFailed(f"weight() gave {found:g} for {name}, which is no weight (W5-255)")
    return found


def unit_of(weight: float, samples: int) -> float:
    """About the weight of a sample, if a batch of so many has this weight.

    A power of two, because dividing by it rounds nothing.
    """
    return 2.0 ** round(math.log2(weight / samples)) if weight else 1.0


def counted(weight: float) -> float:
    """What a weight, in units, counts as."""
    return weight if weight >= WEIGHT_MIN else 0.0


def add_weights(weights: Sequence[float], span: Span) -> float:
    """The sum of the weights of a span's batches, added in the canonical tree."""
    if span.count == 1:
        return weights[0]
    left, right = halves(span)
    return add_weights(weights[: left.count], left) + add_weights(weights[left.count :], right)
