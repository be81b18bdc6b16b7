"""RobustMode: with `--robust` every node is lent a like part of every step, whatever its speed.

A robust mean gives each node of a step one voice, so the more take part, the better; and speed, which a liar
can have for nothing, must buy nobody else's part. So nodes take no turns, nobody computes what another holds
before that one is long overdue, and where nodes are missing that the mean needs, the others wait for a while.
Only a node many times slower than most is left out, while enough others are there.
Only decides: knows no tensors and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from w5xde.control.modes.sync import PROBE_FACTOR, WINDOW_LEASES, SyncMode
from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import Plan
from w5xde.robust_rule import Robust

# How long nothing is lent when there are fewer nodes than the mean needs: they join, and come back, at their
# own pace, and one of them alone would have done a step of a small model before the next is there.
GATHERING_SECONDS = 10.0
# How late a node may be before others compute its part, or no part is kept for it. Long, because a step with
# fewer nodes than the mean needs is worse than a late one; shorter than the silence of a dead node.
PATIENCE_SECONDS = 5.0
# A lease must also be late by this many times what it should take.
OVERDUE_FACTOR = 2.0
# Nodes this many times slower than the median are left out.
CRAWL_FACTOR = 8.0


class RobustMode(SyncMode):
    """One step at a time, in like parts for all."""

    def __init__(self, plan: Plan, members: Members, leases: Leases, rule: Robust) -> None:
        super().__init__(plan, members, leases)
        self._needs = rule.needs
        # Since when there are too few, but some; until a step was made with enough.
        self._short_since: float | None = None

    def grants(self, candidates: Iterable[Member], version: int, now: float) -> list[list[Lease]]:
        return [] if self._waits(now) else super().grants(candidates, version, now)

    def _waits(self, now: float) -> bool:
        """Whether more nodes may come soon that are needed."""
        if not self.members or len(self.members) >= self._needs:
            return not self.members
        if self._short_since is None:
            self._short_since = now
        return now - self._short_since <= GATHERING_SECONDS

    def stepped(self, step: int) -> Iterable[Member]:
        # Not as soon as enough are there: one who comes and goes would keep the others waiting for ever.
        if len(self.members) >= self._needs:
            self._short_since = None
        return super().stepped(step)

    def _share(
        self, work: OpenStep, candidates: Iterable[Member], version: int, now: float
    ) -> list[list[Lease]]:
        slow = self._crawlers(now)
        voices = {share[2] for _, shares in work.tree for share in shares}
        voices |= {lease.node for lease in self.leases.of_step(work.plan.index)}
        # Whoever still has something else in hand will come, unless it is too late with that.
        awaited = sum(
            1
            for member in self.members
            if member.pending and member.name not in voices and now - member.free_at <= PATIENCE_SECONDS
        )
        idle = [member for member in candidates if not member.pending and member.name not in slow]
        # If there are more nodes than batches, those who had least come first.
        new = sorted((m for m in idle if m.name not in voices), key=lambda m: m.lent_batches)
        found: list[list[Lease]] = []
        for place, member in enumerate(new):
            voiceless = max(len(new) - place + awaited, self._needs - len(voices))
            found += self._lend_part(member, voiceless, work, version, now)
            voices |= {each[0].node for each in found[-1:]}
        if not awaited:
            for member in idle:
                if not member.pending:
                    found += self._lend_part(member, max(len(self.members), self._needs), work, version, now)
        if not work.free:
            idle = [member for member in idle if not member.pending]
            for member in idle:
                found += self._lend_copy(member, len(idle), work, version, now)
        return found

    def _lend_part(
        self, member: Member, parts: int, work: OpenStep, version: int, now: float
    ) -> list[list[Lease]]:
        """One of so many like parts of what is free, or most of it: a part may be no single span."""
        want = min(-(-work.free_batches // parts), member.batches_max)
        leases: list[Lease] = []
        while want > 0 and len(leases) < WINDOW_LEASES:
            span = work.carve(member.name, want, self.members)
            if span is None:
                break
            want -= span.count
            leases.append(self.lend(member, work, span, version, now))
        return [leases] if leases else []

    def _lend_copy(
        self, member: Member, idle: int, work: OpenStep, version: int, now: float
    ) -> list[list[Lease]]:
        """A part of what somebody else is long overdue with."""
        outstanding = self.leases.of_step(work.plan.index)
        for lease in outstanding:
            patience = max(PATIENCE_SECONDS, OVERDUE_FACTOR * (lease.expected_at - lease.granted_at))
            if lease.node == member.name or now - lease.expected_at <= patience:
                continue
            span = self._part_to_copy(member, lease, idle, outstanding, work)
            if span is not None:
                return [[self.lend(member, work, span, version, now)]]
        return []

    def _crawlers(self, now: float) -> set[str]:
        """Who is too slow to be waited for, while enough others are there; tried again now and then."""
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
