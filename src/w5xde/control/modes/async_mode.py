"""Async mode: every node works on steps of its own, and each answer is applied as it comes.

The bound of staleness is kept by lending, not by refusing: nobody is lent more than what can be applied
before the oldest outstanding answer would be too old. Only one who takes far longer than expected is not
waited for, and may then find its answer refused. Touches no tensors, no sockets and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from w5xde.control.modes.base import Mode, share_of
from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import Plan
from w5xde.tree import Span

# Steps worth about this long travel together; small models would otherwise only send messages.
FRAME_SECONDS = 0.004
FRAME_STEPS_MAX = 64
# The bound if none is set: enough that four frames of some batches are under way, and for everybody.
STALENESS_MIN = 48
STALENESS_OF_ONE = 4
# Weights change most at the start: the first steps lend for a staleness of this, and one more for every so
# many steps, until the bound is reached. Only if the user set no bound.
STALENESS_FIRST, STEPS_PER_STALENESS = 4, 32
# However little was expected, so long may any node be late: another process may just have its core.
LATE_SECONDS_MIN = 0.05
# A node that beats but does not answer for this long (or four times what was expected) is overtaken.
STUCK_SECONDS_MIN = 10.0


class AsyncMode(Mode):
    """Every node works on steps of its own; an answer is applied as it comes, if it is fresh enough."""

    def __init__(
        self,
        plan: Plan,
        members: Members,
        leases: Leases,
        staleness: int | None,
        *,
        stretches: bool = False,
        spare_frames: int = 1,
    ) -> None:
        """With `stretches` the steps of a frame, of one batch each, are one lease.

        A node holds the frame that it computes, and `spare_frames` more.
        """
        super().__init__(plan, members, leases)
        self._bound = staleness
        self._stretches = stretches
        self._spare_frames = spare_frames
        self._works: dict[int, OpenStep] = {}
        self._applying: set[int] = set()
        self._again: deque[OpenStep] = deque()
        self._overtaken: set[int] = set()
        # The staleness for which is lent now.
        self._lent_staleness = 0
        # Who was lent nothing, or less than it could take, until older answers are in; in order.
        self._waiting: dict[str, Member] = {}

    @property
    def staleness(self) -> int:
        """How many steps may have been applied since the version an update was computed on."""
        if self._bound is not None:
            return self._bound
        return max(STALENESS_MIN, STALENESS_OF_ONE * self.members.parallel)

    def _staleness_to_lend(self, version: int) -> int:
        if self._bound is not None:
            return self._bound
        return min(self.staleness, STALENESS_FIRST + version // STEPS_PER_STALENESS)

    @property
    def open_works(self) -> list[OpenStep]:
        return list(self._works.values())

    @property
    def is_settled(self) -> bool:
        return not self._applying and (not self._works or self.is_closing)

    def admit(self, lease: Lease, version: int) -> str:
        work = self._works.get(lease.step.index)
        if work is None:
            return f"step {lease.step.index} is complete"
        if work.tree.covers(lease.span):
            return "somebody else was sooner"
        last = version + lease.behind
        if last - lease.version > self.staleness:
            return f"computed on version {lease.version}, for version {last}; the bound is {self.staleness}"
        return ""

    def take(self, lease: Lease) -> OpenStep | None:
        work = self._works[lease.step.index]
        work.oldest = min(work.oldest, lease.version - lease.behind)
        return self._completed(work) if work.take(lease.span, [share_of(lease)]) else None

    def is_stale(self, work: OpenStep, version: int) -> bool:
        """Whether parts of a complete stretch waited too long for the others."""
        return work.plan.apart and version - work.oldest > self.staleness

    def set_aside(self, step: int, span: Span) -> OpenStep | None:
        work = self._works[step]
        return self._completed(work) if work.take(span, []) else None

    def _completed(self, work: OpenStep) -> OpenStep:
        del self._works[work.plan.index]
        self._applying.add(work.plan.index)
        return work

    def give_back(self, lease: Lease, *, failed: bool = False) -> OpenStep | None:
        work = self._works.get(lease.step.index)
        if work is None:
            return None
        others = self.leases.of_step(lease.step.index)
        if failed:
            work.failed(lease.span, lease.node, others)
        else:
            work.give_back(lease.span, others)
        if work.free:
            self._again.append(work)
        return work

    def stepped(self, step: int) -> Iterable[Member]:
        # Nobody waits for it: the version already counts the step.
        self._applying.discard(step)
        return ()

    def reopen(self, work: OpenStep) -> None:
        self._applying.discard(work.plan.index)
        self._works[work.plan.index] = work
        self._again.append(work)

    def loaded(self, machine: str, load: float) -> None:
        self.members.loaded(machine, load)

    def overtake(self, now: float) -> None:
        self._overtaken = {number for number in self._overtaken if self.leases.holds(number)}
        for lease in self.leases:
            patience = max(STUCK_SECONDS_MIN, 4 * (lease.expected_at - lease.granted_at))
            if now - lease.expected_at > patience and lease.id not in self._overtaken:
                work = self._works.get(lease.step.index)
                if work is not None and not work.free:
                    self._overtaken.add(lease.id)
                    work.give_back(lease.span, ())
                    self._again.append(work)

    def grants(self, candidates: Iterable[Member], version: int, now: float) -> list[list[Lease]]:
        found: list[list[Lease]] = []
        if self.is_closing:
            return found
        self._lent_staleness = self._staleness_to_lend(version)
        # Whoever waits longest is served first; nobody is looked at while there is no room.
        for member in candidates:
            self._waiting.setdefault(member.name, member)
        unserved = []
        while self._waiting and self._room(version, now) > 0:
            member = self._waiting.pop(next(iter(self._waiting)))
            if self.members.get(member.name) is not member:
                continue
            # What came back may be for somebody else to try, who would not be in turn.
            for one in [member] if self._again else self.members.in_turn([member], now):
                found += self._fill(one, version, now)
                if self._held_steps(one) <= self._spare_frames * self._frame_steps(one):
                    unserved.append(one)
        for member in unserved:
            self._waiting[member.name] = member
        return found

    def _fill(self, member: Member, version: int, now: float) -> list[list[Lease]]:
        """As many frames as the member can hold, and as there is room for."""
        found: list[list[Lease]] = []
        frame = self._frame_steps(member)
        while self._held_steps(member) <= self._spare_frames * frame:
            room = self._room(version, now)
            if room < frame and (member.pending or room < 1):
                break
            leases = self._lend_some(member, min(frame, room), version, now)
            if not leases:
                break
            found.append(leases)
        return found

    def _room(self, version: int, now: float) -> int:
        """How many steps may be lent before the oldest outstanding answer would come too late to count.

        A node that takes longer than it should is waited for as long again; then the others go on.
        """
        lent = self.leases.steps
        for oldest in self.leases:
            if now - oldest.expected_at <= max(LATE_SECONDS_MIN, oldest.expected_at - oldest.granted_at):
                return self._lent_staleness + 1 - lent - (version - oldest.version)
            lent -= oldest.steps
        return self._lent_staleness + 1

    def _held_steps(self, member: Member) -> int:
        return member.pending_batches if self._stretches else len(member.pending)

    def _frame_steps(self, member: Member) -> int:
        """How many steps travel together: two such frames for each that can run, half of that to spare."""
        if not member.compute_seconds:
            return 1
        fresh = (self._lent_staleness + 1) // (3 * max(1, self.members.parallel))
        held = member.batches_max // self.plan.step_batches
        return max(1, min(int(FRAME_SECONDS / member.compute_seconds), fresh, held, FRAME_STEPS_MAX))

    def _lend_some(self, member: Member, count: int, version: int, now: float) -> list[Lease]:
        """Leases for so many steps."""
        leases: list[Lease] = []
        while count > 0:
            found = self._next_span(member, count)
            if found is None:
                break
            leases.append(self.lend(member, *found, version, now))
            count -= leases[-1].steps
        return leases

    def _next_span(self, member: Member, most: int) -> tuple[OpenStep, Span] | None:
        """A whole step, or what of one came back: after a failure batch by batch."""
        for _ in range(len(self._again)):
            work = self._again.popleft()
            if work.plan.index not in self._works or not work.free:
                continue
            want = min(most if work.plan.apart else work.plan.count, member.batches_max)
            span = work.carve(member.name, want, self.members)
            if work.free:
                self._again.append(work)
            if span is not None:
                return work, span
        step = self.plan.next_stretch(most) if self._stretches else self.plan.next_step()
        if step is None:
            return None
        work = self._works[step.index] = OpenStep(step)
        span = work.carve(member.name, member.batches_max, self.members)
        if work.free:
            self._again.append(work)
        return (work, span) if span is not None else None
