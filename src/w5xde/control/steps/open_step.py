"""A step in progress: which of its batches are free, which are in, and who gave them.

Knows no sockets, tensors or clocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import StepPlan
from w5xde.tree import PairwiseTree, Span, halves

# A batch is set aside after so many failures, on more than half of the nodes, but never on more than so many:
# a few that lie, or are broken, do not speak for all; and what is bad need not fail in the whole of a crowd.
ATTEMPTS_MAX = 3
WITNESSES_MAX = 5

# Batches `start` up to `stop` of a step, the node that gave them, and its lease.
Share = tuple[int, int, str, int]


class OpenStep:
    """A step in progress: which of its spans are free, which are in, and who gave them."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.tree: PairwiseTree[list[Share]] = PairwiseTree(plan.count, list.__add__)
        self.free = [Span(0, plan.count)]
        self.free_batches = plan.count
        # Spans that failed, and on which nodes; afterwards batches are lent one by one to find the culprit.
        self.failures: dict[Span, list[str]] = {}
        self.returned: set[Span] = set()
        # Of a stretch: the version that all that is in was computed on, or less by what comes before it.
        self.oldest = sys.maxsize

    @classmethod
    def again(cls, plan: StepPlan, empty: Iterable[Span]) -> OpenStep:
        """The step from its beginning; what was set aside of it stays so."""
        work = cls(plan)
        work.free, work.free_batches = [], 0
        for span in empty:
            work.tree.put(span, [])
        work.give_back(Span(0, plan.count), ())
        return work

    def carve(self, node: str, want: int, members: Iterable[Member]) -> Span | None:
        """Take an aligned span of at most `want` batches from what is free, lowest first.

        Not one that failed there and is for somebody else of these `members` to try.
        """
        want = 1 if self.failures else max(1, want)
        for at, candidate in enumerate(self.free):
            if self.is_for_others(node, candidate, members):
                continue
            span = candidate
            while span.count > want:
                span, rest = halves(span)
                self.free[at] = rest
                self.free.insert(at, span)
            del self.free[at]
            self.free_batches -= span.count
            return span
        return None

    def is_for_others(self, node: str, span: Span, members: Iterable[Member], holder: str = "") -> bool:
        """Whether the span failed here, and less often on somebody else who is there and does not hold it."""
        tried = self.failures.get(span, ())
        here = tried.count(node) if node in tried else 0
        return here > 0 and any(m.name != holder and tried.count(m.name) < here for m in members)

    def give_back(self, span: Span, leases: Iterable[Lease]) -> int:
        """Free what of the span is neither in nor in other hands; returns how many batches that is."""
        if self.tree.covers(span) or any(lease.span.holds(span) for lease in leases):
            return 0
        if any(free.holds(span) for free in self.free):
            return 0
        parts = [held for held, _ in self.tree] + [lease.span for lease in leases]
        if span.count > 1 and any(span.holds(part) for part in parts):
            return sum(self.give_back(half, leases) for half in halves(span))
        self.free = sorted([free for free in self.free if not span.holds(free)] + [span])
        self.free_batches = sum(free.count for free in self.free)
        self.returned.add(span)
        return span.count

    def failed(self, span: Span, node: str, leases: Iterable[Lease]) -> None:
        """The span failed on a node: offer it again, batch by batch."""
        self.failures.setdefault(span, []).append(node)
        for batch in range(span.start, span.stop):
            self.failures.setdefault(Span(batch, batch + 1), [])
            self.give_back(Span(batch, batch + 1), leases)

    def doubt(self, span: Span, node: str) -> None:
        """What the node gave for the span was refused: each of its batches is for somebody else to try."""
        for batch in range(span.start, span.stop) if span.count > 1 else ():
            self.failures.setdefault(Span(batch, batch + 1), []).append(node)

    def is_hopeless(self, span: Span, members: Members, leases: Iterable[Lease]) -> bool:
        """Whether the batch has failed often enough, everywhere it could be tried, and nobody still tries."""
        tried = self.failures.get(span, [])
        # Of several batches one may be bad: which, is found out one by one.
        if span.count > 1 or len(tried) < ATTEMPTS_MAX or self.tree.covers(span):
            return False
        if any(lease.span.holds(span) for lease in leases):
            return False
        return len(set(tried)) >= witnesses_of(len(members)) or not self._others_may_try(span, members)

    def take(self, span: Span, shares: list[Share]) -> bool:
        """What was to come for the span is here, or (no shares) never will be; returns if that was all."""
        self.tree.put(span, shares)
        # What this answer covers need not be lent any more.
        self.free = [free for free in self.free if not span.holds(free)]
        self.free_batches = sum(free.count for free in self.free)
        return self.tree.is_complete

    def _others_may_try(self, span: Span, members: Members) -> bool:
        tried = self.failures.get(span, ())
        return any(member.name not in tried for member in members)


def witnesses_of(nodes: int) -> int:
    """On how many of so many nodes a batch must have failed before it is called bad."""
    return min(nodes // 2 + 1, WITNESSES_MAX)
