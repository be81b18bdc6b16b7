"""The update pipeline: decide, then do.

    for effect in core.handle(event, now): perform(effect)

An update goes one way: `updates` receives and checks it, the core decides, `steps` folds it and steps the
optimizer, `lending` sends the next leases. All of it runs on ports, so that the simulator drives this very
code. Holds no rule of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.steps.leases import Lease
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.pipeline.lending import Lending
from w5xde.runtime.pipeline.ports import Ports
from w5xde.runtime.pipeline.steps import Applied, StepReports, Steps
from w5xde.runtime.pipeline.updates import Updates
from w5xde.runtime.telemetry.lease_trace import APPLIED, CANCELLED, MEASURED
from w5xde.runtime.telemetry.meters import Meters

T = TypeVar("T")

# Effects that the learner carries out, together if they come together.
_FOR_THE_LEARNER = (ev.Fold, ev.Step, ev.SetAside, ev.Reopen)


class Surroundings(Protocol):
    """The rest of the coordinator: carries out what is not the pipeline's work, and hears of its steps."""

    def close(self, effect: ev.Close) -> None: ...
    def ban(self, effect: ev.Ban) -> None: ...
    def evaluate(self, effect: ev.Evaluate) -> None: ...
    def note(self, effect: ev.Note) -> None: ...
    def finish(self, effect: ev.Finish) -> None: ...
    def kept_facts(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the learner's state and the cut."""

    def stepped(self, applied: list[Applied]) -> None:
        """These steps were made, and the core has counted them."""

    def given_up(self, effect: ev.SetAside) -> None:
        """A call of a pool was given up, and the learner has gone on without it."""

    def learner_broke(self, error: BaseException) -> None:
        """The learner failed in the middle of a step: its state is of no use."""


class Pipeline:
    """The core, and all that an update meets on its way to the optimizer."""

    def __init__(
        self,
        core: CoordinatorCore,
        journal: Journal,
        ports: Ports,
        meters: Meters,
        around: Surroundings,
        budget_bytes: float = math.inf,
    ) -> None:
        """All large updates that arrive at a time must fit into `budget_bytes`."""
        self._core = core
        self.view = core.view
        self._journal = journal
        self._clock = ports.clock
        self._tasks = ports.tasks
        self._around = around
        self._trace = meters.trace
        self.lending = Lending(ports, self.view, meters, self.dispatch)
        self.updates = Updates(
            ports,
            self.view,
            meters,
            self.dispatch,
            one_by_one=journal.steps is not None,
            budget_bytes=budget_bytes,
        )
        reports = StepReports(self._applied, self.dispatch, around.learner_broke)
        self.steps = Steps(ports, self.view, journal, meters, reports)
        self._verifier = ports.verifier
        self._events: deque[ev.Event] = deque()
        self._is_dispatching = False
        # Steps that were made, and of which the core has not heard yet.
        self._unreported: deque[list[Applied]] = deque()
        self._performers: dict[type, Callable[[Any], None]] = {
            ev.Assign: self.lending.lend,
            ev.CancelLeases: self._cancel,
            ev.Expire: self._expire,
            ev.Reject: self._reject,
            ev.Verify: self._verify,
            ev.Fold: self._fold,
            ev.KeepMeasures: self._keep_measures,
            ev.Conclude: self.updates.measures.conclude,
            ev.SetAside: self._set_aside,
            ev.Step: self.steps.step,
            ev.Reopen: self._reopen,
            ev.Save: lambda effect: journal.save(effect.cut, around.kept_facts(), self._clock()),
            ev.Evaluate: around.evaluate,
            ev.Close: around.close,
            ev.Ban: around.ban,
            ev.Note: around.note,
            ev.Finish: around.finish,
        }

    def dispatch(self, event: ev.Event) -> None:
        """Decide, then do. An event that is caused meanwhile waits for its turn."""
        self._events.append(event)
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._events:
                event = self._events.popleft()
                effects = self._core.handle(event, self._clock())
                # Written down before it is done.
                self._journal.saw(event, effects)
                for effect in effects:
                    if type(effect) not in _FOR_THE_LEARNER:
                        self.steps.flush()
                    self.perform(effect)
                self.steps.flush()
                if isinstance(event, ev.Stepped):
                    self._around.stepped(self._unreported.popleft())
        finally:
            self._is_dispatching = False

    def perform(self, effect: ev.Effect) -> None:
        self._performers[type(effect)](effect)

    def _fold(self, effect: ev.Fold) -> None:
        lease = effect.lease
        self._trace.ended(lease.id, APPLIED, self._clock())
        self.steps.fold(effect, self.updates.take(lease.node, lease.id))

    def _keep_measures(self, effect: ev.KeepMeasures) -> None:
        self._trace.ended(effect.lease.id, MEASURED, self._clock())
        self.updates.measures.keep(effect)

    def _cancel(self, effect: ev.CancelLeases) -> None:
        for lease in effect.leases:
            self._trace.ended(lease, CANCELLED, self._clock())
        self.lending.cancel(effect)

    def _expire(self, effect: ev.Expire) -> None:
        for lease in effect.leases:
            self._trace.ended(lease, effect.reason, self._clock())

    def _reject(self, effect: ev.Reject) -> None:
        self._trace.ended(effect.lease, effect.reason, self._clock())
        self.updates.reject(effect)

    def _verify(self, effect: ev.Verify) -> None:
        lease = effect.lease
        if lease.step.validates:
            rows = self.updates.measures.look_at(lease.node, lease.id)
            self._verifier.verify_measures(lease, _require(rows, lease))
            return
        self._verifier.verify(lease, _require(self.updates.look_at(lease.node, lease.id), lease))

    def _set_aside(self, effect: ev.SetAside) -> None:
        self.steps.set_aside(effect)
        if effect.is_all:
            self.steps.flush()
            # Told when the learner has heard of it: the caller of a pool may go on at once.
            self._tasks.call(lambda: None, lambda _: self._around.given_up(effect))

    def _reopen(self, effect: ev.Reopen) -> None:
        self.steps.reopen(effect)
        self.lending.rewind()

    def _applied(self, applied: list[Applied]) -> None:
        self._unreported.append(applied)
        steps = [each.step.plan.index for each in applied]
        self.dispatch(ev.Stepped(steps, durable=all(each.is_durable for each in applied)))


def _require(found: T | None, lease: Lease) -> T:
    if found is None:
        raise LookupError(f"lease {lease.id} is to be verified, and its answer is not here")
    return found
