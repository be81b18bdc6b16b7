"""Robust mode: with `--robust`, each node is lent an equal part of every step, whatever its speed.

A robust mean counts each node of a step once, so it is better the more nodes take part. A cheating node that
computes nothing is fast, so speed must not let a node take the part of another one. For these reasons:

- nodes do not take turns;
- a node computes a copy of another node's lease only when that lease is long overdue;
- if there are fewer nodes than the mean needs, nothing is lent for a while, until more have joined;
- a node many times slower than most is left out, as long as enough others are there.

Only decides: knows no tensors, no sockets and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from w5xde.control.modes.sync import PROBE_FACTOR, WINDOW_LEASES, SyncMode
from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import Plan
from w5xde.specs.robust_rule import Robust

# How long nothing is lent while there are fewer nodes than the mean needs: nodes do not join at the same
# moment, and with a small model the first one alone would complete a step before the second has joined.
GATHERING_SECONDS = 10.0
# How late a node may be before other nodes compute its part, or none is kept for it. Long, because a step
# with fewer nodes than the mean needs is worse than a late step; shorter than the silence after which a node
# counts as dead.
PATIENCE_SECONDS = 5.0
# A lease is copied only if it is also late by this many times its expected time.
OVERDUE_FACTOR = 2.0
# Nodes this many times slower than the median are left out.
CRAWL_FACTOR = 8.0


class RobustMode(SyncMode):
    """One step at a time, lent in equal parts to all nodes."""

    def __init__(self, plan: Plan, members: Members, leases: Leases, rule: Robust) -> None:
        super().__init__(plan, members, leases)
        self._needs = rule.needs
        # Since when there are some nodes, but fewer than needed; None again after a step with enough nodes.
        self._short_since: float | None = None

    def grants(self, candidates: Iterable[Member], version: int, now: float) -> list[list[Lease]]:
        return [] if self._must_wait_for_nodes(now) else super().grants(candidates, version, now)

    def _must_wait_for_nodes(self, now: float) -> bool:
        """Whether nothing is lent yet, because the nodes that the mean needs may still join."""
        if not self.members or len(self.members) >= self._needs:
            return not self.members
        if self._short_since is None:
            self._short_since = now
        return now - self._short_since <= GATHERING_SECONDS

    def stepped(self, step: int) -> Iterable[Member]:
        # Not as soon as enough nodes are there: one that joins and leaves again and again would make the
        # others wait for ever.
        if len(self.members) >= self._needs:
            self._short_since = None
        return super().stepped(step)

    def _lend_step(
        self, open_step: OpenStep, candidates: Iterable[Member], version: int, now: float
    ) -> list[list[Lease]]:
        # A batch that failed may be left for just the node that is slow.
        too_slow = set() if open_step.failures else self._nodes_too_slow(now)
        taking_part = {share[2] for _, shares in open_step.tree for share in shares}
        taking_part |= {lease.node for lease in self.leases.of_step(open_step.plan.index)}
        # A node that still computes something else will take part, unless it is too late with that.
        awaited = sum(
            1
            for member in self.members
            if member.pending and member.name not in taking_part and now - member.free_at <= PATIENCE_SECONDS
        )
        idle = [member for member in candidates if not member.pending and member.name not in too_slow]
        # If there are more nodes than batches, those that were lent fewest batches so far come first.
        new = sorted((m for m in idle if m.name not in taking_part), key=lambda m: m.lent_batches)
        found: list[list[Lease]] = []
        for place, member in enumerate(new):
            parts = max(len(new) - place + awaited, self._needs - len(taking_part))
            found += self._lend_part(member, parts, open_step, version, now)
            taking_part |= {each[0].node for each in found[-1:]}
        if not awaited:
            for member in idle:
                if not member.pending:
                    found += self._lend_part(
                        member, max(len(self.members), self._needs), open_step, version, now
                    )
        if not open_step.free:
            idle = [member for member in idle if not member.pending]
            for member in idle:
                found += self._lend_copy(member, len(idle), open_step, version, now)
        return found

    def _lend_part(
        self, member: Member, parts: int, open_step: OpenStep, version: int, now: float
    ) -> list[list[Lease]]:
        """Lend the member one of `parts` equal parts of the free batches.

        A part may consist of several spans; if it has more than the member may hold, the member gets fewer.
        """
        want = min(-(-open_step.free_batches // parts), member.batches_max // open_step.plan.leaf_batches)
        leases: list[Lease] = []
        while want > 0 and len(leases) < WINDOW_LEASES:
            span = open_step.take_free_span(member.name, want, self.members)
            if span is None:
                break
            want -= span.count
            leases.append(self.lend(member, open_step, span, version, now))
        return [leases] if leases else []

    def _lend_copy(
        self, member: Member, idle: int, open_step: OpenStep, version: int, now: float
    ) -> list[list[Lease]]:
        """Lend the member a copy of a lease that another node is long overdue with, or of a part of it."""
        outstanding = self.leases.of_step(open_step.plan.index)
        for lease in outstanding:
            patience = max(PATIENCE_SECONDS, OVERDUE_FACTOR * (lease.expected_at - lease.granted_at))
            if lease.node == member.name or now - lease.expected_at <= patience:
                continue
            span = self._part_to_copy(member, lease, idle, outstanding, open_step)
            if span is not None:
                return [[self.lend(member, open_step, span, version, now)]]
        return []

    def _nodes_too_slow(self, now: float) -> set[str]:
        """The names of the nodes that are too slow to be waited for, if enough others are there.

        A node that was idle for long enough is not among them: it is tried again.
        """
        known = sorted(member.batch_seconds for member in self.members if member.batch_seconds is not None)
        if len(known) <= self._needs:
            return set()
        limit = CRAWL_FACTOR * known[len(known) // 2]
        if sum(1 for each in known if each <= limit) < self._needs:
            return set()
        return {
            member.name
            for member in self.members
            if member.batch_seconds is not None
            and member.batch_seconds > limit
            and now - member.idle_since <= PROBE_FACTOR * member.batch_seconds
        }
