"""The judge: whether an update is too large to be believed, and whose fault a bad one was.

What is usual is learned from the updates that were taken: the median of their norms, for spans of each size,
because the mean of many batches is smaller than one of them alone. What is more than ten times that is not
taken at the first word: somebody else computes the batch too. If both agree, the data is so, and it counts,
with the same bits as if nobody had doubted; if not, the first was wrong. Knows no tensors and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from w5xde.control.steps.leases import Lease
from w5xde.control.steps.open_step import Share
from w5xde.tree import Span

AUTO = "auto"
OFF = "off"
# Times the median: honest norms of one model rarely differ by more, lies that matter mostly do.
USUAL_FACTOR = 10.0
# So many norms of a size are known before any is called unusual.
KNOWN_MIN = 20
# By how much each norm moves the median towards it: enough to follow training, too little to be led by one.
FOLLOW = 1.02
# Two computations of a batch agree if neither is so many times the other: steps may lie between them.
AGREE_FACTOR = 4.0
# A node of which so many updates were bad while others' were good is turned out.
FAULTS_MAX = 3


class Median:
    """A running median of positive numbers: exact at first, then followed step by step."""

    def __init__(self) -> None:
        self._first: list[float] = []
        # 0 while too little is known.
        self.value = 0.0

    def add(self, number: float) -> None:
        if self.value:
            self.value *= FOLLOW if number > self.value else 1 / FOLLOW
            return
        self._first.append(number)
        if len(self._first) >= KNOWN_MIN:
            self.value = sorted(self._first)[len(self._first) // 2]
            self._first.clear()


class NormLimit:
    """How large an update may be. `setting`: `auto`, `off`, or a number."""

    def __init__(self, setting: str) -> None:
        self.is_auto = setting == AUTO
        self._fixed = math.inf if setting in (AUTO, OFF) else float(setting)
        # By the number of batches, to a power of two.
        self._medians: dict[int, Median] = {}
        # Grows when what seemed unusual proves to be in the data.
        self._factor = USUAL_FACTOR

    def of(self, batches: int) -> float:
        """The largest norm that a mean over so many batches may have; infinite while nobody knows."""
        if not self.is_auto:
            return self._fixed
        size = batches.bit_length()
        median = self._medians.get(size)
        if median is not None and median.value:
            return self._factor * median.value
        # What is known of means over more batches: of fewer they may be larger, at most by the root.
        for more in range(size + 1, size + 17):
            median = self._medians.get(more)
            if median is not None and median.value:
                return self._factor * median.value * math.sqrt(2 ** (more - size))
        return math.inf

    def learn(self, norm: float, batches: int) -> None:
        if not self.is_auto:
            return
        median = self._medians.get(batches.bit_length())
        if median is None:
            median = self._medians[batches.bit_length()] = Median()
        median.add(norm)

    def widen(self, norm: float, batches: int) -> None:
        """So large a norm is honest: from now on nobody wonders at it."""
        self._factor *= max(1.0, 2 * norm / self.of(batches))


@dataclass(frozen=True, slots=True)
class Suspect:
    """An update that was refused: of whom, for what, and how large a mean gradient it would be."""

    node: str
    span: Span
    norm: float
    where: str


@dataclass(frozen=True, slots=True)
class Fault:
    """An update that was bad although the batches were good; the how manieth of its node."""

    node: str
    where: str
    count: int


@dataclass(slots=True)
class _Case:
    """A step of which an update was refused."""

    suspects: list[Suspect] = field(default_factory=list)
    # Norms of what was taken since.
    taken: dict[Span, float] = field(default_factory=dict)


class Judge:
    """Doubts, hears second opinions, and counts faults."""

    def __init__(self, max_norm: str) -> None:
        self._limit = NormLimit(max_norm)
        self._cases: dict[int, _Case] = {}
        self._faults: dict[str, int] = {}

    def joined(self, node: str) -> None:
        """Its faults go on to count, unless it was turned out for them and somebody has let it in again."""
        if self._faults.get(node, 0) >= FAULTS_MAX:
            del self._faults[node]

    def doubt(self, lease: Lease, norm: float, *, is_alone: bool) -> str:
        """Why an update of this norm is not to be taken, or nothing."""
        # Of a stretch it is the largest of its batches' norms.
        batches = 1 if lease.step.apart else lease.span.count
        mean = _mean(lease, norm)
        limit = self._limit.of(batches)
        if mean > limit:
            if not self._is_confirmed(lease, mean, is_alone=is_alone):
                return f"its norm is {mean:.3g}, and {limit:.3g} is the most that is believed"
            self._limit.widen(mean, batches)
        # The first of a limit's numbers must not be zero: nothing would be usual.
        if mean:
            self._limit.learn(mean, batches)
        case = self._cases.get(lease.step.index) if self._cases else None
        if case is not None:
            case.taken[lease.span] = mean
        return ""

    def _is_confirmed(self, lease: Lease, mean: float, *, is_alone: bool) -> bool:
        """Whether somebody else (or, if nobody is there, the same node again) found the batch as large."""
        case = self._cases.get(lease.step.index)
        if case is None or not self._limit.is_auto:
            return False
        return any(
            suspect.span == lease.span
            and (suspect.node != lease.node or is_alone)
            and mean / AGREE_FACTOR <= suspect.norm <= mean * AGREE_FACTOR
            for suspect in case.suspects
        )

    def needs_another(self, lease: Lease, *, is_alone: bool) -> bool:
        """Whether only one node was refused for just this, as too large: a second may find the same."""
        case = self._cases.get(lease.step.index)
        if case is None or is_alone or not self._limit.is_auto:
            return False
        who = {each.node for each in case.suspects if each.span == lease.span and each.norm < math.inf}
        return len(who) == 1

    def refused(self, lease: Lease, norm: float) -> None:
        """An update for this lease was not usable: infinite, or larger than is believed."""
        case = self._cases.setdefault(lease.step.index, _Case())
        case.suspects.append(Suspect(lease.node, lease.span, _mean(lease, norm), lease.where))

    def close(self, step: int, shares: list[Share]) -> list[Fault]:
        """The step is complete: whose updates were refused although all of their batches are good?"""
        case = self._cases.pop(step, None)
        if case is None:
            return []
        return [self._fault(suspect) for suspect in case.suspects if _is_at_fault(suspect, case, shares)]

    def doubts(self, step: int) -> bool:
        """Whether an update for this step was refused."""
        return step in self._cases

    def _fault(self, suspect: Suspect) -> Fault:
        count = self._faults[suspect.node] = self._faults.get(suspect.node, 0) + 1
        return Fault(suspect.node, suspect.where, count)


def _mean(lease: Lease, norm: float) -> float:
    """The norm of the mean gradient of its batches; a step of one lease is one already."""
    is_whole = lease.step.apart or lease.span.count == lease.step.count
    return norm if is_whole else norm * lease.step.samples / lease.samples


def _is_at_fault(suspect: Suspect, case: _Case, shares: list[Share]) -> bool:
    """Others gave every batch of it, and what they gave is far from what it gave."""
    span = suspect.span
    inside = [share for share in shares if share[0] < span.stop and share[1] > span.start]
    if any(node == suspect.node for _, _, node, _ in inside):
        return False
    covered = sum(min(stop, span.stop) - max(start, span.start) for start, stop, _, _ in inside)
    if covered < span.count:
        return False  # some of it was set aside: it was the data
    if suspect.norm == math.inf:
        return True
    # No mean is larger than the largest of its parts; of what we do not know, nothing is said.
    norms = [case.taken.get(Span(start, stop), math.inf) for start, stop, _, _ in inside]
    return suspect.norm > AGREE_FACTOR * max(norms, default=math.inf)
