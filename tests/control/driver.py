"""The driver of the core in these tests: it owns a core and the time, feeds events and performs effects.

Nodes answer one after another, in the order in which the core assigned the leases; the learner and the disk
finish at once. Knows no sockets, tensors or clocks. A test that needs other nodes replaces `Driver.node`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from tests.control.invariants import check
from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.membership import TICK_SECONDS
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.cut import Cut
from w5xde.control.steps.plan import Plan

# The time of a batch where a test gives none.
BATCH_SECONDS = 0.1
# Far more than the longest run of these tests needs: a run that does not end fails.
WORKS_MAX = 200_000

Wanted = TypeVar("Wanted")


class Driver:
    """A core with honest nodes, a learner and a disk; the invariants are checked after every event."""

    def __init__(self, plan: Plan, settings: CoreSettings, cut: Cut | None = None) -> None:
        self.core = CoordinatorCore(plan, settings, cut)
        self.now = 0.0
        self.batch_seconds = BATCH_SECONDS
        # Messages with leases that the nodes have not answered.
        self.works: deque[ev.Assign] = deque()
        # All effects that were performed.
        self.effects: list[ev.Effect] = []
        self.finish: ev.Finish | None = None
        # What a node does with a message; without any event it stays silent.
        self.node: Callable[[ev.Assign], Iterable[ev.Event]] = self.answer
        self._logs_steps = settings.logs_steps

    def handle(self, event: ev.Event) -> list[ev.Effect]:
        """Return the effects of one event without performing them."""
        effects = self.core.handle(event, self.now)
        check(self.core)
        return effects

    def feed(self, *events: ev.Event) -> list[ev.Effect]:
        """Handle these events and those that follow from performing the effects; return all effects."""
        waiting, before = deque(events), len(self.effects)
        while waiting:
            for effect in self.handle(waiting.popleft()):
                self.effects.append(effect)
                waiting += self.perform(effect)
        return self.effects[before:]

    def perform(self, effect: ev.Effect) -> list[ev.Event]:
        """Return the events that follow from this effect."""
        match effect:
            case ev.Assign():
                self.works.append(effect)
            case ev.CancelLeases():
                kept = (
                    replace(work, leases=[lease for lease in work.leases if lease.id not in effect.leases])
                    for work in self.works
                )
                self.works = deque(work for work in kept if work.leases)
                return [ev.Dropped(effect.node, lease) for lease in effect.leases]
            case ev.Step():
                return [ev.Stepped([effect.plan.index], durable=self._logs_steps)]
            case ev.Evaluate() | ev.Conclude():
                return [ev.Evaluated()]
            case ev.Save():
                return [ev.Saved(effect.cut.progress.steps)]
            case ev.Finish():
                self.finish = effect
        return []

    def join(self, *nodes: str) -> list[ev.Effect]:
        return self.feed(*map(ev.Joined, nodes))

    def answer(self, work: ev.Assign, norm: float | None = None) -> list[ev.Event]:
        """Return the event of a node that answers all leases of a message."""
        if work.leases[0].step.validates:
            return [ev.Measured(work.node, lease.id) for lease in work.leases]
        leases = [lease.id for lease in work.leases]
        norms = [] if norm is None else [norm] * len(leases)
        return [ev.Answered(work.node, leases, self.batch_seconds, norms=norms)]

    def fail(self, work: ev.Assign, reason: str, norm: float | None = None) -> list[ev.Event]:
        """Return the events of a node that fails to compute each lease of a message."""
        return [ev.Failed(work.node, lease.id, reason, norm) for lease in work.leases]

    def work(self) -> list[ev.Effect]:
        """Let the node with the oldest message respond; if there is none, tick, with all nodes heard."""
        if self.works:
            self.now += self.batch_seconds
            return self.feed(*self.node(self.works.popleft()))
        self.now += TICK_SECONDS
        return self.feed(ev.Ticked(heard={member.name: self.now for member in self.core.view.members}))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Work until the run has ended, or until this holds."""
        for _ in range(WORKS_MAX):
            if self.finish is not None or until():
                return
            self.work()
        raise AssertionError("the run does not end")


def only(kind: type[Wanted], effects: Iterable[ev.Effect]) -> list[Wanted]:
    """Return the effects of this kind."""
    return [effect for effect in effects if isinstance(effect, kind)]
