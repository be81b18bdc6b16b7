"""Norm limits: whether an update is too large to be accepted, and whose fault a rejected one was.

The usual norm is learned from accepted updates: a running median for spans of each size, because the mean of
many batches is smaller than one of them alone. While it is not known, the gradient that the coordinator
computed itself stands for it. An update more than ten times as large counts only if a second node, or the
coordinator, finds the same: then it is in the data, and it counts with the same bits as without the doubt.
The differences that stretches make are no gradients, and have limits of their own, for the mean of their
steps. In rounds mode all updates are differences, and the size of a column is the number of its steps. Knows
no tensors and no clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from w5xde.control.steps.cut import UsualNorms
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.open_step import Share
from w5xde.tree import Span

AUTO = "auto"
OFF = "off"
# Times the median: honest norms of one model rarely differ by more, lies that matter mostly do.
USUAL_FACTOR = 10.0
# The median of a size is known after this many norms.
KNOWN_MIN = 20
# By how much each norm moves the median towards it: enough to follow training, too little to be led by one.
FOLLOW = 1.02
# Two computations of a batch agree if neither is this many times the other: steps may lie between them.
AGREE_FACTOR = 4.0
# A node with this many rejected updates whose batches others computed correctly is evicted.
FAULTS_MAX = 3


class NormLimits:
    """How large an update may be. `setting` is `auto`, `off` or a number; `own_norm` our own gradient's."""

    def __init__(self, setting: str, own_norm: float = 0.0) -> None:
        self.is_auto = setting == AUTO
        self._fixed = math.inf if setting in (AUTO, OFF) else float(setting)
        # 0 if not known: then the first updates need a second opinion.
        self._own_norm = own_norm if math.isfinite(own_norm) else 0.0
        # Grows when a norm that seemed unusual proves to be in the data.
        self._factor = USUAL_FACTOR
        # By the number of batches, to a power of two.
        self._medians: dict[int, float] = {}
        # The first norms of a size, until its median is known.
        self._first: dict[int, list[float]] = {}

    def of(self, batches: int) -> float:
        """Return the largest norm that the mean gradient of this many batches may have."""
        if not self.is_auto:
            return self._fixed
        size = batches.bit_length()
        median = self._medians.get(size)
        if median is None:
            median = self._guess(size)
        return self._factor * median

    def _guess(self, size: int) -> float:
        """Estimate the median of a size of which too few norms are known."""
        more = min((each for each in self._medians if each > size), default=0)
        if more:
            # The mean of fewer batches may be larger, at most by the root.
            return self._medians[more] * math.sqrt(2 ** (more - size))
        # The mean of more batches is not larger.
        return self._medians[max(self._medians)] if self._medians else self._own_norm

    def learn(self, norm: float, batches: int) -> None:
        # A median of zero would make every norm unusual.
        if not self.is_auto or not norm:
            return
        size = batches.bit_length()
        median = self._medians.get(size)
        if median is not None:
            self._medians[size] = median * (FOLLOW if norm > median else 1 / FOLLOW)
            return
        first = self._first.setdefault(size, [])
        first.append(norm)
        if len(first) >= KNOWN_MIN:
            self._medians[size] = sorted(self._first.pop(size))[KNOWN_MIN // 2]

    def widen(self, norm: float, batches: int) -> None:
        """Accept norms as large as this from now on: it was found to be in the data."""
        if self._medians:
            self._factor *= max(1.0, 2 * norm / self.of(batches))
        else:
            self._own_norm = max(self._own_norm, 2 * norm / self._factor)

    def state(self) -> UsualNorms:
        """Return what a checkpoint keeps."""
        first = {size: list(norms) for size, norms in self._first.items()}
        return UsualNorms(self._factor, dict(self._medians), first)

    def resume(self, usual: UsualNorms | None) -> None:
        """Continue with the norms of a checkpoint, if it has any."""
        if usual is None:
            return
        self._factor = usual.factor
        self._medians = dict(usual.medians)
        self._first = {size: list(norms) for size, norms in usual.first.items()}


@dataclass(frozen=True, slots=True)
class RejectedUpdate:
    """An update that was rejected: its node and batches, and the norm of its mean gradient."""

    node: str
    span: Span
    norm: float
    where: str


@dataclass(slots=True)
class _DoubtedStep:
    """A step, or a stretch if `apart`, of which updates were rejected."""

    apart: bool = False
    rejected: list[RejectedUpdate] = field(default_factory=list)
    # Norms of the updates that were accepted since.
    accepted: dict[Span, float] = field(default_factory=dict)


class NormCheck:
    """Rejects updates that are too large, compares second opinions, and counts faults."""

    def __init__(self, limits: NormLimits, stretch_limits: NormLimits | None = None) -> None:
        self.limits = limits
        self._stretch_limits = stretch_limits or limits
        # Open steps of which updates were rejected, by index.
        self.doubted_steps: dict[int, _DoubtedStep] = {}
        self._faults: Counter[str] = Counter()

    def joined(self, node: str) -> None:
        """Forget the faults of a node that was evicted for them and is allowed in again."""
        if self._faults[node] >= FAULTS_MAX:
            del self._faults[node]

    def faults(self, node: str) -> int:
        """How many updates of this node were rejected while other nodes computed something else."""
        return self._faults.get(node, 0)

    def check(self, lease: Lease, norm: float, *, is_verified: bool = False) -> str:
        """Return why an update of this norm is rejected, or an empty string.

        `is_verified`: the coordinator computed the same.
        """
        limits, batches = self.limits, lease.batches
        if lease.step.apart:
            limits, batches = self._stretch_limits, 1
        mean = _mean_norm(lease, norm)
        limit = limits.of(batches)
        if mean > limit:
            if not limits.is_auto or not (is_verified or self._is_confirmed(lease, mean)):
                without = " without a second opinion" if limits.is_auto else ""
                return f"its norm is {mean:.3g}, and {limit:.3g} is the most that is believed{without}"
            limits.widen(mean, batches)
        limits.learn(mean, batches)
        doubted = self._doubted(lease)
        if doubted is not None:
            doubted.accepted[lease.span] = mean
        return ""

    def _is_confirmed(self, lease: Lease, mean: float) -> bool:
        """Return whether another node found the same batches about as large."""
        return any(
            each.node != lease.node and mean / AGREE_FACTOR <= each.norm <= mean * AGREE_FACTOR
            for each in self._too_large(lease)
        )

    def _too_large(self, lease: Lease) -> list[RejectedUpdate]:
        """Return the updates for the same batches that were rejected only for their norm."""
        doubted = self._doubted(lease) if self.limits.is_auto else None
        if doubted is None:
            return []
        return [each for each in doubted.rejected if each.span == lease.span and each.norm < math.inf]

    def _doubted(self, lease: Lease) -> _DoubtedStep | None:
        """Return what was rejected of the step of this lease, if anything was.

        A stretch that was split is forgotten: its first step has its index, but differences are no gradients.
        """
        doubted = self.doubted_steps.get(lease.step.index)
        if doubted is not None and doubted.apart != lease.step.apart:
            del self.doubted_steps[lease.step.index]
            return None
        return doubted

    def is_doubted(self, lease: Lease) -> bool:
        """Return whether an update for these batches was rejected only because its norm is unusual."""
        return bool(self._too_large(lease))

    def needs_second_node(self, lease: Lease, *, is_alone: bool) -> bool:
        """Return whether one node alone found these batches too large: another may find the same."""
        return not is_alone and len({each.node for each in self._too_large(lease)}) == 1

    def needs_coordinator(self, lease: Lease, *, is_alone: bool) -> bool:
        """Return whether the coordinator must decide: no other node can, or two nodes disagree."""
        if lease.step.apart:
            return False  # the coordinator computes gradients alone; such a stretch is split into steps
        return len({each.node for each in self._too_large(lease)}) >= (1 if is_alone else 2)

    def reject(self, lease: Lease, norm: float) -> None:
        """Record that an update was rejected: it is not finite, or too large."""
        doubted = self._doubted(lease) or _DoubtedStep(lease.step.apart)
        self.doubted_steps[lease.step.index] = doubted
        update = RejectedUpdate(lease.node, lease.span, _mean_norm(lease, norm), lease.where)
        doubted.rejected.append(update)

    def complete(self, step: int, shares: list[Share]) -> Iterator[tuple[RejectedUpdate, int]]:
        """Forget a step that is complete; yield rejected updates whose batches are all good.

        With each: the number of faults of its node so far; 0 if the node itself did better at last, so that
        it is no fault.
        """
        doubted = self.doubted_steps.pop(step, _DoubtedStep())
        for update in doubted.rejected:
            inside = _inside(update.span, shares)
            if not _is_refuted(update, doubted, inside):
                continue
            if any(node == update.node for _, _, node, _ in inside):
                # One that is not finite, or above the user's own limit, was reported when it came.
                if self.limits.is_auto and update.norm < math.inf:
                    yield update, 0
            else:
                self._faults[update.node] += 1
                yield update, self._faults[update.node]


def _mean_norm(lease: Lease, norm: float) -> float:
    """Return the norm of the mean gradient of the lease's batches; a step of one lease is one already.

    For a stretch, and for a column of a round: that of the mean of its steps.
    """
    if lease.step.apart or lease.step.columns:
        return norm / lease.batches
    is_whole = lease.span.count == lease.step.count
    return norm if is_whole else norm * lease.step.samples / lease.samples


def _inside(span: Span, shares: list[Share]) -> list[Share]:
    """Return the shares of a step that have a part of the span."""
    return [share for share in shares if share[0] < span.stop and share[1] > span.start]


def _is_refuted(update: RejectedUpdate, doubted: _DoubtedStep, inside: list[Share]) -> bool:
    """Return whether every batch of the update was given again, with a far smaller gradient."""
    span = update.span
    covered = sum(min(stop, span.stop) - max(start, span.start) for start, stop, _, _ in inside)
    if covered < span.count:
        return False  # some of its batches were set aside: the data was at fault
    if update.norm == math.inf:
        return True
    # The mean of more batches hides a single large one, so it proves nothing.
    if any(start < span.start or stop > span.stop for start, stop, _, _ in inside):
        return False
    # No mean is larger than the largest of its parts. If one is unknown, no node is blamed.
    norms = [doubted.accepted.get(Span(start, stop), math.inf) for start, stop, _, _ in inside]
    return update.norm > AGREE_FACTOR * max(norms, default=math.inf)
