"""Decisions about steps: when one is complete, applied, rolled back, evaluated and saved.

Knows no tensors and no clock: the learner reports what it has applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from w5xde.control import events as ev
from w5xde.control.membership import Membership
from w5xde.control.pool.members import Member
from w5xde.control.run_state import RunState
from w5xde.control.steps.cut import Cut
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.round_choice import RoundChoice
from w5xde.control.steps.save_schedule import SaveSchedule
from w5xde.specs.round_lengths import RoundLengths
from w5xde.tree import Span

# The kind of the note that says how far rounds grow; the ledger and the manifest keep it.
ROUND_LENGTHS = "round lengths"


class StepDecisions:
    """From a step whose batches are all in, to a checkpoint that holds it."""

    def __init__(self, state: RunState, membership: Membership, *, is_resumed: bool) -> None:
        self._state = state
        self._membership = membership
        settings = state.settings
        self._schedule = SaveSchedule(settings.save_seconds, settings.save_steps, is_resumed=is_resumed)
        self._round_choice = RoundChoice(state.plan, state.members, is_wanted=settings.chooses_rounds)
        # Steps that were rolled back once.
        self._rolled_back: set[int] = set()

    def complete(self, work: OpenStep, now: float) -> list[ev.Effect]:
        """Every batch of a step is in, or set aside: decide that the optimizer steps."""
        state, step = self._state, work.plan
        effects = state.rollback.cancel_leases(step.index)
        shares = work.tree.take(Span(0, step.count)) or []
        notes, at_fault = state.failures.blame(step.index, shares)
        if not shares:
            # Every batch of the step is set aside: there is nothing to apply.
            state.mode.stepped(step.index)
            state.accounts.apply(step, 0)
            return effects + state.end_epoch(step.epoch) + state.finish_if_settled()
        decided = ev.Step(step, state.version, shares, state.mode.rate(work))
        remarks = state.tally.decide(decided)
        state.version += decided.steps
        effects += [decided, *remarks, *notes]
        chosen = self._round_choice.decided(step, now)
        if chosen:
            effects.append(ev.Note(ROUND_LENGTHS, chosen, {"round_lengths": str(state.plan.rounds)}))
        for node, reason in at_fault.items():
            effects += self._membership.evict(node, reason, now)
        return effects

    def undone(self, event: ev.Undone, now: float) -> list[ev.Effect]:
        """The learner rolled a step back: lend its batches again, but not for ever."""
        index = event.step.plan.index
        if event.is_final:
            return self.reopen(event)
        if event.reason and index in self._rolled_back:
            error = f"{event.reason}, and once more when tried again"
            return [*self.reopen(event), *self._state.finish("", error=error)]
        # A stretch is not tried again: its steps are, one by one, and the first of them has its index.
        if event.reason and not event.step.plan.apart:
            self._rolled_back.add(index)
        return [*self.reopen(event, goes_on=True), *self._state.lend(self._state.members, now)]

    def reopen(self, event: ev.Undone, *, goes_on: bool = False) -> list[ev.Effect]:
        effects = self._state.rollback.undo(event, goes_on=goes_on)
        if effects:
            self._state.version = event.step.version
        return effects

    def stepped(self, event: ev.Stepped, now: float) -> list[ev.Effect]:
        """The learner has applied steps: evaluate, save and lend, if that is due."""
        state = self._state
        before = state.progress.steps
        effects = self.count(event)
        waiting: Iterable[Member] = ()
        for step in event.steps:
            waiting = state.mode.stepped(step)
        ending = state.finish_if_settled()
        every = state.settings.evaluate_every
        is_due = state.progress.steps // every > before // every if every else bool(effects)
        # The end has an evaluation of its own.
        if state.settings.evaluates and is_due and not state.is_finished:
            effects.append(ev.Evaluate(state.progress.steps))
        effects += [*ending, *self.save_if_due(now), *(state.lend(waiting, now) if waiting else ())]
        return effects

    def count(self, event: ev.Stepped) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        state = self._state
        for each in event.steps:
            step = state.tally.apply(each)
            state.verification.applied(step.shares, step.plan.leaf_batches)
            effects += state.end_epoch(step.plan.epoch)
        if event.durable:
            state.progress.durable_steps = state.progress.steps
        elif state.settings.logs_steps:
            self._schedule.want()
        return effects

    # --- checkpoints ------------------------------------------------------------------------------

    def cut(self, now: float) -> Cut:
        """What a checkpoint must hold of all that is decided so far."""
        state = self._state
        undone = [work.plan for work in state.mode.open_steps] + state.plan.undone
        norms = state.norm_check.limits.state()
        cut = state.tally.cut(state.version, state.plan.cursor, undone, state.seconds(now), norms)
        rounds = state.plan.rounds
        # Only a choice that was made: another one may be made again.
        return replace(cut, round_lengths=str(rounds)) if rounds and not self._round_choice.is_open else cut

    def resume(self, cut: Cut) -> list[ev.Effect]:
        """Continue from a cut; returns what to say of epochs that are complete."""
        state = self._state
        state.version = cut.version
        state.seconds_before = cut.seconds
        state.norm_check.limits.resume(cut.usual_norms)
        state.plan.resume(cut.cursor, cut.undone)
        if cut.round_lengths is not None:
            state.plan.rounds = RoundLengths.parse(cut.round_lengths)
            self._round_choice.is_open = False
        self._schedule.count_from(cut.progress.steps, 0.0)
        for each in state.tally.resume(cut):
            state.plan.retry_batch(each.epoch, each.batch, each.samples)
        return [effect for epoch in sorted(state.accounts.batches) for effect in state.end_epoch(epoch)]

    def save_if_due(self, now: float) -> list[ev.Effect]:
        steps = self._state.tally.decided_steps
        if self._state.is_finished or not self._schedule.is_due(steps, now):
            return []
        self._schedule.begun(steps, now)
        return [ev.Save(self.cut(now))]

    def saved(self, event: ev.Saved, now: float) -> list[ev.Effect]:
        progress = self._state.progress
        progress.durable_steps = max(progress.durable_steps, event.steps)
        return self._schedule.saved(event.steps)

    def save_failed(self, event: ev.SaveFailed, now: float) -> list[ev.Effect]:
        return self._schedule.failed(event.reason, self._state.progress.durable_steps, now)
