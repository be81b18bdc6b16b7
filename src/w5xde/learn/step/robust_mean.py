"""Robust sums: each node has one vote in a step, and at each coordinate the extreme votes are left out.

A node's vote is the mean of its gradients for the step, by the coordinator's own count of samples. At each
coordinate the largest and the smallest votes are left out, and the mean of the others times the size of the
step replaces the sum. As many liars as are left out at one end cannot move the result beyond the range of the
honest votes. Knows nothing of nodes but their names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde.learn.model.layout import Blueprint, DtypeGroup, Vector
from w5xde.learn.step.finite import Gauge
from w5xde.learn.step.sums import (
    Contribution,
    Decided,
    Leased,
    PlannedStep,
    StepNotFinite,
    Total,
    clear_weightless,
    complete_mean,
    complete_weighted,
    divide_by_weight,
    round_steps_of,
    weigh_column,
)
from w5xde.messages import MOVING
from w5xde.specs.robust_rule import Robust
from w5xde.tree import Span

# Coordinates handled at a time, of all nodes: few enough for the caches, and a bound on memory.
CHUNK_COUNT = 65536
# The largest integer up to which doubles are exact; no counter moves further in a step.
WHOLE_MAX = 2**53

# Batches `start` up to `stop` of a step, the node that computed them, and its lease.
Share = tuple[int, int, str, int]


class _Vote(NamedTuple):
    """The sum of all contributions of one node to a step."""

    vector: Vector
    samples: int
    batches: int
    absent: frozenset[int]
    loss_sum: float
    # What its batches weigh, if the job weighs batches; the vector is then divided by it.
    weight: float | None = None


class RobustSums:
    """Holds contributions until their step is complete. Belongs to the thread of the learner."""

    def __init__(self, blueprint: Blueprint, gauge: Gauge, rule: Robust) -> None:
        self._gauge = gauge
        self._rule = rule
        self._groups = blueprint.moving_groups
        self._trained = frozenset(blueprint.trained)
        self._kept: dict[int, dict[int, Contribution]] = {}

    def add(self, lease: Leased, given: Contribution, staleness: int) -> None:
        if lease.step.columns:
            given = weigh_column(lease, given, self._groups)
        given = clear_weightless(given, self._groups)
        self._kept.setdefault(lease.step.index, {})[lease.id] = given

    def leave_empty(self, step: PlannedStep, spans: Iterable[Span]) -> None:
        """Nothing to do: the shares of a step say which updates it is made of."""

    def drop(self, step: int) -> None:
        """Forget the contributions to this step."""
        self._kept.pop(step, None)

    def total(self, step: Decided) -> Total:
        """The robust mean, times the size of the step: it replaces the sum."""
        plan, index = step.plan, step.plan.index
        kept = self._kept.pop(index)
        leases: dict[str, list[Share]] = {}
        # In the order of batches: the same shares give the same bits, whatever the order of arrival.
        for share in sorted(step.shares):
            leases.setdefault(share[2], []).append(share)
        votes = [_add_up(given, kept, plan, self._groups) for given in leases.values()]
        vector = self._middle(votes)
        norm = self._gauge.norm(vector)
        if norm == math.inf:
            raise StepNotFinite(f"the gradient of step {index + 1} is not finite")
        loss_sum = sum(vote.loss_sum for vote in votes)
        contribution = Contribution(vector, self._absent(votes), loss_sum, norm)
        if votes[0].weight is not None:
            weight = sum(vote.weight or 0.0 for vote in votes)
            contribution = complete_weighted(step, contribution._replace(weight=weight), self._trained)
        if plan.columns:
            contribution = complete_mean(step, contribution, self._groups)
        return Total(plan.count, contribution, step.rate, round_steps=round_steps_of(plan))

    def _absent(self, votes: list[_Vote]) -> frozenset[int]:
        """Entries with a gradient from no more nodes than are left out at one end."""
        votes = [vote for vote in votes if vote.weight != 0]
        out = self._rule.left_out(len(votes))
        missing = Counter(i for vote in votes for i in vote.absent)
        return frozenset(i for i, count in missing.items() if len(votes) - count <= out)

    def _middle(self, votes: list[_Vote]) -> Vector:
        """The robust sum of all votes, written into the vector of the first."""
        if len(votes) == 1:
            return votes[0].vector
        samples, batches = sum(vote.samples for vote in votes), sum(vote.batches for vote in votes)
        # A node whose batches weigh nothing has no opinion of the gradient.
        of_gradients = [vote for vote in votes if vote.weight != 0] or votes
        for place, group in enumerate(self._groups):
            # Gradients are weighted by samples, changes of buffers by batches: see Trainer and Learner.
            if group.role == MOVING:
                voting, scales = votes, [batches / vote.batches for vote in votes]
            else:
                voting, scales = of_gradients, [_scale_of(vote, samples) for vote in of_gradients]
            out = self._rule.left_out(len(voting))
            parts, into = [_real(vote.vector.parts[place]) for vote in voting], votes[0].vector.parts[place]
            for start in range(0, parts[0].numel(), CHUNK_COUNT):
                rows = [part[start : start + CHUNK_COUNT] for part in parts]
                _real(into)[start : start + CHUNK_COUNT].copy_(_trimmed(rows, scales, out, group))
        return votes[0].vector


def _add_up(
    shares: list[Share], kept: dict[int, Contribution], plan: PlannedStep, groups: Sequence[DtypeGroup]
) -> _Vote:
    """The contributions of one node as one vote, with our own count of samples."""
    first, *others = (kept[lease] for _, _, _, lease in shares)
    absent, loss_sum, weight = first.absent, first.loss_sum, first.weight
    for other in others:
        first.vector.add_(other.vector)
        absent &= other.absent
        loss_sum += other.loss_sum
        weight = None if weight is None or other.weight is None else weight + other.weight
    if weight and plan.count > 1:
        divide_by_weight(first._replace(weight=weight), plan, groups)
    samples = sum(plan.samples_of(Span(start, stop)) for start, stop, _, _ in shares)
    batches = sum(stop - start for start, stop, _, _ in shares)
    return _Vote(first.vector, samples, batches, absent, loss_sum, weight)


def _scale_of(vote: _Vote, samples: int) -> float:
    """What turns the gradients of a vote into those of the whole step; a weighted vote is a mean already."""
    return samples / vote.samples if vote.weight is None else 1.0


def _real(part: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which have an order."""
    return torch.view_as_real(part).view(-1) if part.is_complex() else part


def _trimmed(rows: list[Tensor], scales: list[float], out: int, group: DtypeGroup) -> Tensor:
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
    # From the smallest to the largest, so that the bits do not depend on which node gave which value.
    for row in kept[1:]:
        mean.add_(row)
    mean.div_(len(kept))
    if is_whole:
        low, high = torch.iinfo(group.dtype).min, torch.iinfo(group.dtype).max
        mean.round_().clamp_(max(low, -WHOLE_MAX), min(high, WHOLE_MAX))
    return mean


def _sorted(rows: list[Tensor]) -> list[Tensor]:
    """Sort each coordinate over the rows, smallest first. Ten times as fast as torch.sort."""
    spare = torch.empty_like(rows[0])
    for low, high in sorting_network(len(rows)):
        torch.minimum(rows[low], rows[high], out=spare)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return rows


@lru_cache(maxsize=64)
def sorting_network(count: int) -> list[tuple[int, int]]:
    """Batcher's odd-even mergesort: the pairs to put in order, one after another, to sort `count` rows."""
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
