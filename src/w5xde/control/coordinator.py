"""The coordinator's mind: routes events to plan, members, leases and mode, and collects effects.

Holds no rule of its own beyond the order of things. The real coordinator and the simulator drive this
very code: `for effect in core.handle(event, now): perform(effect)`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from w5xde.control import events as ev
from w5xde.control.modes.robust_mode import mode_of
from w5xde.control.modes.sync import Mode
from w5xde.control.pool.members import Member, Members
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.cut import Accounts, Cut, Progress
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import StepWork
from w5xde.control.steps.plan import Plan
from w5xde.control.steps.save_schedule import SaveSchedule
from w5xde.control.steps.tally import Tally
from w5xde.control.trust.failures import Failures
from w5xde.control.trust.norm_limits import NormCheck, NormLimits
from w5xde.control.trust.quorum import Quorum
from w5xde.control.trust.rollback import Rollback
from w5xde.control.trust.verification import Verification
from w5xde.control.view import CoreView
from w5xde.tree import Span

# Fine enough to overtake a late batch soon, coarse enough to cost nothing.
TICK_SECONDS = 0.1


class CoordinatorCore:
    """All decisions of a run, as one state machine."""

    def __init__(
        self,
        plan: Plan,
        settings: CoreSettings,
        cut: Cut | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """A new run, or with the cut of an earlier life the rest of one. `chance`: what nobody foresees."""
        self.plan = plan
        self.members = Members()
        self.leases = Leases(settings.incarnation)
        self.mode: Mode = mode_of(settings, plan, self.members, self.leases)
        # How many steps were decided; the learner applies them in this order, maybe a moment later.
        self.version = 0
        # What others may read; only `handle` changes anything.
        self.view = CoreView(self)
        self.tally = Tally(Quorum(settings.robust), skip_bad_batches=settings.skip_bad_batches)
        self.started_at: float | None = None
        self.is_finished = False
        self._settings = settings
        self._stop_reason = ""
        self._norm_check = NormCheck(NormLimits(settings.max_update_norm, settings.own_norm))
        self._failures = Failures(self.mode, self.members, self.leases, self.tally, self._norm_check)
        self.verification = Verification(settings.verify, chance, self.leases, self._norm_check)
        self._rollback = Rollback(self.mode, self.leases, self.tally, self.verification)
        # Steps that were undone once.
        self._undone: set[int] = set()
        # To be said as soon as somebody listens.
        self._opening: list[ev.Effect] = []
        self._seconds_before = 0.0
        self._saver = SaveSchedule(settings.save_seconds, settings.save_steps, is_resumed=cut is not None)
        if cut is not None:
            self._resume(cut)
        self._handlers: dict[type, Callable[[Any, float], list[ev.Effect]]] = {
            ev.Joined: self._joined,
            ev.Left: self._left,
            ev.Answered: self._answered,
            ev.Failed: self._failed,
            ev.Verified: self._verified,
            ev.Dropped: self._dropped,
            ev.Discovered: self._discovered,
            ev.Stepped: self._stepped,
            ev.Undone: self._undo,
            ev.Saved: self._saved,
            ev.SaveFailed: self._save_failed,
            ev.Broke: lambda event, now: self._finish("", error=event.reason),
            ev.Stop: self._stop,
            ev.Ticked: self._ticked,
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Everything that should happen because of this event, in order."""
        if self.is_finished:
            # What was decided before the end is still applied, and counts, or is undone, and does not.
            if isinstance(event, ev.Undone):
                return self._reopen(event)
            return self._count_steps(event) if isinstance(event, ev.Stepped) else []
        opening, self._opening = self._opening, []
        return [*opening, *self._handlers[type(event)](event, now)]

    @property
    def progress(self) -> Progress:
        return self.tally.progress

    @property
    def accounts(self) -> Accounts:
        return self.tally.accounts

    # --- who is here ------------------------------------------------------------------------------

    def _joined(self, event: ev.Joined, now: float) -> list[ev.Effect]:
        member = self.members.join(event.node, now, event.machine, event.slots, event.guess_seconds)
        self.verification.joined(event.node)
        return [ev.Note("joined", f"{event.node} joined", {"node": event.node}), *self._lend([member], now)]

    def _left(self, event: ev.Left, now: float) -> list[ev.Effect]:
        member = self.members.leave(event.node)
        if member is None:
            return []
        held = self.leases.of_node(event.node)
        for lease in held:
            self.leases.end(lease)
            self.mode.give_back(lease)
        given_back = sum(lease.span.count for lease in held)
        text = f"{event.node} left ({event.reason})"
        if given_back:
            text += f"; its {given_back} batch{'es' * (given_back > 1)} will be lent again"
        note = ev.Note("left", text, {"node": event.node, "reason": event.reason, "batches": given_back})
        return [
            note,
            *([ev.Expire(event.node, [lease.id for lease in held], event.reason)] if held else []),
            *self._lend(self.members, now),
            *self._finish_if_settled(),
        ]

    def _ticked(self, event: ev.Ticked, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for name, heard_at in event.heard.items():
            self.members.heard(name, heard_at)
        stall = self.members.forgive_stall(now, TICK_SECONDS)
        if stall:
            text = f"the coordinator stood still for {stall:.1f} s"
            effects.append(ev.Note("stalled", text, {"seconds": stall}))
        for member in self.members.silent(now):
            reason = f"silent for {now - member.heard_at:.1f} s"
            effects.append(ev.Close(member.name, reason, for_good=False))
            effects += self._left(ev.Left(member.name, reason), now)
        limit = self._settings.seconds
        if limit is not None and self.started_at is not None and self.seconds(now) >= limit:
            effects += self._stop(ev.Stop("time is up"), now)
        # A run that is resumed may have nothing left to do.
        effects += self._finish_if_settled()
        if self.is_finished:
            return effects
        effects += self._save_if_due(now)
        self.mode.loaded(event.machine, event.load)
        self.mode.overtake(now)
        return effects + self._lend([member for member in self.members if not member.pending], now)

    # --- what comes back --------------------------------------------------------------------------

    def _answered(self, event: ev.Answered, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        norms = event.norms or [0.0] * len(event.leases)
        for number, norm in zip(event.leases, norms, strict=True):
            if self.is_finished:
                return effects
            effects += self._take(event.node, number, norm, now)
        member = self.members.get(event.node)
        if member is not None:
            self.members.measured(member, event.batch_seconds, event.compute_seconds, event.core_share)
            effects += self._lend([member], now)
        return effects

    def _take(self, node: str, number: int, norm: float, now: float) -> list[ev.Effect]:
        """The answer to one lease: what is to happen with it."""
        held = self.leases.get(number) if self.verification.holds_back(number) else None
        if held is not None and held.node == node:
            # The lease stays what it is meanwhile: it may even be overtaken, or its node go.
            return [ev.Verify(held)] if self.verification.begin(number, norm) else []
        return self._accept(node, number, norm, now, verified=False)

    def _accept(self, node: str, number: int, norm: float, now: float, *, verified: bool) -> list[ev.Effect]:
        lease, member = self._settle(node, number, now)
        if isinstance(lease, str):
            return [ev.Reject(node, number, lease, fenced=True)]
        reason = self.mode.admit(lease, self.version)
        if reason:
            self._failures.succeeded(member)
            self.mode.give_back(lease)
            return [ev.Reject(node, number, reason)]
        doubt = self._norm_check.check(lease, norm, is_verified=verified)
        if doubt:
            return self._fail(lease, member, doubt, norm, now)
        self._failures.succeeded(member)
        complete = self.mode.take(lease)
        fold = ev.Fold(lease, self.version - lease.version)
        return [fold, *(self._step(complete, now) if complete is not None else ())]

    def _verified(self, event: ev.Verified, now: float) -> list[ev.Effect]:
        norm = self.verification.end(event.lease)
        if event.wrong:
            lease, _ = self._settle(event.node, event.lease, now)
            reason = f"an update of it was computed again, and is wrong: {event.wrong}"
            told = self._rollback.convict(event, lease, reason, self.version)
            return told + self._turn_out(event.node, reason, now)
        effects = self.verification.count(event, self.progress)
        effects += self._accept(event.node, event.lease, norm, now, verified=True)
        return effects + ([] if self.is_finished else self._lend_to(self.members.get(event.node), now))

    def _failed(self, event: ev.Failed, now: float) -> list[ev.Effect]:
        lease, member = self._settle(event.node, event.lease, now)
        if isinstance(lease, str):
            return [ev.Reject(event.node, event.lease, lease, fenced=True), *self._lend_to(member, now)]
        return self._fail(lease, member, event.reason, event.norm, now)

    def _fail(
        self, lease: Lease, member: Member | None, reason: str, norm: float | None, now: float
    ) -> list[ev.Effect]:
        effects, hopeless = self._failures.failed(lease, reason, norm)
        if hopeless is not None:
            effects += self._set_aside(hopeless, lease, reason, now)
            if self.is_finished:
                return effects
        # A node that was refused is judged when others have computed the same.
        broken = self._failures.is_broken(member) if member is not None and norm is None else ""
        if broken:
            return effects + self._turn_out(lease.node, broken, now, bans=False)
        return effects + self._lend(self.members, now)

    def _set_aside(self, work: StepWork, lease: Lease, reason: str, now: float) -> list[ev.Effect]:
        effects = self._failures.set_aside(work, lease, reason)
        self.is_finished = isinstance(effects[-1], ev.Finish)
        complete = None if self.is_finished else self.mode.set_aside(lease.step.index, lease.span)
        return effects + (self._step(complete, now) if complete is not None else [])

    def _turn_out(self, node: str, reason: str, now: float, *, bans: bool = True) -> list[ev.Effect]:
        """It must go, if it has not gone; and unless it was only unlucky it may not come back."""
        effects: list[ev.Effect] = [ev.Ban(node, reason)] if bans else []
        if node in self.members:
            effects += [ev.Close(node, reason, for_good=True), *self._left(ev.Left(node, reason), now)]
        return effects

    def _dropped(self, event: ev.Dropped, now: float) -> list[ev.Effect]:
        lease, member = self._settle(event.node, event.lease, now)
        if isinstance(lease, str):
            return self._lend_to(member, now)
        self.mode.give_back(lease)
        expire = ev.Expire(event.node, [event.lease], "not sent, or not computed")
        told = self.members.cannot_hold(member, event.batches) if member is not None else ""
        notes = [ev.Note("little memory", told, {"node": event.node})] if told else []
        return [expire, *notes, *self._lend(self.members, now)]

    def _settle(self, node: str, number: int, now: float) -> tuple[Lease | str, Member | None]:
        member = self.members.get(node)
        if member is not None:
            self.members.returned(member, number, now)
        return self.leases.settle(number, node), member

    # --- steps ------------------------------------------------------------------------------------

    def _step(self, work: StepWork, now: float) -> list[ev.Effect]:
        step = work.plan
        effects = self._rollback.cancel_leases(step.index)
        if self.mode.is_stale(work, self.version):
            return [*effects, self._rollback.reopen(step, self.version)]
        shares = work.tree.take(Span(0, step.count)) or []
        told, out = self._failures.blame(step.index, shares)
        if not shares:
            # Every batch of it is set aside: there is nothing to apply.
            self.mode.stepped(step.index)
            self.accounts.apply(step, 0)
            return effects + self._end_epoch(step.epoch) + self._finish_if_settled()
        decided = ev.Step(step, self.version, shares)
        remark = self.tally.decide(decided)
        self.verification.applied(shares)
        self.version += decided.steps
        effects += [decided, *remark, *told]
        for node, reason in out.items():
            effects += self._turn_out(node, reason, now)
        return effects

    def _undo(self, event: ev.Undone, now: float) -> list[ev.Effect]:
        """The learner is as it was before the step: lend its batches again, but not for ever."""
        index = event.step.plan.index
        if event.reason and index in self._undone:
            error = f"{event.reason}, and once more when tried again"
            return [*self._reopen(event), *self._finish("", error=error)]
        if event.reason:
            self._undone.add(index)
        return [*self._reopen(event), *self._lend(self.members, now)]

    def _reopen(self, event: ev.Undone) -> list[ev.Effect]:
        effects = self._rollback.undo(event)
        if effects:
            self.version = event.step.version
        return effects

    def _stepped(self, event: ev.Stepped, now: float) -> list[ev.Effect]:
        before = self.progress.steps
        effects = self._count_steps(event)
        waiting: Iterable[Member] = ()
        for step in event.steps:
            waiting = self.mode.stepped(step)
        ending = self._finish_if_settled()
        every = self._settings.evaluate_every
        is_due = self.progress.steps // every > before // every if every else bool(effects)
        # The end has an evaluation of its own.
        if self._settings.evaluates and is_due and not self.is_finished:
            effects.append(ev.Evaluate(self.progress.steps))
        effects += [*ending, *self._save_if_due(now), *(self._lend(waiting, now) if waiting else ())]
        return effects

    def _count_steps(self, event: ev.Stepped) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for each in event.steps:
            step = self.tally.apply(each)
            effects += self._end_epoch(step.plan.epoch)
        if event.durable:
            self.progress.durable_steps = self.progress.steps
        elif self._settings.logs_steps:
            self._saver.want()
        return effects

    def _end_epoch(self, epoch: int) -> list[ev.Effect]:
        told = self.tally.end(epoch, is_finished=self.is_finished)
        self.is_finished |= any(isinstance(each, ev.Finish) for each in told)
        return told

    def _discovered(self, event: ev.Discovered, now: float) -> list[ev.Effect]:
        self.plan.discovered(event.epoch, event.samples)
        return self._lend([member for member in self.members if not member.pending], now)

    # --- what is kept -----------------------------------------------------------------------------

    def seconds(self, now: float) -> float:
        """How long training has gone on, in all lives of the coordinator."""
        return self._seconds_before + (now - self.started_at if self.started_at is not None else 0.0)

    def cut(self, now: float) -> Cut:
        """What a checkpoint must hold of all that is decided so far."""
        undone = [work.plan for work in self.mode.open_works] + self.plan.undone
        norms = self._norm_check.limits.state()
        return self.tally.cut(self.version, self.plan.cursor, undone, self.seconds(now), norms)

    def _resume(self, cut: Cut) -> None:
        self.version = cut.version
        self._seconds_before = cut.seconds
        self._norm_check.limits.resume(cut.usual_norms)
        self.plan.resume(cut.cursor, cut.undone)
        self._saver.count_from(cut.progress.steps, 0.0)
        for each in self.tally.resume(cut):
            self.plan.again(each.epoch, each.batch, each.samples)
        for epoch in sorted(self.accounts.batches):
            self._opening += self._end_epoch(epoch)

    def _save_if_due(self, now: float) -> list[ev.Effect]:
        steps = self.tally.decided_steps
        if self.is_finished or not self._saver.is_due(steps, now):
            return []
        self._saver.begun(steps, now)
        return [ev.Save(self.cut(now))]

    def _saved(self, event: ev.Saved, now: float) -> list[ev.Effect]:
        self.progress.durable_steps = max(self.progress.durable_steps, event.steps)
        return self._saver.saved(event.steps)

    def _save_failed(self, event: ev.SaveFailed, now: float) -> list[ev.Effect]:
        return self._saver.failed(event.reason, self.progress.durable_steps, now)

    # --- the end ----------------------------------------------------------------------------------

    def _stop(self, event: ev.Stop, now: float) -> list[ev.Effect]:
        self._stop_reason = self._stop_reason or event.reason
        self.mode.is_closing = True
        return self._finish_if_settled()

    def _finish_if_settled(self) -> list[ev.Effect]:
        if self.is_finished or not self.mode.is_settled:
            return []
        if self._stop_reason:
            return self._finish(self._stop_reason)
        return self._finish("all steps done") if self.plan.is_over else []

    def _finish(self, reason: str, error: str = "") -> list[ev.Effect]:
        self.is_finished = True
        return [ev.Finish(reason, error)]

    # --- lending ----------------------------------------------------------------------------------

    def _lend_to(self, member: Member | None, now: float) -> list[ev.Effect]:
        return self._lend([member], now) if member is not None else []

    def _lend(self, candidates: Iterable[Member], now: float) -> list[ev.Effect]:
        if self.is_finished:
            return []
        granted = self.mode.grants(candidates, self.version, now)
        if granted and self.started_at is None:
            self.started_at = now
        choose, is_alone = self.verification.choose, len(self.members) == 1
        return [ev.Assign(each[0].node, each, choose(each, is_alone=is_alone)) for each in granted]
