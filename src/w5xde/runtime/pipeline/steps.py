"""Steps: folds updates into sums and makes optimizer steps, in the order in which the core decided them.

Decisions that come together are carried out in one call of the learner, and reported in one event: for small
models a call and an event for each would cost more than the steps. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from w5xde.control import events as ev
from w5xde.control.steps.cut import Cut
from w5xde.control.view import CoreView
from w5xde.learn.step.sums import Contribution, StepNotFinite, Total
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.pipeline.ports import Ports
from w5xde.runtime.telemetry.meters import Meters, NodeMeter

# A decision, with what it needs: the update that came, or the cut to be logged with a step.
_Decided: TypeAlias = (
    tuple[ev.Fold, Contribution] | tuple[ev.Step, Cut | None] | tuple[ev.SetAside | ev.Reopen, None]
)


@dataclass(slots=True)
class Applied:
    """A step that was made, or a stretch of steps, and its mean loss."""

    step: ev.Step
    loss: float
    is_durable: bool
    # If its gradients were measured: the squared norms of its batches, and that of their mean.
    squares: tuple[tuple[float, ...], float] | None = None

    @property
    def losses(self) -> list[float]:
        """The loss of each step: of a stretch the mean is known alone."""
        return [self.loss] * self.step.steps


class _Outcome(NamedTuple):
    """Steps that were made, then those that were rolled back; and the error that broke the learner."""

    done: list[Applied | ev.Undone]
    error: BaseException | None
    # For the next step.
    learning_rates: list[float]


@dataclass(frozen=True, slots=True)
class StepReports:
    """Who hears of steps: those that were made, those that were rolled back, and a learner that broke."""

    applied: Callable[[list[Applied]], None]
    undone: Callable[[ev.Undone], None]
    failed: Callable[[BaseException], None]


class Steps:
    """Carries out Fold, SetAside, Reopen and Step."""

    def __init__(
        self, ports: Ports, view: CoreView, journal: Journal, meters: Meters, reports: StepReports
    ) -> None:
        self._ports = ports
        self._learner = ports.model.learner
        self._sums = ports.model.sums
        self._view = view
        self._journal = journal
        self._meters = meters
        self._reports = reports
        self._decided: list[_Decided] = []
        # The node whose update was folded last.
        self._last_node: NodeMeter | None = None

    # --- what the core decided --------------------------------------------------------------------

    def fold(self, effect: ev.Fold, given: Contribution) -> None:
        lease = effect.lease
        self._meters.folded(effect.staleness)
        meter = self._last_node = self._meters.node(lease.node)
        meter.loss = given.mean_loss(lease.samples)
        self._decided.append((effect, given))

    def set_aside(self, effect: ev.SetAside) -> None:
        self._decided.append((effect, None))
        self._ports.batches.release(effect.plan.keys_of(effect.span))

    def reopen(self, effect: ev.Reopen) -> None:
        self._decided.append((effect, None))

    def step(self, effect: ev.Step) -> None:
        self._meters.shared(effect)
        if self._last_node is not None:
            self._last_node.steps_ended += 1
        logs = self._journal.steps is not None
        self._decided.append((effect, self._view.cut(self._ports.clock()) if logs else None))

    def flush(self) -> None:
        """Carry out all that was decided, before anything that was decided afterwards."""
        if self._decided:
            decided, self._decided = self._decided, []
            self._ports.tasks.call(lambda: self._carry_out(decided), self._report)

    # --- where the learner lives ------------------------------------------------------------------

    @torch.no_grad()
    def _carry_out(self, decided: list[_Decided]) -> _Outcome:
        steps: list[ev.Step] = []
        cut: Cut | None = None
        try:
            for effect, given in decided:
                if isinstance(effect, ev.Step):
                    steps.append(effect)
                    cut = given if isinstance(given, Cut) else None
                elif isinstance(effect, ev.SetAside):
                    self._sums.leave_empty(effect.plan, [effect.span])
                    if effect.is_all:
                        self._learner.skip()
                elif isinstance(effect, ev.Reopen):
                    self._sums.drop(effect.plan.index)
                    self._sums.leave_empty(effect.plan, effect.empty)
                elif isinstance(given, Contribution):
                    self._sums.add(effect.lease, given, effect.staleness)
            done, wrong = self._make(steps, cut)
        except (Exception, SystemExit) as error:
            done, wrong = [], error
        return _Outcome(done, wrong, self._learner.learning_rates)

    def _make(
        self, steps: list[ev.Step], cut: Cut | None
    ) -> tuple[list[Applied | ev.Undone], BaseException | None]:
        """Make the steps, as far as possible. A step that is logged comes alone, with its cut."""
        totals, wrong = self._totals(steps)
        measured = [_squares(total) for total in totals]
        done: list[Applied | ev.Undone] = []
        if cut is not None and totals:
            try:
                done.append(self._apply_logged(steps[0], totals[0], cut))
            except (Exception, SystemExit) as error:
                wrong = error
        elif totals:
            losses, broken = self._learner.apply_all(totals)
            wrong = broken or wrong
            for step, loss_sum, squares in zip(steps, losses, measured, strict=False):
                done.append(Applied(step, loss_sum / step.samples, is_durable=False, squares=squares))
        if not self._learner.is_whole:
            return done, wrong
        # What is not finite may be a batch's fault, and is tried again; an optimizer that raises is not.
        final = None if isinstance(wrong, StepNotFinite) else wrong
        reason = str(wrong or "")
        for step in steps[len(done) :]:
            self._sums.drop(step.plan.index)
            done.append(ev.Undone(step, reason, is_final=final is not None))
            reason = ""
        return done, final

    def _totals(self, steps: list[ev.Step]) -> tuple[list[Total], BaseException | None]:
        """The sums of the steps that can be made one after another, and what is wrong with the next."""
        totals: list[Total] = []
        version = self._learner.version
        for step in steps:
            if step.version != version:
                break  # a step before it was rolled back, and the core had not heard of that yet
            version += step.steps
            try:
                totals.append(self._sums.total(step))
            except StepNotFinite as error:
                return totals, error
        return totals, None

    def _apply_logged(self, step: ev.Step, total: Total, cut: Cut) -> Applied:
        """Make a step; before it counts, all that is needed to make it again is on the disk."""
        if self._learner.can_roll_back:
            # The core hears of the step after it is logged, and a step that is rolled back is never logged.
            (loss_sum,) = self._learner.apply([total])
            return Applied(step, loss_sum / step.samples, self._log(step, total, cut), _squares(total))
        is_durable = self._log(step, total, cut)
        (loss_sum,) = self._learner.apply([total])
        return Applied(step, loss_sum / step.samples, is_durable, _squares(total))

    def _log(self, step: ev.Step, total: Total, cut: Cut) -> bool:
        given = total.contribution
        body = self._learner.body_of(total)
        return self._journal.log_step(step, cut, body, sorted(given.absent), given.loss_sum)

    # --- back on the loop -------------------------------------------------------------------------

    def _report(self, outcome: _Outcome) -> None:
        done, error, self._meters.learning_rates = outcome
        applied = [each for each in done if isinstance(each, Applied)]
        for each in applied:
            self._ports.batches.release(each.step.plan.keys)
            for loss in each.losses:
                self._meters.stepped(loss)
            if each.squares is not None:
                self._meters.noise.measured(*each.squares)
        if applied:
            self._reports.applied(applied)
        for undone in done:
            if isinstance(undone, ev.Undone):
                self._meters.shared(undone.step, -1)
                self._reports.undone(undone)
        if error is not None:
            self._reports.failed(error)


def _squares(total: Total) -> tuple[tuple[float, ...], float] | None:
    """The squared norms of a step's batches and of their mean, if they were measured."""
    return (total.contribution.squares, total.square) if total.square is not None else None
