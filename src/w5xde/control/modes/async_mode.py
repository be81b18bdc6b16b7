"""Async mode: every node computes whole steps of its own, and each answer is applied when it arrives.

The mode keeps the bound of staleness by lending little enough, rather than by rejecting answers: steps are
lent only as long as all of them can be applied before the oldest outstanding answer is too old. The mode does
not wait for a node that takes far longer than expected, so that node's answer may be rejected. Only decides:
knows no tensors, no sockets and no clock.
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

# A frame is the steps that are lent in one message. It takes a node about this long to compute: with one step
# a message, small models would spend their time on messages.
FRAME_SECONDS = 0.004
FRAME_STEPS_MAX = 64
# The bound of staleness if the user sets none: the first number, or the second times the nodes that can run
# at once if that is more, so that each node can hold a frame while another one travels.
STALENESS_MIN = 48
STALENESS_OF_ONE = 4
# Weights change most at the start of a run. So if the user sets no bound, steps are lent at first for a
# staleness of STALENESS_FIRST, and for one more after every STEPS_PER_STALENESS steps, up to the bound.
STALENESS_FIRST, STEPS_PER_STALENESS = 4, 32
# Any node may be this late, however short its lease is: another process may be using its core.
LATE_SECONDS_MIN = 0.05
# The lease of a node that beats but is this late (or four times the expected time) is lent to another node
# too.
STUCK_SECONDS_MIN = 10.0


class AsyncMode(Mode):
    """Every node computes steps of its own; an answer is applied when it arrives, if it is fresh enough."""

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
        """Begin with no open step.

        `stretches`: the steps of a frame, of one batch each, are one lease. `spare_frames`: how many frames a
        node holds besides the one that it computes.
        """
        super().__init__(plan, members, leases)
        self._bound = staleness
        self._stretches = stretches
        self._spare_frames = spare_frames
        self._open_steps: dict[int, OpenStep] = {}
        self._applying: set[int] = set()
        # Open steps that have free batches: given back, or more than one node could hold.
        self._returned: deque[OpenStep] = deque()
        self._overtaken: set[int] = set()
        # The staleness that lending allows at this point of the run.
        self._lent_staleness = 0
        # Members that could hold more leases than the bound of staleness allowed, longest wait first.
        self._waiting: dict[str, Member] = {}

    @property
    def staleness(self) -> int:
        """How many steps may have been applied since the version an update was computed on."""
        if self._bound is not None:
            return self._bound
        return max(STALENESS_MIN, STALENESS_OF_ONE * self.members.parallel)

    def _staleness_to_lend(self, version: int) -> int:
        """The staleness for which leases are granted at this version: at most `staleness`."""
        if self._bound is not None:
            return self._bound
        # As much as all nodes that can run at once hold, or some of a large pool would be idle at the start.
        held = (1 + self._spare_frames) * self.members.parallel
        first = max(STALENESS_FIRST, held - 1)
        return min(self.staleness, first + version // STEPS_PER_STALENESS)

    @property
    def open_steps(self) -> list[OpenStep]:
        return list(self._open_steps.values())

    @property
    def is_settled(self) -> bool:
        return not self._applying and (not self._open_steps or self.is_closing)

    def admit(self, lease: Lease, version: int) -> str:
        open_step = self._open_steps.get(lease.step.index)
        if open_step is None:
            return f"step {lease.step.index} is complete"
        if open_step.tree.covers(lease.span):
            return "somebody else was sooner"
        last = version + lease.behind
        if last - lease.version > self.staleness:
            return f"computed on version {lease.version}, for version {last}; the bound is {self.staleness}"
        return ""

    def take(self, lease: Lease) -> OpenStep | None:
        open_step = self._open_steps[lease.step.index]
        open_step.oldest = min(open_step.oldest, lease.version - lease.behind)
        return self._completed(open_step) if open_step.take(lease.span, [share_of(lease)]) else None

    def is_stale(self, open_step: OpenStep, version: int) -> bool:
        """Whether some answers of a complete stretch became too old while others were missing."""
        return open_step.plan.apart and version - open_step.oldest > self.staleness

    def set_aside(self, step: int, span: Span) -> OpenStep | None:
        open_step = self._open_steps[step]
        return self._completed(open_step) if open_step.take(span, []) else None

    def _completed(self, open_step: OpenStep) -> OpenStep:
        del self._open_steps[open_step.plan.index]
        self._applying.add(open_step.plan.index)
        return open_step

    def give_back(self, lease: Lease, *, failed: bool = False) -> OpenStep | None:
        open_step = self._open_steps.get(lease.step.index)
        if open_step is None:
            return None
        others = self.leases.of_step(lease.step.index)
        if failed:
            open_step.failed(lease.span, lease.node, others)
        else:
            open_step.give_back(lease.span, others)
        if open_step.free:
            self._returned.append(open_step)
        return open_step

    def stepped(self, step: int) -> Iterable[Member]:
        # No node waits for it: the core's version already counts the step.
        self._applying.discard(step)
        return ()

    def reopen(self, open_step: OpenStep) -> None:
        self._applying.discard(open_step.plan.index)
        self._open_steps[open_step.plan.index] = open_step
        self._returned.append(open_step)

    def loaded(self, machine: str, load: float) -> None:
        self.members.loaded(machine, load)

    def overtake(self, now: float) -> None:
        self._overtaken = {number for number in self._overtaken if self.leases.holds(number)}
        for lease in self.leases:
            patience = max(STUCK_SECONDS_MIN, 4 * (lease.expected_at - lease.granted_at))
            if now - lease.expected_at > patience and lease.id not in self._overtaken:
                open_step = self._open_steps.get(lease.step.index)
                if open_step is not None and not open_step.free:
                    self._overtaken.add(lease.id)
                    open_step.give_back(lease.span, ())
                    self._returned.append(open_step)

    def grants(self, candidates: Iterable[Member], version: int, now: float) -> list[list[Lease]]:
        found: list[list[Lease]] = []
        if self.is_closing:
            return found
        self._lent_staleness = self._staleness_to_lend(version)
        # The member that waits longest is served first, and none while no step may be lent.
        for member in candidates:
            self._waiting.setdefault(member.name, member)
        unserved = []
        while self._waiting and self._room(version, now) > 0:
            member = self._waiting.pop(next(iter(self._waiting)))
            if self.members.get(member.name) is not member:
                continue
            # A batch that failed is lent out of turn: the node on which it has not failed may not be in turn.
            for one in [member] if self._returned else self.members.in_turn([member], now):
                found += self._fill(one, version, now)
                if self._held_steps(one) <= self._spare_frames * self._frame_steps(one):
                    unserved.append(one)
        for member in unserved:
            self._waiting[member.name] = member
        return found

    def _fill(self, member: Member, version: int, now: float) -> list[list[Lease]]:
        """Lend the member as many frames as it can hold and the bound of staleness allows."""
        found: list[list[Lease]] = []
        frame = self._frame_steps(member)
        while self._held_steps(member) <= self._spare_frames * frame:
            room = self._room(version, now)
            if room < frame and (member.pending or room < 1):
                break
            leases = self._lend_frame(member, min(frame, room), version, now)
            if not leases:
                break
            found.append(leases)
        return found

    def _room(self, version: int, now: float) -> int:
        """How many more steps may be lent so that the oldest outstanding answer still counts when it arrives.

        A lease that is late by more than its expected time is no longer waited for.
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
        """How many steps the member is lent in one message.

        The bound of staleness leaves room for three frames for each node that can run: two that it holds, and
        one to spare.
        """
        if not member.compute_seconds:
            return 1
        fresh = (self._lent_staleness + 1) // (3 * max(1, self.members.parallel))
        held = member.batches_max // self.plan.step_batches
        return max(1, min(int(FRAME_SECONDS / member.compute_seconds), fresh, held, FRAME_STEPS_MAX))

    def _lend_frame(self, member: Member, count: int, version: int, now: float) -> list[Lease]:
        """Grant the member leases on up to `count` steps, for one message."""
        leases: list[Lease] = []
        while count > 0:
            found = self._next_span(member, count)
            if found is None:
                break
            leases.append(self.lend(member, *found, version, now))
            count -= leases[-1].steps
        return leases

    def _next_span(self, member: Member, most: int) -> tuple[OpenStep, Span] | None:
        """Return the next free span for this member, of at most `most` steps, and its step.

        Batches that were given back come before a new step.
        """
        for _ in range(len(self._returned)):
            open_step = self._returned.popleft()
            if open_step.plan.index not in self._open_steps or not open_step.free:
                continue
            want = min(most if open_step.plan.apart else open_step.plan.count, member.batches_max)
            span = open_step.take_free_span(member.name, want, self.members)
            if open_step.free:
                self._returned.append(open_step)
            if span is not None:
                return open_step, span
        step = self.plan.next_stretch(most) if self._stretches else self.plan.next_step()
        if step is None:
            return None
        open_step = self._open_steps[step.index] = OpenStep(step)
        span = open_step.take_free_span(member.name, member.batches_max, self.members)
        if open_step.free:
            self._returned.append(open_step)
        return (open_step, span) if span is not None else None
