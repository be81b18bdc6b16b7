"""The state of a run: plan, members, leases, mode, counts and version, and what every decision needs of them.

Shared by the classes that decide (`membership`, `answers`, `step_decisions`). It changes only while
`CoordinatorCore.handle` runs; everything else reads it through `CoreView`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from w5xde.control import events as ev
from w5xde.control.modes.base import Mode
from w5xde.control.modes.choice import choose_mode
from w5xde.control.modes.validation import Validation
from w5xde.control.pool.members import Member, Members
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.cut import Accounts, Progress
from w5xde.control.steps.evaluation_schedule import EvaluationSchedule
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.plan import Plan
from w5xde.control.steps.tally import Tally
from w5xde.control.trust.failures import Failures
from w5xde.control.trust.norm_limits import NormCheck, NormLimits
from w5xde.control.trust.quorum import Quorum
from w5xde.control.trust.rollback import Rollback
from w5xde.control.trust.verification import Verification

# How long a run that ends in a hurry waits for answers that are under way: most batches take less, and the
# 20 s in which its process must end have to suffice for the goodbyes and for a checkpoint too.
HURRY_SECONDS = 4.0


class RunState:
    """One run, and how it lends and ends."""

    def __init__(self, plan: Plan, settings: CoreSettings, chance: random.Random | None) -> None:
        self.plan = plan
        self.settings = settings
        self.members = Members()
        self.leases = Leases(settings.incarnation)
        self.mode: Mode = choose_mode(settings, plan, self.members, self.leases)
        self.validation = Validation(self.mode, settings.validation_sizes)
        self.tally = Tally(Quorum(settings.robust), skip_bad_batches=settings.skip_bad_batches)
        self.norm_check = NormCheck(
            NormLimits(settings.max_update_norm, settings.own_norm),
            NormLimits(settings.max_update_norm, settings.own_step_norm),
        )
        self.failures = Failures(self.mode, self.members, self.leases, self.tally, self.norm_check)
        self.verification = Verification(settings.verify, chance, self.leases, self.norm_check)
        self.rollback = Rollback(self.mode, self.leases, self.tally, self.verification)
        self.evaluations = EvaluationSchedule(
            settings.evaluate_every, settings.evaluation_policy, is_on=settings.evaluates
        )
        # How many steps were decided; the learner applies them in this order, maybe a moment later.
        self.version = 0
        self.started_at: float | None = None
        # Seconds of training in earlier lives of the coordinator.
        self.seconds_before = 0.0
        self.is_finished = False
        self._stop: ev.Stop | None = None
        # When a run that ends in a hurry gives up what is under way.
        self._gives_up_at: float | None = None

    @property
    def progress(self) -> Progress:
        return self.tally.progress

    @property
    def accounts(self) -> Accounts:
        return self.tally.accounts

    def seconds(self, now: float) -> float:
        """How long training has gone on, in all lives of the coordinator."""
        return self.seconds_before + (now - self.started_at if self.started_at is not None else 0.0)

    # --- lending ----------------------------------------------------------------------------------

    def lend(self, candidates: Iterable[Member], now: float) -> list[ev.Effect]:
        """Lend to these members what the mode grants them."""
        if self.is_finished or self.hurries:
            return []
        candidates = list(candidates)
        self.validation.open_if_ready(self.version, is_applied=self.tally.is_applied)
        granted = self.validation.grants(candidates, self.version, now)
        choose = self.verification.choose
        assigned = [ev.Assign(each[0].node, each, choose(each, is_alone=False)) for each in granted]
        if self.evaluations.holds:
            self.evaluations.wait(now)
            return list(assigned)
        return [*assigned, *([] if self.validation.comes_first else self._lend_steps(candidates, now))]

    @property
    def puts_steps_off(self) -> bool:
        """Whether a complete step waits: the weights are being measured, or the result decides about it."""
        return self.validation.is_under_way or self.evaluations.holds

    def _lend_steps(self, candidates: list[Member], now: float) -> list[ev.Effect]:
        granted = self.mode.grants(candidates, self.version, now)
        if not granted:
            return []
        if self.started_at is None:
            self.started_at = now
        choose, is_alone = self.verification.choose, self.members.is_alone(granted[0][0].step.leaf_batches)
        return [ev.Assign(each[0].node, each, choose(each, is_alone=is_alone)) for each in granted]

    def give_back(self, lease: Lease) -> None:
        """Free the batches of a lease that ended without an answer."""
        (self.validation if lease.step.validates else self.mode).give_back(lease)

    def lend_to_idle(self, now: float) -> list[ev.Effect]:
        return self.lend([member for member in self.members if not member.pending], now)

    def settle(self, node: str, number: int, now: float) -> tuple[Lease | str, Member | None]:
        """End a lease of this node; instead of the lease, why it cannot be ended."""
        member = self.members.get(node)
        if member is not None:
            self.members.returned(member, number, now)
        return self.leases.settle(number, node), member

    # --- the end ----------------------------------------------------------------------------------

    def stop(self, stop: ev.Stop, now: float) -> list[ev.Effect]:
        """Finish what is begun, and begin nothing new; in a hurry finish what is lent, if that comes soon."""
        self._stop = self._stop or stop
        self.mode.is_closing = True
        if stop.hurries and self._gives_up_at is None:
            self._gives_up_at = now + HURRY_SECONDS
        return [*self.finish_in_a_hurry(now), *self.finish_if_settled()]

    @property
    def hurries(self) -> bool:
        """Whether the run must end within a few seconds."""
        return self._gives_up_at is not None

    def finish_in_a_hurry(self, now: float) -> list[ev.Effect]:
        """End a run that hurries: once nothing is under way, or the time for that is up."""
        if self._gives_up_at is None or self._stop is None or self.is_finished:
            return []
        if now < self._gives_up_at and (self.leases or not self.tally.is_applied):
            return []
        # The trained model would still have to be evaluated, which may take long: the next life does that.
        is_over = self.plan.is_over and not self.mode.open_steps and not self.mode.put_off
        if is_over and self.tally.is_applied and not self.settings.evaluates and not self.validation.is_on:
            return self.finish("all steps done")
        return self.finish(self._stop.reason, interrupted=True)

    @property
    def is_stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self._stop is not None

    def finish_if_settled(self) -> list[ev.Effect]:
        if self.is_finished or self.hurries:
            return []
        if not self.mode.is_settled or self.validation.is_under_way:
            return []
        # A run whose last step was under way when it was stopped is over; a step that is given up is not.
        is_over = self.plan.is_over and not self.mode.open_steps
        if not is_over and self._stop is None:
            return []
        if self.validation.is_on and self.members and not self.validation.is_done_for(self.version):
            # The last version is measured too, while nodes are there.
            self.validation.want(is_last=True)
            return []
        if is_over or self._stop is None:
            return self.finish("all steps done")
        return self.finish(self._stop.reason, interrupted=self._stop.interrupts)

    def finish(self, reason: str, error: str = "", *, interrupted: bool = False) -> list[ev.Effect]:
        self.is_finished = True
        return [ev.Finish(reason, error, interrupted)]

    def end_epoch(self, epoch: int) -> list[ev.Effect]:
        """Say that an epoch is complete, if it is; the run ends if batches of it are missing for good."""
        effects = self.tally.end(epoch, is_finished=self.is_finished)
        self.is_finished |= any(isinstance(each, ev.Finish) for each in effects)
        return effects
