"""Async mode: every node computes whole steps of its own, and each answer is applied when it arrives.

A node is lent one step at a time, so that about one update for each node is under way. The mode keeps the
bound of staleness by lending little enough, rather than by rejecting answers: a step is lent only if it can
be applied before the oldest outstanding answer is too old. The mode does not wait for a node that takes far
longer than expected, so that node's answer may be rejected.

Where a batch takes less than a millisecond, a node is lent a stretch: it makes a step of its own with each
batch, and answers with the difference that all of them made, which counts as one update. `delay.py` says what
is done about late updates. Only decides: knows no tensors, no sockets and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from w5xde.control.modes.base import SOONER, Mode, share_of
from w5xde.control.modes.delay import DelayCorrection
from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import Plan
from w5xde.tree import Span

# The least bound of staleness if the user sets none. With two nodes, each may begin its next step while the
# other one still computes.
STALENESS_MIN = 2
# A stretch takes a node about this long. Shorter ones would spend their time on messages, and stretches of
# fewer steps than STRETCH_STEPS_MIN would gain too little.
STRETCH_SECONDS = 0.008
STRETCH_STEPS_MIN, STRETCH_STEPS_MAX = 8, 64
# Two nodes make local steps at a time. A third one would have to make its steps so much smaller that nothing
# is gained: each needs more samples than it adds (docs/findings.md).
STRETCHES_MAX = 2
# A stretch that failed this often is lent again as single steps.
STRETCH_FAILURES_MAX = 2
# Any node may be this late, however short its lease is: another process may be using its core.
LATE_SECONDS_MIN = 0.05
# The lease of a node that beats but is this late (or four times the expected time) is lent to another node
# too.
STUCK_SECONDS_MIN = 10.0
# The user is told once if updates are older than this on average, after so many of them.
STALENESS_ADVISED = 6
ADVISED_AFTER = 200


class AsyncMode(Mode):
    """Every node computes steps of its own; an answer is applied when it arrives, if it is fresh enough."""

    def __init__(
        self,
        plan: Plan,
        members: Members,
        leases: Leases,
        staleness: int | None,
        delay: DelayCorrection,
        *,
        stretches: bool = False,
    ) -> None:
        """Begin with no open step. `stretches`: nodes may make local steps."""
        super().__init__(plan, members, leases)
        self._bound = staleness
        self._delay = delay
        self._stretches = stretches
        self._open_steps: dict[int, OpenStep] = {}
        self._applying: set[int] = set()
        # Open steps that have free batches: given back, or more than one node could hold.
        self._returned: deque[OpenStep] = deque()
        self._overtaken: set[int] = set()
        # How many updates of the model were decided, and the sum of their staleness.
        self._updates = 0
        self._staleness_sum = 0
        # Whether the last update was a step of the optimizer: its movement shows where the next ones lead.
        self._has_moved = False
        self._has_advised = False
        # Members that are idle because of the bound of staleness, longest wait first.
        self._waiting: dict[str, Member] = {}

    @property
    def staleness(self) -> int:
        """How many updates may have been applied since the version that an update was computed on."""
        if self._bound is not None:
            return self._bound
        # Nodes that share cores do not add to it: only those in turn hold a lease.
        return max(STALENESS_MIN, self.members.parallel - 1)

    def staleness_of(self, lease: Lease) -> int:
        return self._updates - lease.updates

    def rate(self, open_step: OpenStep) -> float:
        return self._delay.rate(open_step.uncorrected)

    def advice(self) -> str:
        if self._has_advised or self._updates < ADVISED_AFTER:
            return ""
        mean = self._staleness_sum / self._updates
        if mean <= STALENESS_ADVISED:
            return ""
        self._has_advised = True
        return (
            f"an update comes {mean:.1f} updates late on average, and teaches little then: use --mode sync,"
            " or --staleness 4, or fewer nodes"
        )

    @property
    def open_steps(self) -> list[OpenStep]:
        return list(self._open_steps.values())

    @property
    def is_settled(self) -> bool:
        return not self._applying and (not self._open_steps or self.is_closing)

    def admit(self, lease: Lease) -> str:
        open_step = self._open_steps.get(lease.step.index)
        if open_step is None:
            return f"step {lease.step.index} is complete"
        if open_step.tree.covers(lease.span):
            return SOONER
        late = self.staleness_of(lease)
        if late > self.staleness:
            return f"computed on version {lease.version}, {late} updates ago; the bound is {self.staleness}"
        return ""

    def take(self, lease: Lease) -> OpenStep | None:
        open_step = self._open_steps[lease.step.index]
        open_step.oldest_updates = min(open_step.oldest_updates, lease.updates)
        corrected = lease.updates + self._delay.made_up(lease)
        open_step.oldest_corrected = min(open_step.oldest_corrected, corrected)
        member = self.members.get(lease.node)
        if member is not None:
            self._delay.measured(member, lease, self.staleness_of(lease))
        return self._completed(open_step) if open_step.take(lease.span, [share_of(lease)]) else None

    def set_aside(self, step: int, span: Span) -> OpenStep | None:
        open_step = self._open_steps[step]
        return self._completed(open_step) if open_step.take(span, []) else None

    def _completed(self, open_step: OpenStep) -> OpenStep:
        del self._open_steps[open_step.plan.index]
        self._applying.add(open_step.plan.index)
        open_step.staleness = max(0, self._updates - open_step.oldest_updates)
        open_step.uncorrected = max(0.0, self._updates - open_step.oldest_corrected)
        self._staleness_sum += open_step.staleness
        self._updates += 1
        self._has_moved = not open_step.plan.apart
        return open_step

    def give_back(self, lease: Lease, *, failed: bool = False, divided: bool = False) -> OpenStep | None:
        open_step = self._open_steps.get(lease.step.index)
        if open_step is None:
            return None
        others = self.leases.of_step(lease.step.index)
        if open_step.plan.apart:
            return self._give_stretch_back(open_step, lease, others, failed=failed, divided=divided)
        if failed:
            open_step.failed(lease.span, lease.node, others)
        elif divided:
            open_step.divide(lease.span, others)
        else:
            open_step.give_back(lease.span, others)
        if open_step.free:
            self._returned.append(open_step)
        return open_step

    def _give_stretch_back(
        self, open_step: OpenStep, lease: Lease, others: list[Lease], *, failed: bool, divided: bool
    ) -> OpenStep | None:
        """Free a stretch as a whole, for another node; or plan its steps one by one, if it failed again."""
        tried = open_step.failures.setdefault(lease.span, [])
        if failed:
            tried.append(lease.node)
        if others or open_step.free:
            return open_step
        if divided or (tried and (len(tried) >= STRETCH_FAILURES_MAX or len(self.members) < 2)):
            self._split(open_step)
            return None
        open_step.give_back(lease.span, ())
        self._returned.append(open_step)
        return open_step

    def _split(self, open_step: OpenStep) -> None:
        """Plan the steps of a stretch one by one; no lease of it is outstanding."""
        self._open_steps.pop(open_step.plan.index, None)
        self.plan.split(open_step.plan)

    def stepped(self, step: int) -> Iterable[Member]:
        # No node waits for it: the core's version already counts the step.
        self._applying.discard(step)
        return ()

    def reopen(self, open_step: OpenStep) -> None:
        self._applying.discard(open_step.plan.index)
        if open_step.plan.apart:
            self._split(open_step)
            return
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
        # The member that waits longest is served first, and none while no step may be lent.
        for member in candidates:
            self._waiting.setdefault(member.name, member)
        unserved = []
        while self._waiting and self._has_room(now):
            member = self._waiting.pop(next(iter(self._waiting)))
            if self.members.get(member.name) is not member:
                continue
            # A batch that failed is lent out of turn: the node on which it has not failed may not be in turn.
            for one in [member] if self._returned else self.members.in_turn([member], now):
                if not one.pending and self._has_room(now):
                    found += self._lend_next(one, version, now)
                if not one.pending:
                    unserved.append(one)
        for member in unserved:
            self._waiting[member.name] = member
        return found

    def _has_room(self, now: float) -> bool:
        """Whether another step may be lent, so that the oldest outstanding answer still counts then."""
        outstanding = self._leases_of_steps()
        lent = len(outstanding)
        if self.put_off and lent + len(self.put_off) > self.staleness:
            return False
        for oldest in outstanding:
            if not _is_late(oldest, now):
                # A turn is passed on when its last lease is lent: the next node waits until that is answered.
                return lent < self.members.parallel and lent + self.staleness_of(oldest) <= self.staleness
            lent -= 1
        return True

    def _stretch_steps(self, member: Member) -> int:
        """How many local steps the member makes at a time; 1: none, it computes a gradient."""
        # One node alone gives the coordinator gradients: each step is then exactly that of a plain loop.
        if not self._stretches or len(self.members) < 2 or not member.compute_seconds:
            return 1
        # The quotient may be infinite: nodes themselves say how long they computed.
        steps = min(int(min(STRETCH_SECONDS / member.compute_seconds, STRETCH_STEPS_MAX)), member.batches_max)
        return steps if steps >= STRETCH_STEPS_MIN else 1

    def _lend_next(self, member: Member, version: int, now: float) -> list[list[Lease]]:
        """Grant the member a lease on the next step or stretch, if there is one for it."""
        steps = self._stretch_steps(member)
        if steps > 1 and self._stretches_under_way(now) >= STRETCHES_MAX:
            return []
        found = self._next_span(member, steps)
        if found is None:
            return []
        ahead = 0.0 if found[0].plan.apart else self._ahead(member, now)
        # Steps that are put off are not in the version that the member computes on.
        updates = self._updates - len(self.put_off)
        return [[self.lend(member, *found, version, now, updates=updates, ahead=ahead)]]

    def _ahead(self, member: Member, now: float) -> float:
        """How many updates the parameters of the member's next lease look ahead."""
        # One node alone is never late.
        if len(self.members) < 2 or not self._has_moved:
            return 0.0
        return self._delay.ahead(member, sum(not _is_late(lease, now) for lease in self._leases_of_steps()))

    def _leases_of_steps(self) -> list[Lease]:
        """The outstanding leases, oldest first, without those of a validation, which change nothing."""
        return [lease for lease in self.leases if not lease.step.validates]

    def _stretches_under_way(self, now: float) -> int:
        return sum(lease.step.apart and not _is_late(lease, now) for lease in self.leases)

    def _next_span(self, member: Member, steps: int) -> tuple[OpenStep, Span] | None:
        """Return the next free span for this member, and its step: if it is new, a stretch of these steps.

        Batches that were given back come before a new step.
        """
        for _ in range(len(self._returned)):
            open_step = self._returned.popleft()
            if self._open_steps.get(open_step.plan.index) is not open_step or not open_step.free:
                continue
            if open_step.plan.apart and open_step.plan.count > member.batches_max:
                if self.leases.of_step(open_step.plan.index):
                    self._returned.append(open_step)
                else:
                    self._split(open_step)
                continue
            span = open_step.take_free_span(member.name, member.batches_max, self.members)
            if open_step.free:
                self._returned.append(open_step)
            if span is not None:
                return open_step, span
        step = self.plan.next_stretch(steps) if steps > 1 else self.plan.next_step()
        if step is None:
            return None
        open_step = self._open_steps[step.index] = OpenStep(step)
        span = open_step.take_free_span(member.name, member.batches_max, self.members)
        if open_step.free:
            self._returned.append(open_step)
        return (open_step, span) if span is not None else None


def _is_late(lease: Lease, now: float) -> bool:
    """Whether the lease is late by more than its expected time: it is no longer waited for."""
    return now - lease.expected_at > max(LATE_SECONDS_MIN, lease.expected_at - lease.granted_at)
