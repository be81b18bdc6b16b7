"""An open step: which of its batches are free, which are answered, by which nodes, and where they failed.

Knows no sockets, tensors or clocks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import StepPlan
from w5xde.tree import PairwiseTree, Span, halves

# A batch is set aside after this many failures, and only if more than half of the nodes failed on it, so that
# a few nodes that lie or are broken cannot discard data. In a large pool five nodes are evidence enough.
ATTEMPTS_MAX = 3
FAILING_NODES_MAX = 5

# Batches `start` up to `stop` of a step, the node that computed them, and its lease.
Share = tuple[int, int, str, int]


class OpenStep:
    """A step that is begun and not complete.

    A span of its batches is free (to be lent), lent (the `Leases` know to which node), or covered by the tree
    (answered, or set aside). In a round, read "column" for "batch".
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.tree: PairwiseTree[list[Share]] = PairwiseTree(plan.count, list.__add__)
        self.free = [Span(0, plan.count)]
        self.free_batches = plan.count
        # The nodes on which each span failed. After the first failure batches are lent one by one, to find
        # the bad one.
        self.failures: dict[Span, list[str]] = {}
        self.returned: set[Span] = set()
        # Of the leases whose answers were taken: the fewest `updates`, and the fewest with those added that
        # looking ahead makes up for. And once the step is complete, by how many updates it is late for each.
        self.oldest_updates = sys.maxsize
        self.oldest_corrected = math.inf
        self.staleness = 0
        self.uncorrected = 0.0

    @property
    def is_untouched(self) -> bool:
        """Whether no batch of it was ever lent: then it is only planned, and not begun."""
        return self.free_batches == self.plan.count and not self.returned and not self.failures

    @classmethod
    def restart(cls, plan: StepPlan, empty: Iterable[Span]) -> OpenStep:
        """Begin a step again, with every batch free except the `empty` spans, which were set aside."""
        open_step = cls(plan)
        open_step.free, open_step.free_batches = [], 0
        for span in empty:
            open_step.tree.put(span, [])
        open_step.give_back(Span(0, plan.count), ())
        return open_step

    def fits(self, member: Member) -> bool:
        """Whether the member has memory for a batch; in a round, for a column, which is never divided."""
        return self.plan.leaf_batches <= member.batches_max

    def take_free_span(self, node: str, want: int, members: Iterable[Member]) -> Span | None:
        """Remove the first free aligned span that this node may compute, of at most `want` batches.

        A span that failed on this node is left for those of `members` on which it failed less often. A
        stretch is never divided.
        """
        # The columns of a round are encoded one by one, and so are lent one by one.
        is_single = bool(self.failures or self.plan.columns)
        want = self.plan.count if self.plan.apart else 1 if is_single else max(1, want)
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
        """Whether the span failed on this node, and less often on another member, the `holder` excepted."""
        tried = self.failures.get(span, ())
        here = tried.count(node) if node in tried else 0
        return here > 0 and any(
            m.name != holder and tried.count(m.name) < here and self.fits(m) for m in members
        )

    def give_back(self, span: Span, leases: Iterable[Lease]) -> int:
        """Free the batches of the span that are neither answered nor held by one of these leases.

        Returns the number of batches that were freed.
        """
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
        """Note that the span failed on a node, and free its batches one by one."""
        self.failures.setdefault(span, []).append(node)
        self.divide(span, leases)

    def divide(self, span: Span, leases: Iterable[Lease]) -> None:
        """Free the batches of a span one by one, because one of them is bad."""
        for batch in range(span.start, span.stop):
            self.failures.setdefault(Span(batch, batch + 1), [])
            self.give_back(Span(batch, batch + 1), leases)

    def doubt(self, span: Span, node: str) -> None:
        """Note that we rejected the node's update for a failed span: other nodes try its batches first."""
        for batch in range(span.start, span.stop) if span.count > 1 else ():
            self.failures.setdefault(Span(batch, batch + 1), []).append(node)

    def must_set_aside(self, span: Span, members: Members, leases: Iterable[Lease]) -> bool:
        """Whether this batch failed often enough, on enough nodes or on all, and no lease holds it now."""
        tried = self.failures.get(span, [])
        # Perhaps only one batch of a longer span is bad: they are tried one by one first.
        if span.count > 1 or len(tried) < ATTEMPTS_MAX or self.tree.covers(span):
            return False
        if any(lease.span.holds(span) for lease in leases):
            return False
        return len(set(tried)) >= failing_nodes_required(len(members)) or not self._others_may_try(
            span, members
        )

    def take(self, span: Span, shares: list[Share]) -> bool:
        """Put the shares of a span into the tree, none if it is set aside; return whether all are in."""
        self.tree.put(span, shares)
        # Batches that are covered now need not be lent any more.
        self.free = [free for free in self.free if not span.holds(free)]
        self.free_batches = sum(free.count for free in self.free)
        return self.tree.is_complete

    def _others_may_try(self, span: Span, members: Members) -> bool:
        tried = self.failures.get(span, ())
        return any(member.name not in tried and self.fits(member) for member in members)


def failing_nodes_required(nodes: int) -> int:
    """On how many nodes a batch must fail before it is set aside, in a pool of `nodes`."""
    return min(nodes // 2 + 1, FAILING_NODES_MAX)
