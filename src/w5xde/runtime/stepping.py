"""Stepping: what was decided on its way through the learner, and back to the core as steps that are applied.

Answers that came together are folded and applied together: one call of the learner, one event. Small models
would otherwise spend more time on calls and events than on their steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from w5xde.control import events as ev
from w5xde.control.cut import Cut
from w5xde.learn.learner import Contribution, Learner
from w5xde.runtime.actor import Actor
from w5xde.runtime.keeper import Keeper
from w5xde.runtime.loader import Loader
from w5xde.runtime.metrics import Meters

# A decision, with what it needs: the update that came, or the cut to be logged with a step.
_Decided: TypeAlias = tuple[ev.Fold, Contribution] | tuple[ev.Step, Cut | None] | tuple[ev.SetAside, None]


@dataclass(slots=True)
class Applied:
    """A step that the learner has made."""

    step: ev.Step
    loss: float
    is_durable: bool


class Stepping:
    """Folds and steps in the order they were decided.

    `applied` hears of the steps once they are made, `failed` of one that could not be.
    """

    def __init__(
        self,
        learner: Learner,
        actor: Actor,
        keeper: Keeper,
        loader: Loader,
        meters: Meters,
        cut: Callable[[], Cut],
        applied: Callable[[list[Applied]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._learner = learner
        self._actor = actor
        self._keeper = keeper
        self._loader = loader
        self._meters = meters
        self._cut = cut
        self._applied = applied
        self._failed = failed
        # What came and is not decided on, by lease.
        self._incoming: dict[int, Contribution] = {}
        self._begun: list[_Decided] = []

    @property
    def takes_many(self) -> bool:
        """Whether answers may be decided on together: not if each step needs its own cut, for the log."""
        return self._keeper.steps is None

    def arrived(self, lease: int, contribution: Contribution) -> None:
        self._incoming[lease] = contribution

    def forget(self, lease: int) -> None:
        self._incoming.pop(lease, None)

    # --- what was decided -------------------------------------------------------------------------

    def fold(self, effect: ev.Fold) -> None:
        lease = effect.lease
        contribution = self._incoming.pop(lease.id)
        self._meters.folded(effect.staleness)
        self._meters.node(lease.node).loss = contribution.loss_sum / lease.samples
        self._begun.append((effect, contribution))

    def set_aside(self, effect: ev.SetAside) -> None:
        self._begun.append((effect, None))
        self._loader.release(effect.plan.keys[effect.span.start : effect.span.stop])

    def step(self, effect: ev.Step) -> None:
        self._meters.shared(effect)
        self._begun.append((effect, None if self.takes_many else self._cut()))

    def flush(self) -> None:
        """Let the learner do all that was begun, before anything else that was decided afterwards."""
        if self._begun:
            begun, self._begun = self._begun, []
            self._actor.call(lambda: self._do(begun), self._done)

    # --- where the learner is ---------------------------------------------------------------------

    @torch.no_grad()
    def _do(self, begun: list[_Decided]) -> tuple[list[Applied], BaseException | None]:
        """What was applied, and what went wrong after that."""
        applied: list[Applied] = []
        try:
            for effect, given in begun:
                if isinstance(effect, ev.Step):
                    applied.append(self._apply(effect, given if isinstance(given, Cut) else None))
                elif isinstance(effect, ev.SetAside):
                    self._learner.fold(effect.plan.index, effect.plan.count, effect.span, None)
                elif isinstance(given, Contribution):
                    step, span = effect.lease.step, effect.lease.span
                    self._learner.fold(step.index, step.count, span, given, effect.staleness)
        except (Exception, SystemExit) as error:
            return applied, error
        return applied, None

    def _apply(self, step: ev.Step, cut: Cut | None) -> Applied:
        """Step the optimizer, if need be after what that takes is on the disk."""
        total = self._learner.total(step.plan.index)
        is_durable = False
        if cut is not None:
            given = total.contribution
            body = given.vector.raw.numpy().data
            is_durable = self._keeper.log_step(step, cut, body, sorted(given.absent), given.loss_sum)
        return Applied(step, self._learner.apply(total) / step.samples, is_durable)

    # --- back on the loop -------------------------------------------------------------------------

    def _done(self, done: tuple[list[Applied], BaseException | None]) -> None:
        applied, error = done
        for each in applied:
            self._loader.release(each.step.plan.keys)
            self._meters.stepped(each.loss)
        if applied:
            self._applied(applied)
        if error is not None:
            self._failed(error)
