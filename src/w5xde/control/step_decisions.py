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
from w5xde.control.steps.cut import Aside, Cut
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
        state = self._state
        effects = state.rollback.cancel_leases(work.plan.index)
        if state.puts_steps_off or state.mode.put_off:
            state.mode.put_off.append(work)
            return effects
        return effects + self._decide(work, now)

    def _decide_put_off(self, now: float) -> list[ev.Effect]:
        """Decide on the next step that was put off: one, for a validation may be due after it."""
        state, effects = self._state, []
        while state.mode.put_off and not (state.puts_steps_off or state.is_finished):
            effects += self._decide(state.mode.put_off.pop(0), now)
            if any(isinstance(each, ev.Step) for each in effects):
                break
        return effects

    def _decide(self, work: OpenStep, now: float) -> list[ev.Effect]:
        state, step = self._state, work.plan
        shares = work.tree.take(Span(0, step.count)) or []
        notes, at_fault = state.failures.blame(step.index, shares)
        if not shares:
            # Every batch of the step is set aside: there is nothing to apply.
            state.mode.stepped(step.index)
            state.accounts.apply(step, 0)
            return state.end_epoch(step.epoch) + state.finish_if_settled()
        decided = ev.Step(step, state.version, shares, state.mode.rate(work))
        remarks = state.tally.decide(decided)
        state.version += decided.steps
        effects: list[ev.Effect] = [decided, *remarks, *notes]
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
            effects = self.reopen(event)
            if self._state.settings.all_or_nothing:
                return effects + self.give_up(self._state.mode.open_steps[0], error, [], now)
            return [*effects, *self._state.finish("", error=error)]
        # A stretch is not tried again: its steps are, one by one, and the first of them has its index.
        if event.reason and not event.step.plan.apart:
            self._rolled_back.add(index)
        effects = [*self.reopen(event, goes_on=True), *self._decide_put_off(now)]
        return [*effects, *self._state.lend(self._state.members, now)]

    def reopen(self, event: ev.Undone, *, goes_on: bool = False) -> list[ev.Effect]:
        effects = self._state.rollback.undo(event, goes_on=goes_on)
        if effects:
            self._state.version = event.step.version
        return effects

    def give_up(self, work: OpenStep, reason: str, nodes: list[str], now: float) -> list[ev.Effect]:
        """Set a whole step aside: nothing of it is applied, and the version grows without it."""
        state, step = self._state, work.plan
        whole = Span(0, step.count)
        effects: list[ev.Effect] = [
            *state.rollback.cancel_leases(step.index),
            ev.SetAside(step, whole, reason, nodes, is_all=True),
        ]
        state.version += 1
        for (epoch, batch), samples in zip(step.keys, step.sizes, strict=True):
            state.accounts.aside.append(Aside(epoch, batch, samples, reason, tuple(nodes)))
        complete = state.mode.set_aside(step.index, whole)
        return effects + (self.complete(complete, now) if complete is not None else [])

    def withdrawn(self, event: ev.Withdrawn, now: float) -> list[ev.Effect]:
        """The caller no longer waits for a step: set it aside."""
        for work in self._state.mode.open_steps:
            if work.plan.epoch == event.epoch:
                return self.give_up(work, event.reason, [], now)
        return []

    def stepped(self, event: ev.Stepped, now: float) -> list[ev.Effect]:
        """The learner has applied steps: evaluate, save and lend, if that is due."""
        state = self._state
        effects = self.count(event)
        waiting: Iterable[Member] = ()
        for step in event.steps:
            waiting = state.mode.stepped(step)
        ending = state.finish_if_settled()
        # The end has an evaluation of its own; a run that hurries has no time for any.
        if not state.is_finished and not state.hurries:
            effects += self._evaluate_if_due()
        if state.validation.comes_first:
            waiting = state.members
        effects += [*ending, *self._decide_put_off(now), *self.save_if_due(now)]
        return [*effects, *(state.lend(waiting, now) if waiting else ())]

    def evaluated(self, event: ev.Evaluated, now: float) -> list[ev.Effect]:
        """An evaluation has ended: training goes on, if it waited for that."""
        state = self._state
        state.evaluations.end(state.progress, now)
        state.validation.close()
        return [*self._decide_put_off(now), *state.finish_if_settled(), *state.lend(state.members, now)]

    def _evaluate_if_due(self) -> list[ev.Effect]:
        effects = self._state.evaluations.begin_if_due(self._state.progress)
        if not self._state.validation.is_on or not any(isinstance(each, ev.Evaluate) for each in effects):
            return effects
        # Nodes measure a validation set; otherwise the coordinator evaluates.
        self._state.validation.want()
        return [each for each in effects if not isinstance(each, ev.Evaluate)]

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
        begun = [*state.mode.open_steps, *state.mode.put_off]
        undone = [work.plan for work in begun] + state.plan.undone
        norms = state.norm_check.limits.state()
        cut = state.tally.cut(state.version, state.plan.cursor, undone, state.seconds(now), norms)
        rounds = state.plan.rounds
        # Only a choice that was made: another one may be made again.
        lengths = str(rounds) if rounds and not self._round_choice.is_open else None
        return replace(cut, round_lengths=lengths, evaluated=state.evaluations.ended)

    def resume(self, cut: Cut) -> list[ev.Effect]:
        """Continue from a cut; returns what to say of complete epochs, and an evaluation that is due."""
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
        effects = [effect for epoch in sorted(state.accounts.batches) for effect in state.end_epoch(epoch)]
        # An evaluation that was under way when the earlier life ended is made up for.
        state.evaluations.resume(cut.evaluated, cut.progress)
        return [*effects, *self._evaluate_if_due()]

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
