"""Robust sums: every node has one voice in a step, and at each coordinate the extremes are left out.

What a node gave for a step is added up and divided by our own count of it: its mean. Of these, one for each
node however much it computed, the largest and the smallest are left out and the rest is averaged, and that
times the step's size stands for the sum. So many liars as are left out at one end can put the result nowhere
outside of what honest nodes found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde.learn.model.layout import Blueprint, Group, Vector
from w5xde.learn.step.finite import Gauge
from w5xde.learn.step.sums import Contribution, Decided, Leased, PlannedStep, StepNotFinite, Total
from w5xde.messages import TRAINED
from w5xde.robust_rule import Robust
from w5xde.tree import Span

# So many coordinates of all nodes at a time: they stay in the caches, and memory for them is bounded.
CHUNK_COUNT = 65536
# Whole numbers are exact in doubles up to here; no counter moves further in a step.
WHOLE_MAX = 2**53

# Batches `start` up to `stop` of a step, the node that gave them, and its lease.
Share = tuple[int, int, str, int]


class _Voice(NamedTuple):
    """All that one node gave for a step."""

    vector: Vector
    samples: int
    batches: int
    absent: frozenset[int]
    loss_sum: float


class RobustSums:
    """Keeps what came for steps until they are complete. Used where the learner is."""

    def __init__(self, blueprint: Blueprint, gauge: Gauge, rule: Robust) -> None:
        self._gauge = gauge
        self._rule = rule
        self._groups = blueprint.moving_groups
        self._kept: dict[int, dict[int, Contribution]] = {}

    def add(self, lease: Leased, given: list[Contribution], staleness: int) -> None:
        self._kept.setdefault(lease.step.index, {})[lease.id] = given[0]

    def leave_empty(self, step: PlannedStep, spans: Iterable[Span]) -> None:
        """Nothing to do: the shares of a step say which updates it is made of."""

    def drop(self, step: int) -> None:
        """Nobody will ask for what was kept of this step."""
        self._kept.pop(step, None)

    def totals(self, step: Decided) -> list[Total]:
        """The robust mean, times the size of the step: it stands for the sum."""
        index, sizes = step.plan.index, step.plan.sizes
        kept = self._kept.pop(index)
        leases: dict[str, list[Share]] = {}
        # In the order of batches: the same sharing gives the same bits, whoever answered first.
        for share in sorted(step.shares):
            leases.setdefault(share[2], []).append(share)
        voices = [_add_up(given, kept, sizes) for given in leases.values()]
        vector = self._middle(voices)
        norm = self._gauge.norm(vector)
        if norm == math.inf:
            raise StepNotFinite(f"the gradient of step {index + 1} is not finite")
        loss_sum = sum(voice.loss_sum for voice in voices)
        return [Total(len(sizes), Contribution(vector, self._absent(voices), loss_sum, norm))]

    def _absent(self, voices: list[_Voice]) -> frozenset[int]:
        """Entries for which no more nodes have a gradient than are left out at one end."""
        out = self._rule.left_out(len(voices))
        missing = Counter(i for voice in voices for i in voice.absent)
        return frozenset(i for i, count in missing.items() if len(voices) - count <= out)

    def _middle(self, voices: list[_Voice]) -> Vector:
        """Into the first one's vector: nobody needs that any more."""
        if len(voices) == 1:
            return voices[0].vector
        out = self._rule.left_out(len(voices))
        samples, batches = sum(voice.samples for voice in voices), sum(voice.batches for voice in voices)
        for place, group in enumerate(self._groups):
            # Gradients are weighted by samples, what happens to buffers is not: see Trainer and Learner.
            scales = [
                samples / voice.samples if group.role == TRAINED else batches / voice.batches
                for voice in voices
            ]
            parts = [_real(voice.vector.parts[place]) for voice in voices]
            for start in range(0, parts[0].numel(), CHUNK_COUNT):
                rows = [part[start : start + CHUNK_COUNT] for part in parts]
                rows[0].copy_(_trimmed(rows, scales, out, group))
        return voices[0].vector


def _add_up(shares: list[Share], kept: dict[int, Contribution], sizes: Sequence[int]) -> _Voice:
    """What one node gave, as one vector; by our own count of samples, whatever it says."""
    first, *others = (kept[lease] for _, _, _, lease in shares)
    absent, loss_sum = first.absent, first.loss_sum
    for other in others:
        first.vector.add_(other.vector)
        absent &= other.absent
        loss_sum += other.loss_sum
    samples = sum(sum(sizes[start:stop]) for start, stop, _, _ in shares)
    batches = sum(stop - start for start, stop, _, _ in shares)
    return _Voice(first.vector, samples, batches, absent, loss_sum)


def _real(part: Tensor) -> Tensor:
    """Complex numbers have no order: each of their two parts has."""
    return torch.view_as_real(part).view(-1) if part.is_complex() else part


def _trimmed(rows: list[Tensor], scales: list[float], out: int, group: Group) -> Tensor:
    """At each coordinate the mean of all but the `out` largest and smallest."""
    if group.dtype is torch.bool:
        # A flag is set if more nodes set it than are left out.
        return torch.stack(rows).sum(0) > out
    is_whole = not (group.dtype.is_floating_point or group.dtype.is_complex)
    wide = torch.float64 if is_whole else torch.promote_types(rows[0].dtype, torch.float32)
    sorted_rows = _sorted(
        [row.to(wide, copy=True).mul_(scale) for row, scale in zip(rows, scales, strict=True)]
    )
    kept = sorted_rows[out : len(rows) - out]
    mean = kept[0]
    # From the smallest to the largest: whose they are makes no difference to the bits.
    for row in kept[1:]:
        mean.add_(row)
    mean.div_(len(kept))
    if is_whole:
        low, high = torch.iinfo(group.dtype).min, torch.iinfo(group.dtype).max
        mean.round_().clamp_(max(low, -WHOLE_MAX), min(high, WHOLE_MAX))
    return mean


def _sorted(rows: list[Tensor]) -> list[Tensor]:
    """The smallest of each coordinate in the first row, and so on. Ten times as fast as torch's sort."""
    spare = torch.empty_like(rows[0])
    for low, high in sorting_network(len(rows)):
        torch.minimum(rows[low], rows[high], out=spare)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return rows


@lru_cache(maxsize=64)
def sorting_network(count: int) -> list[tuple[int, int]]:
    """Batcher's odd-even mergesort: which pairs to put in order, one after another, to sort so many."""
    pairs: list[tuple[int, int]] = []
    size = 1
    while size < count:
        step = size
        while step:
            for start in range(step % size, count - step, 2 * step):
                pairs += [
                    (low, low + step)
                    for low in range(start, min(start + step, count - step))
                    if low // (2 * size) == (low + step) // (2 * size)
                ]
            step //= 2
        size *= 2
    return pairs
