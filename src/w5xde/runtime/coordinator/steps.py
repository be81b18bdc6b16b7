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
from w5xde.control.steps.cut import Cut
from w5xde.control.steps.plan import StepPlan
from w5xde.learn.step.learner import Contribution, Learner, Spoiled, Total
from w5xde.learn.step.robust_mean import RobustSums
from w5xde.runtime.coordinator.loader import Loader
from w5xde.runtime.durable.journal import Keeper
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.telemetry.meters import Meters
from w5xde.tree import Span

# A decision, with what it needs: the update that came, or the cut to be logged with a step.
_Decided: TypeAlias = (
    tuple[ev.Fold, list[Contribution]] | tuple[ev.Step, Cut | None] | tuple[ev.SetAside | ev.Reopen, None]
)


def _losses(step: ev.Step, sums: list[float]) -> list[float]:
    """The mean loss of each step that was made."""
    if not step.plan.apart:
        return [sums[0] / step.samples]
    sizes = [size for start, stop, _, _ in sorted(step.shares) for size in step.plan.sizes[start:stop]]
    return [loss_sum / size for loss_sum, size in zip(sums, sizes, strict=True)]


@dataclass(slots=True)
class Applied:
    """A step that the learner has made, or all of a stretch: the loss of each."""

    step: ev.Step
    losses: list[float]
    is_durable: bool


# Steps that were made, then those that were not; and what broke the learner, if anything did.
_Done: TypeAlias = tuple[list[Applied | ev.Undone], BaseException | None]


@dataclass(frozen=True, slots=True)
class StepOwner:
    """Whom stepping asks and tells.

    `applied` hears of the steps once they are made, `failed` of one that could not be. One that would leave
    numbers that are not finite is not made, nor is any decided after it: `undone` hears of each. `cut` is
    what a step is logged with; `reopened` hears which step begins anew: versions to come will be others.
    """

    cut: Callable[[], Cut]
    applied: Callable[[list[Applied]], None]
    undone: Callable[[ev.Undone], None]
    reopened: Callable[[int], None]
    failed: Callable[[BaseException], None]


class Stepping:
    """Folds and steps in the order they were decided."""

    def __init__(
        self,
        learner: Learner,
        actor: Actor,
        keeper: Keeper,
        loader: Loader,
        meters: Meters,
        owner: StepOwner,
        robust: RobustSums | None = None,
    ) -> None:
        self._learner = learner
        # Who keeps what came until its step is complete, if the learner does not fold it.
        self._robust = robust
        self._actor = actor
        self._keeper = keeper
        self._loader = loader
        self._meters = meters
        self._owner = owner
        # What came and is not decided on, by lease.
        self._incoming: dict[int, list[Contribution]] = {}
        self._begun: list[_Decided] = []

    @property
    def takes_many(self) -> bool:
        """Whether answers may be decided on together: not if each step needs its own cut, for the log."""
        return self._keeper.steps is None

    def arrived(self, lease: int, contributions: list[Contribution]) -> None:
        """One for the whole lease, or one for each of its batches that are apart."""
        self._incoming[lease] = contributions

    def answer_to(self, lease: int) -> list[Contribution] | None:
        """What came for a lease and is not decided on."""
        return self._incoming.get(lease)

    def forget(self, lease: int) -> list[Contribution]:
        """It is not to be used; returns what it was."""
        return self._incoming.pop(lease, [])

    # --- what was decided -------------------------------------------------------------------------

    def fold(self, effect: ev.Fold) -> None:
        lease = effect.lease
        contributions = self._incoming.pop(lease.id)
        before = lease.span.start if lease.step.apart else 0
        self._meters.folded(effect.staleness + before, len(contributions))
        loss_sum = sum([each.loss_sum for each in contributions])
        self._meters.node(lease.node).loss = loss_sum / lease.samples
        self._begun.append((effect, contributions))

    def set_aside(self, effect: ev.SetAside) -> None:
        self._begun.append((effect, None))
        self._loader.release(effect.plan.keys[effect.span.start : effect.span.stop])

    def reopen(self, effect: ev.Reopen) -> None:
        """Begin a step anew."""
        self._begun.append((effect, None))
        self._owner.reopened(effect.plan.index)

    def step(self, effect: ev.Step) -> None:
        self._meters.shared(effect)
        self._begun.append((effect, None if self.takes_many else self._owner.cut()))

    def flush(self) -> None:
        """Let the learner do all that was begun, before anything else that was decided afterwards."""
        if self._begun:
            begun, self._begun = self._begun, []
            self._actor.call(lambda: self._do(begun), self._done)

    # --- where the learner is ---------------------------------------------------------------------

    @torch.no_grad()
    def _do(self, begun: list[_Decided]) -> _Done:
        """What was applied or undone, and what went wrong after that."""
        steps: list[ev.Step] = []
        cut: Cut | None = None
        try:
            for effect, given in begun:
                if isinstance(effect, ev.Step):
                    steps.append(effect)
                    cut = given if isinstance(given, Cut) else None
                elif self._robust is not None:
                    self._keep(self._robust, effect, given)
                elif isinstance(effect, ev.SetAside):
                    self._leave_out(effect.plan, [effect.span])
                elif isinstance(effect, ev.Reopen):
                    self._learner.drop(effect.plan.index)
                    self._leave_out(effect.plan, effect.empty)
                elif isinstance(given, list):
                    self._fold(effect, given)
            return self._make(steps, cut)
        except (Exception, SystemExit) as error:
            return [], error

    def _fold(self, effect: ev.Fold, given: list[Contribution]) -> None:
        step, span = effect.lease.step, effect.lease.span
        if step.apart or step.count == 1:
            self._learner.keep(step.index, span.start, given, effect.staleness)
        else:
            self._learner.fold(step.index, step.count, span, given[0], effect.staleness)

    def _leave_out(self, plan: StepPlan, spans: list[Span]) -> None:
        """Nothing will ever come for these; what stands for itself leaves no gap."""
        for span in spans if not plan.apart and plan.count > 1 else ():
            self._learner.fold(plan.index, plan.count, span, None)

    @staticmethod
    def _keep(robust: RobustSums, effect: ev.Fold | ev.SetAside | ev.Reopen, given: object) -> None:
        """What was set aside leaves nothing there: a step knows by its shares what it is made of."""
        if isinstance(effect, ev.Reopen):
            robust.drop(effect.plan.index)
        elif isinstance(effect, ev.Fold) and isinstance(given, list):
            robust.keep(effect.lease.step.index, effect.lease.id, given[0])

    def _make(self, steps: list[ev.Step], cut: Cut | None) -> _Done:
        """As many of the steps as can be made. Of a step that is logged there is only one, with its cut."""
        totals, wrong = self._totals(steps)
        done: list[Applied | ev.Undone] = []
        if cut is not None and totals:
            try:
                done.append(self._apply(steps[0], totals[0], cut))
            except (Exception, SystemExit) as error:
                wrong = error
        elif totals:
            losses, broken = self._learner.apply_all(totals)
            wrong = broken or wrong
            for step, sums in zip(steps, losses, strict=False):
                done.append(Applied(step, _losses(step, sums), is_durable=False))
        if not self._learner.is_whole:
            return done, wrong
        reason = str(wrong or "")
        for step in steps[len(done) :]:
            (self._robust or self._learner).drop(step.plan.index)
            done.append(ev.Undone(step, reason))
            reason = ""
        # What is not finite may be a batch's fault, and is tried again; an optimizer that raises is not.
        return done, None if isinstance(wrong, Spoiled) else wrong

    def _totals(self, steps: list[ev.Step]) -> tuple[list[list[Total]], BaseException | None]:
        """What the steps come to, as far as they can be made one after another; and what was wrong then."""
        totals: list[list[Total]] = []
        version = self._learner.version
        for step in steps:
            if step.version != version:
                break  # one before it was undone, and whoever decides does not know yet
            version += step.steps
            try:
                totals.append(self._totals_of(step))
            except Spoiled as error:
                return totals, error
        return totals, None

    def _totals_of(self, step: ev.Step) -> list[Total]:
        if self._robust is not None:
            return [self._robust.total(step.plan.index, step.plan.sizes, step.shares)]
        return self._learner.totals(step.plan.index)

    def _apply(self, step: ev.Step, totals: list[Total], cut: Cut) -> Applied:
        """Step the optimizer; before that counts, what it takes to do so again is on the disk."""
        if self._learner.undoes:
            # Nobody hears of the step before it is logged, and one that is undone is never in the log.
            sums = self._learner.apply(totals)
            return Applied(step, _losses(step, sums), self._log(step, totals[0], cut))
        is_durable = self._log(step, totals[0], cut)
        return Applied(step, _losses(step, self._learner.apply(totals)), is_durable)

    def _log(self, step: ev.Step, total: Total, cut: Cut) -> bool:
        given = total.contribution
        body = given.vector.raw.numpy().data
        return self._keeper.log_step(step, cut, body, sorted(given.absent), given.loss_sum)

    # --- back on the loop -------------------------------------------------------------------------

    def _done(self, outcome: _Done) -> None:
        done, error = outcome
        applied = [each for each in done if isinstance(each, Applied)]
        for each in applied:
            self._loader.release(each.step.plan.keys)
            for loss in each.losses:
                self._meters.stepped(loss)
        if applied:
            self._owner.applied(applied)
        for undone in done[len(applied) :]:
            # None is made after the first that was not.
            if isinstance(undone, ev.Undone):
                self._owner.undone(undone)
        if error is not None:
            self._owner.failed(error)
