"""The core of the coordinator: one pure state machine that makes every decision of a run.

    for effect in core.handle(event, now): perform(effect)

The real coordinator and the simulator drive this very code. Routes each event to the class that decides about
it (`membership`, `answers`, `step_decisions`), and holds no rule of its own beyond the order of things. Knows
no sockets, tensors, clocks or chance: callers pass `now` and a random generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from w5xde.control import events as ev
from w5xde.control.answers import Answers
from w5xde.control.membership import Membership
from w5xde.control.run_state import RunState
from w5xde.control.settings import CoreSettings
from w5xde.control.step_decisions import StepDecisions
from w5xde.control.steps.cut import Cut
from w5xde.control.steps.plan import Plan
from w5xde.control.validation_decisions import ValidationDecisions
from w5xde.control.view import CoreView


class CoordinatorCore:
    """All decisions of a run: events and the time in, effects out."""

    def __init__(
        self,
        plan: Plan,
        settings: CoreSettings,
        cut: Cut | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """Begin a run, or with the cut of an earlier life continue one.

        `chance` chooses what is verified, so that no node can foresee it.
        """
        state = self._state = RunState(plan, settings, chance)
        self._membership = Membership(state)
        self._steps = StepDecisions(state, self._membership, is_resumed=cut is not None)
        self._validation = ValidationDecisions(state)
        answers = Answers(state, self._membership, self._steps, self._validation)
        # What others may read; only `handle` changes anything.
        self.view = CoreView(state, self._steps)
        # Effects of resuming, returned with those of the first event.
        self._opening = self._steps.resume(cut) if cut is not None else []
        self._handlers: dict[type, Callable[[Any, float], list[ev.Effect]]] = {
            ev.Joined: self._membership.joined,
            ev.Left: self._membership.left,
            ev.Answered: answers.answered,
            ev.Measured: self._validation.measured,
            ev.Failed: answers.failed,
            ev.Verified: answers.verified,
            ev.Dropped: answers.dropped,
            ev.Unreadable: answers.unreadable,
            ev.Discovered: self._discovered,
            ev.Called: self._called,
            ev.Withdrawn: self._steps.withdrawn,
            ev.Stepped: self._steps.stepped,
            ev.Undone: self._steps.undone,
            ev.Evaluated: self._steps.evaluated,
            ev.Saved: self._steps.saved,
            ev.SaveFailed: self._steps.save_failed,
            ev.Broke: lambda event, now: state.finish("", error=event.reason),
            ev.Stop: state.stop,
            ev.Ticked: self._ticked,
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Return everything that should happen because of this event, in order."""
        if self._state.is_finished:
            return self._handle_after_end(event, now)
        opening, self._opening = self._opening, []
        return [*opening, *self._handlers[type(event)](event, now)]

    def _handle_after_end(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Steps that were decided before the end are still applied, or rolled back, and saved."""
        match event:
            case ev.Undone():
                return self._steps.reopen(event)
            case ev.Stepped():
                return self._steps.count(event)
            case ev.Saved():
                self._steps.saved(event, now)
        return []

    def _discovered(self, event: ev.Discovered, now: float) -> list[ev.Effect]:
        for samples in event.sizes:
            self._state.plan.discovered(event.epoch, samples)
        return self._state.lend_to_idle(now)

    def _called(self, event: ev.Called, now: float) -> list[ev.Effect]:
        for samples in (*event.sizes, 0):
            self._state.plan.discovered(event.epoch, samples)
        return self._state.lend_to_idle(now)

    def _ticked(self, event: ev.Ticked, now: float) -> list[ev.Effect]:
        state = self._state
        effects = [*self._membership.close_silent(event, now), *self._membership.note_outgrown(now)]
        limit = state.settings.seconds
        if limit is not None and state.started_at is not None and state.seconds(now) >= limit:
            effects += state.stop(ev.Stop("time is up"), now)
        effects += self._validation.measure_here_if_alone(now)
        # A run that is resumed may have nothing left to do.
        effects += [*state.finish_in_a_hurry(now), *state.finish_if_settled()]
        if state.is_finished:
            return effects
        effects += self._steps.save_if_due(now)
        state.mode.loaded(event.machine, event.load)
        state.mode.overtake(now)
        return effects + state.lend_to_idle(now)
