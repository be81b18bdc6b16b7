"""Checks that numbers are finite, and measures how large a gradient is, in one pass over the numbers.

The square of a norm is finite only if all its numbers are, so that one pass answers both questions. It may
also overflow although all numbers are finite, and only then a second pass decides. Does not know what happens
to an update that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from w5xde.learn.model.layout import Blueprint, Vector
from w5xde.learn.model.parallel import on_all_cores, shares
from w5xde.messages import CARRIED, TRAINED

# Up to this many numbers numpy is faster than torch: its calls cost less, and its loops cost more. Measured.
SMALL_COUNT = 16384
# Vectors smaller than this are measured together, in one call.
TOGETHER_BYTES = 1024 * 1024
_BLAS = (torch.float32, torch.float64)


class Gauge:
    """Measures updates of one layout: their norms, and whether they are finite."""

    def __init__(self, blueprint: Blueprint) -> None:
        groups = blueprint.moving_groups
        is_simple = len(groups) == 1 and groups[0].role == TRAINED and groups[0].dtype is torch.float32
        # How many numbers a vector has, if it can be measured with others: it is small and all float32.
        self._floats = groups[0].count if is_simple and blueprint.moving_bytes < TOGETHER_BYTES else 0
        self._trained = [i for i, group in enumerate(groups) if group.role == TRAINED and group.count]
        self._others = [
            i
            for i, group in enumerate(groups)
            if group.role != TRAINED and group.count and can_hold_nan(group.dtype)
        ]

        # Second moments: negative ones would make a step that is not a number.
        self._never_negative = [i for i, group in enumerate(groups) if group.role == CARRIED and group.count]

    def norms(self, body: Any, vectors: Sequence[Vector]) -> list[float]:
        """The `norm` of each of the vectors that lie one behind the other in `body`."""
        if self._floats and len(vectors) > 1:
            # One call for all of them costs hardly more than one call for each.
            rows = np.frombuffer(body, np.float32).reshape(len(vectors), -1)[:, : self._floats]
            with np.errstate(over="ignore", invalid="ignore"):
                found: list[float] = np.einsum("ij,ij->i", rows, rows).tolist()
            if math.isfinite(sum(found)):
                return [math.sqrt(square) for square in found]
        return [self.norm(vector) for vector in vectors]

    def norm(self, vector: Vector) -> float:
        """The norm of the gradients; infinite if any number, also of the buffers, is not finite.

        Also infinite if a carried statistic is negative, which none can be.
        """
        if not all(is_finite(vector.parts[i]) for i in self._others):
            return math.inf
        if any(bool((vector.parts[i] < 0).any()) for i in self._never_negative):
            return math.inf
        return math.sqrt(sum(_square(vector.parts[i]) for i in self._trained))

    def square(self, group: int, numbers: torch.Tensor) -> float:
        """What part of a group adds to the square of the norm; infinite if a number is not finite."""
        if group in self._trained:
            return _square(numbers)
        if group in self._never_negative and bool((numbers < 0).any()):
            return math.inf
        return 0.0 if group not in self._others or is_finite(numbers) else math.inf

    def is_finite(self, vector: Vector) -> bool:
        return all(is_finite(vector.parts[i]) for i in (*self._trained, *self._others))


def can_hold_nan(dtype: torch.dtype) -> bool:
    """Whether numbers of this type can be infinite or NaN."""
    return dtype.is_floating_point or dtype.is_complex


def are_finite(numbers: np.ndarray[Any, np.dtype[Any]]) -> bool:
    return bool(np.isfinite(numbers).all())


def is_finite(part: torch.Tensor) -> bool:
    if part.numel() <= SMALL_COUNT and part.dtype in _BLAS and part.device.type == "cpu":
        # Three times as fast as any way that torch has.
        return are_finite(part.numpy())
    # A sum is finite only if all its numbers are, and costs an eighth of finding the largest. A sum of finite
    # numbers may overflow, and only then the largest is looked for.
    if not part.is_complex() and math.isfinite(part.sum().item()):
        return True
    return math.isfinite(float(torch.linalg.vector_norm(part, ord=math.inf)))


def _long_square(part: torch.Tensor) -> float:
    """The sum of all squares, as it comes, on all cores if the vector is long."""
    cuts = shares(part.numel()) if part.device.type == "cpu" else [slice(None)]
    found = [0.0] * len(cuts)

    def measure(number: int) -> None:
        share = part[cuts[number]]
        found[number] = torch.dot(share, share).item()

    on_all_cores(measure, len(cuts))
    return sum(found)


def _square(part: torch.Tensor) -> float:
    """The sum of all squares; infinite if a number is not finite."""
    if part.dtype in _BLAS:
        if part.numel() <= SMALL_COUNT:
            numbers = part.numpy()
            with np.errstate(over="ignore", invalid="ignore"):
                square = float(np.dot(numbers, numbers))
        else:
            square = _long_square(part)
        if math.isfinite(square):
            return square
    if not is_finite(part):
        return math.inf
    real = part.abs() if part.is_complex() else part
    norm = float(torch.linalg.vector_norm(real, dtype=torch.float64))
    return min(norm * norm, 1e300)  # finite, however large
