"""Sync mode: one step at a time. Each node is lent spans of it, as large as its measured speed allows.

In rounds mode, one round at a time, of which each node is lent columns: read "round" for "step", and "column"
for "batch". Only decides: knows no tensors, no sockets and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from w5xde.control.modes.base import SOONER, Mode, share_of
from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import Plan
from w5xde.tree import Span, halves

# One lease that the node computes and one that waits there, so that the node never waits for a round trip.
# With a large model a node holds only one: a round trip is short compared with the transfer of an update, and
# an idle node would copy a lease that waits.
WINDOW_LEASES = 2
# A lease shorter than this costs more to send than to compute.
LEASE_SECONDS_MIN = 0.002
# An idle node computes a copy of a lease if it should be faster by this factor and margin ...
COPY_FACTOR = 1.5
COPY_MARGIN_SECONDS = 0.005
# ... or if the lease is overdue: by half of its expected time, and at least by this much.
OVERDUE_SECONDS_MIN = 0.05
# A node that is this late may be stuck: a batch that failed on other nodes is not kept for it.
STUCK_SECONDS = 10.0
# A node this many times slower than the pool's mean is lent a batch only if it would finish in time.
SLOW_FACTOR = 2.0
# Spans are powers of two: a share that this factor lifts to the next power is rounded up to it.
SHARE_SLACK = 1.15
# A node that is left out for its speed is tried again when it was idle for this many times its batch time.
PROBE_FACTOR = 4.0


class SyncMode(Mode):
    """One step at a time, lent by speed. Idle nodes also compute copies of the spans that will be last."""

    def __init__(self, plan: Plan, members: Members, leases: Leases, *, is_large: bool = False) -> None:
        super().__init__(plan, members, leases)
        self._is_large = is_large
        self._open_step: OpenStep | None = None
        self._applying: int | None = None

    @property
    def open_steps(self) -> list[OpenStep]:
        return [self._open_step] if self._open_step is not None else []

    @property
    def is_settled(self) -> bool:
        return self._applying is None and (self._open_step is None or self._is_given_up(self._open_step))

    def _is_given_up(self, open_step: OpenStep) -> bool:
        """Whether the run is asked to stop, and the step was not begun or no node is left to finish it."""
        return self.is_closing and (open_step.is_untouched or not self.members)

    def admit(self, lease: Lease) -> str:
        open_step = self._open_step
        if open_step is None or open_step.plan.index != lease.step.index:
            return f"step {lease.step.index} is complete"
        if open_step.tree.covers(lease.span):
            return SOONER
        return ""

    def take(self, lease: Lease) -> OpenStep | None:
        open_step = self._open_step
        if open_step is None:
            raise ValueError(f"no step is open for lease {lease.id}")
        return self._completed(open_step) if open_step.take(lease.span, [share_of(lease)]) else None

    def set_aside(self, step: int, span: Span) -> OpenStep | None:
        open_step = self._open_step
        if open_step is None or open_step.plan.index != step:
            raise ValueError(f"step {step} is not open")
        return self._completed(open_step) if open_step.take(span, []) else None

    def _completed(self, open_step: OpenStep) -> OpenStep:
        self._open_step, self._applying = None, open_step.plan.index
        return open_step

    def give_back(self, lease: Lease, *, failed: bool = False, divided: bool = False) -> OpenStep | None:
        open_step = self._open_step
        if open_step is None or open_step.plan.index != lease.step.index:
            return None
        others = self.leases.of_step(lease.step.index)
        if failed:
            open_step.failed(lease.span, lease.node, others)
        elif divided:
            open_step.divide(lease.span, others)
        else:
            open_step.give_back(lease.span, others)
        return open_step

    def stepped(self, step: int) -> Iterable[Member]:
        if step != self._applying:
            raise ValueError(f"step {step} was applied while {self._applying} was expected")
        self._applying = None
        return self.members

    def reopen(self, open_step: OpenStep) -> None:
        self._open_step, self._applying = open_step, None

    def loaded(self, machine: str, load: float) -> None:
        """Do nothing: nodes and coordinator do not compute at the same time in this mode."""

    def overtake(self, now: float) -> None:
        """Do nothing: `grants` already offers late spans to idle nodes."""

    def grants(self, candidates: Iterable[Member], version: int, now: float) -> list[list[Lease]]:
        if self._applying is not None:
            return []
        if self._open_step is None:
            step = None if self.is_closing else self.plan.next_step()
            if step is None:
                return []
            self._open_step = OpenStep(step)
            candidates = self.members
        if self._is_given_up(self._open_step):
            return []
        able = [member for member in candidates if self._open_step.fits(member)]
        return self._lend_step(self._open_step, able, version, now)

    def _lend_step(
        self, open_step: OpenStep, candidates: Iterable[Member], version: int, now: float
    ) -> list[list[Lease]]:
        """Lend free spans of the step to these members by speed, then copies of late ones to idle members."""
        found: list[list[Lease]] = []
        # After a failure members are also lent batches out of turn: the one on which a batch has not failed
        # may not be in turn.
        eligible = candidates if open_step.failures else self.members.in_turn(candidates, now)
        ordered = sorted(
            filter(open_step.fits, eligible),
            key=lambda m: max(now, m.free_at) + self._leaf_seconds(m, open_step),
        )
        # A member that is not measured yet counts as fast as the mean: otherwise the first one that is
        # measured would be lent the whole step.
        working = self.members.in_turn(self.members, now)
        seconds = [(m.free_at, self._leaf_seconds(m, open_step)) for m in working]
        pool_rate = sum(1.0 / each for _, each in seconds if each)
        busy = sum(max(0.0, free_at - now) / each for free_at, each in seconds if each)
        responsive = self._responsive(now) if open_step.failures else self.members
        for held in range(1 if self._is_large else WINDOW_LEASES):
            for member in ordered:
                if not open_step.free:
                    break
                if len(member.pending) != held or (held and member.batch_seconds is None):
                    continue
                if not self._is_in_time(member, working, open_step, now):
                    continue
                share = self._batches_to_lend(
                    member, (open_step.free_batches + busy) / pool_rate if pool_rate else 0.0, now
                )
                span = open_step.take_free_span(member.name, share, responsive)
                if span is not None:
                    busy += span.count
                    found.append([self.lend(member, open_step, span, version, now)])
        # Late spans are copied even if free ones are left that failed and are kept for members that are busy.
        if not open_step.free or (open_step.failures and not found):
            idle = [member for member in candidates if not member.pending]
            for member in idle:
                copy = self._find_span_to_copy(member, len(idle), open_step, now, in_turn=member in ordered)
                if copy is not None:
                    found.append([self.lend(member, open_step, copy, version, now)])
        return found

    def _responsive(self, now: float) -> list[Member]:
        """The members that a failed batch may wait for: not those that beat, but are long overdue."""
        return [m for m in self.members if not m.pending or now - m.free_at <= STUCK_SECONDS]

    @staticmethod
    def _batches_to_lend(member: Member, finish_seconds: float, now: float) -> int:
        """How many batches the member can compute until the pool finishes, rounded down to a power of two."""
        # A guess is not trusted with more than one batch: if it is wrong, the first member would be lent the
        # whole step while the others wait.
        if not member.batch_seconds or member.is_guessed:
            return 1
        share = int((finish_seconds - max(0.0, member.free_at - now)) * member.rate * SHARE_SLACK)
        share = min(max(share, int(LEASE_SECONDS_MIN / member.batch_seconds), 1), member.batches_max)
        return 1 << (share.bit_length() - 1)

    def _leaf_seconds(self, member: Member, open_step: OpenStep) -> float:
        """How long the member takes for one leaf of the step's tree: a batch, or a column of a round."""
        return open_step.plan.leaf_batches * self.members.expected_batch_seconds(member)

    def _is_in_time(self, member: Member, working: list[Member], open_step: OpenStep, now: float) -> bool:
        """Whether the member would finish one more batch before the others have finished all of them."""
        own_seconds, leaf = self._leaf_seconds(member, open_step), open_step.plan.leaf_batches
        pool_rate = sum(other.rate for other in working) / leaf
        # No member is left out because of a guess.
        if member.is_guessed or open_step.failures or own_seconds * pool_rate <= SLOW_FACTOR * len(working):
            return True
        others_rate = pool_rate - member.rate / leaf
        if others_rate <= 0:
            return True
        if not member.pending and now - member.idle_since > PROBE_FACTOR * own_seconds:
            return True  # it may have been slow only once; if it is slow again, its batch is copied in time
        batches = open_step.free_batches + sum(
            max(0.0, other.free_at - now) * other.rate / leaf for other in working if other is not member
        )
        soonest = min(
            max(0.0, other.free_at - now) + self._leaf_seconds(other, open_step)
            for other in working
            if other is not member
        )
        return max(0.0, member.free_at - now) + own_seconds <= max(batches / others_rate, soonest)

    def _find_span_to_copy(
        self, member: Member, idle: int, open_step: OpenStep, now: float, *, in_turn: bool
    ) -> Span | None:
        """Find the span of another node's lease that most needs a copy which this idle member can compute.

        A member that is not in turn has no core of its own: it copies only leases that are overdue.
        """
        own_seconds = self._leaf_seconds(member, open_step)
        best: Span | None = None
        latest = 0.0
        outstanding = self.leases.of_step(open_step.plan.index)
        for lease in outstanding:
            left = lease.expected_at - now
            overdue = max(OVERDUE_SECONDS_MIN, 0.5 * (lease.expected_at - lease.granted_at))
            # A cheap test first: most leases are neither late nor long.
            is_long = in_turn and left > own_seconds * COPY_FACTOR + COPY_MARGIN_SECONDS
            if lease.node == member.name or not (is_long or -left > overdue):
                continue
            span = self._part_to_copy(member, lease, idle, outstanding, open_step)
            if span is None:
                continue
            # A member on which the span failed tries it again only if the lease is overdue.
            may_be_sooner = in_turn and member.name not in open_step.failures.get(span, ())
            is_sooner = may_be_sooner and left > span.count * own_seconds * COPY_FACTOR + COPY_MARGIN_SECONDS
            if (is_sooner or -left > overdue) and abs(left) > latest:
                best, latest = span, abs(left)
        return best

    def _part_to_copy(
        self, member: Member, lease: Lease, idle: int, outstanding: list[Lease], open_step: OpenStep
    ) -> Span | None:
        """The part of a lease for this member to copy, one of `idle` parts; None if all have a copy."""
        spans = [lease.span]
        while spans[0].count > 1 and (len(spans) < idle or spans[0].count > member.batches_max):
            spans = [half for span in spans for half in (halves(span) if span.count > 1 else (span,))]
        for span in spans:
            if open_step.tree.covers(span) or open_step.is_for_others(
                member.name, span, self.members, lease.node
            ):
                continue
            holders = sum(1 for other in outstanding if other.span.meets(span))
            if holders < 2:
                return span
        return None
