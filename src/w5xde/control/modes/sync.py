"""Sync mode: one step at a time, split along the canonical tree and shared out by measured speed.

Only decides: touches no tensors, no sockets and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from w5xde.control.modes.base import Mode, share_of
from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import Plan
from w5xde.tree import Span, halves

# One lease being computed and one waiting, so that a node never waits for a round trip. Of a large model that
# is nothing to what its update takes, and a lease that waits is one that somebody idle would copy.
WINDOW_LEASES = 2
# A lease shorter than this costs more to send than to compute.
LEASE_SECONDS_MIN = 0.002
# A copy of a lease must promise to be sooner by this factor and margin, or replace one that is this late.
COPY_FACTOR = 1.5
COPY_MARGIN_SECONDS = 0.005
OVERDUE_SECONDS_MIN = 0.05
# Who is so much later than expected may be stuck: what failed elsewhere does not wait for it.
STUCK_SECONDS = 10.0
# Nodes slower than this many times the pool's mean are asked whether they would finish in time.
SLOW_FACTOR = 2.0
# Spans are powers of two: a share this little short of the next one is rounded up to it.
SHARE_SLACK = 1.15
# One that is left out is tried again after this many times what a batch took it.
PROBE_FACTOR = 4.0


class SyncMode(Mode):
    """One step at a time, shared out by speed; the last spans are also lent to whoever is idle."""

    def __init__(self, plan: Plan, members: Members, leases: Leases, *, is_large: bool = False) -> None:
        super().__init__(plan, members, leases)
        self._is_large = is_large
        self._work: OpenStep | None = None
        self._applying: int | None = None

    @property
    def open_works(self) -> list[OpenStep]:
        return [self._work] if self._work is not None else []

    @property
    def is_settled(self) -> bool:
        # A step that nobody is left to finish is given up when the run is asked to stop.
        abandoned = self.is_closing and not self.members
        return self._applying is None and (self._work is None or abandoned)

    def admit(self, lease: Lease, version: int) -> str:
        work = self._work
        if work is None or work.plan.index != lease.step.index:
            return f"step {lease.step.index} is complete"
        if work.tree.covers(lease.span):
            return "somebody else was sooner"
        return ""

    def take(self, lease: Lease) -> OpenStep | None:
        work = self._work
        if work is None:
            raise ValueError(f"no step is open for lease {lease.id}")
        return self._completed(work) if work.take(lease.span, [share_of(lease)]) else None

    def set_aside(self, step: int, span: Span) -> OpenStep | None:
        work = self._work
        if work is None or work.plan.index != step:
            raise ValueError(f"step {step} is not open")
        return self._completed(work) if work.take(span, []) else None

    def _completed(self, work: OpenStep) -> OpenStep:
        self._work, self._applying = None, work.plan.index
        return work

    def give_back(self, lease: Lease, *, failed: bool = False) -> OpenStep | None:
        work = self._work
        if work is None or work.plan.index != lease.step.index:
            return None
        others = self.leases.of_step(lease.step.index)
        if failed:
            work.failed(lease.span, lease.node, others)
        else:
            work.give_back(lease.span, others)
        return work

    def stepped(self, step: int) -> Iterable[Member]:
        if step != self._applying:
            raise ValueError(f"step {step} was applied while {self._applying} was expected")
        self._applying = None
        return self.members

    def reopen(self, work: OpenStep) -> None:
        self._work, self._applying = work, None

    def loaded(self, machine: str, load: float) -> None:
        """Nothing to do: the nodes wait while a step is applied, and the other way round."""

    def overtake(self, now: float) -> None:
        """Nothing to look for: idle nodes are offered late spans whenever they ask."""

    def grants(self, candidates: Iterable[Member], version: int, now: float) -> list[list[Lease]]:
        if self._applying is not None:
            return []
        if self._work is None:
            step = None if self.is_closing else self.plan.next_step()
            if step is None:
                return []
            self._work = OpenStep(step)
            candidates = self.members
        return self._share(self._work, candidates, version, now)

    def _share(
        self, work: OpenStep, candidates: Iterable[Member], version: int, now: float
    ) -> list[list[Lease]]:
        """Who of these is lent which part of the step, by speed."""
        found: list[list[Lease]] = []
        # What failed may be for somebody else to try, who would not be in turn.
        eligible = candidates if work.failures else self.members.in_turn(candidates, now)
        ordered = sorted(
            eligible,
            key=lambda m: max(now, m.free_at) + self.members.expected_batch_seconds(m),
        )
        # Whoever is not measured yet counts as fast as the others, or the first known would take it all.
        working = self.members.in_turn(self.members, now)
        seconds = [(m.free_at, self.members.expected_batch_seconds(m)) for m in working]
        pool_rate = sum(1.0 / each for _, each in seconds if each)
        busy = sum(max(0.0, free_at - now) / each for free_at, each in seconds if each)
        able = self._able(now) if work.failures else self.members
        for held in range(1 if self._is_large else WINDOW_LEASES):
            for member in ordered:
                if not work.free:
                    break
                if len(member.pending) != held or (held and member.batch_seconds is None):
                    continue
                if not self._is_in_time(member, working, work, now):
                    continue
                share = self._fair_share(
                    member, (work.free_batches + busy) / pool_rate if pool_rate else 0.0, now
                )
                span = work.carve(member.name, share, able)
                if span is not None:
                    busy += span.count
                    found.append([self.lend(member, work, span, version, now)])
        # What failed and is for somebody else, who is busy, must not keep what is late from being copied.
        if not work.free or (work.failures and not found):
            idle = [member for member in candidates if not member.pending]
            for member in idle:
                copy = self._worth_copying(member, len(idle), work, now, in_turn=member in ordered)
                if copy is not None:
                    found.append([self.lend(member, work, copy, version, now)])
        return found

    def _able(self, now: float) -> list[Member]:
        """Who may be waited for: not who beats, and is long overdue with what it holds."""
        return [m for m in self.members if not m.pending or now - m.free_at <= STUCK_SECONDS]

    @staticmethod
    def _fair_share(member: Member, together: float, now: float) -> int:
        """A power of two of batches: what the member can take if all are done `together`, in seconds."""
        # By a guess nobody is lent much: whoever came first would take a whole step, and the others wait.
        if not member.batch_seconds or member.is_guessed:
            return 1
        share = int((together - max(0.0, member.free_at - now)) * member.rate * SHARE_SLACK)
        share = min(max(share, int(LEASE_SECONDS_MIN / member.batch_seconds), 1), member.batches_max)
        return 1 << (share.bit_length() - 1)

    def _is_in_time(self, member: Member, working: list[Member], work: OpenStep, now: float) -> bool:
        """Whether the member would be done with one more batch before the others were done with all."""
        mine = self.members.expected_batch_seconds(member)
        pool_rate = sum(other.rate for other in working)
        # A guess is no reason to leave anybody out.
        if member.is_guessed or work.failures or mine * pool_rate <= SLOW_FACTOR * len(working):
            return True
        others_rate = pool_rate - member.rate
        if others_rate <= 0:
            return True
        if not member.pending and now - member.idle_since > PROBE_FACTOR * mine:
            return True  # it may have been slow for once; if not, somebody copies the batch in time
        batches = work.free_batches + sum(
            max(0.0, other.free_at - now) * other.rate for other in working if other is not member
        )
        soonest = min(
            max(0.0, other.free_at - now) + self.members.expected_batch_seconds(other)
            for other in working
            if other is not member
        )
        return max(0.0, member.free_at - now) + mine <= max(batches / others_rate, soonest)

    def _worth_copying(
        self, member: Member, idle: int, work: OpenStep, now: float, *, in_turn: bool
    ) -> Span | None:
        """A span somebody else holds which this idle member would give sooner, the latest one first.

        One that is not in turn has no core to itself: it only steps in for somebody who is overdue.
        """
        mine = self.members.expected_batch_seconds(member)
        best: Span | None = None
        latest = 0.0
        outstanding = self.leases.of_step(work.plan.index)
        for lease in outstanding:
            left = lease.expected_at - now
            overdue = max(OVERDUE_SECONDS_MIN, 0.5 * (lease.expected_at - lease.granted_at))
            # Most are neither late nor long: then nothing of them is looked at.
            is_long = in_turn and left > mine * COPY_FACTOR + COPY_MARGIN_SECONDS
            if lease.node == member.name or not (is_long or -left > overdue):
                continue
            span = self._part_to_copy(member, lease, idle, outstanding, work)
            if span is None:
                continue
            # Where it failed already, it is tried again only if nobody else gets on with it.
            may_be_sooner = in_turn and member.name not in work.failures.get(span, ())
            is_sooner = may_be_sooner and left > span.count * mine * COPY_FACTOR + COPY_MARGIN_SECONDS
            if (is_sooner or -left > overdue) and abs(left) > latest:
                best, latest = span, abs(left)
        return best

    def _part_to_copy(
        self, member: Member, lease: Lease, idle: int, outstanding: list[Lease], work: OpenStep
    ) -> Span | None:
        """Several idle nodes share a long lease between them; nothing is copied twice."""
        spans = [lease.span]
        while spans[0].count > 1 and (len(spans) < idle or spans[0].count > member.batches_max):
            spans = [half for span in spans for half in (halves(span) if span.count > 1 else (span,))]
        for span in spans:
            if work.tree.covers(span) or work.is_for_others(member.name, span, self.members, lease.node):
                continue
            holders = sum(1 for other in outstanding if other.span.meets(span))
            if holders < 2:
                return span
        return None
