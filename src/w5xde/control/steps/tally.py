"""The tally: counts the steps that the learner has applied, and keeps those that are decided.

The learner applies decided steps in order, possibly later. A cut counts decided steps as applied, because
the learner has applied exactly those when it captures its state for the cut. Knows no learner and no files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from w5xde.control.events import Effect, Finish, Note, Step
from w5xde.control.steps.cut import Accounts, Aside, Cut, Progress, UsualNorms
from w5xde.control.steps.plan import Cursor, StepPlan
from w5xde.control.trust.quorum import Quorum


class Tally:
    """Counts the steps, batches, samples and epochs of a run."""

    def __init__(self, quorum: Quorum, *, skip_bad_batches: bool) -> None:
        self._quorum = quorum
        self.progress = Progress()
        self.accounts = Accounts()
        self._skip_bad_batches = skip_bad_batches
        self._applying: dict[int, Step] = {}

    def resume(self, cut: Cut) -> list[Aside]:
        """Continue from a cut; return the failed batches that must be tried again."""
        self.progress = replace(cut.progress, durable_steps=cut.progress.steps)
        self.accounts = cut.accounts.copy()
        if self._skip_bad_batches:
            return []
        again = [each for each in self.accounts.aside if each.epoch in self.accounts.applied]
        self.accounts.aside = [each for each in self.accounts.aside if each not in again]
        return again

    @property
    def is_applied(self) -> bool:
        """Whether the learner has applied every step that is decided."""
        return not self._applying

    @property
    def decided_steps(self) -> int:
        return self.progress.steps + sum(step.steps for step in self._applying.values())

    def decide(self, step: Step) -> list[Effect]:
        """A step is decided: keep it until the learner has applied it; return notes about it."""
        self._applying[step.plan.index] = step
        return self._quorum.remark(step)

    def undo(self, step: Step) -> list[Step]:
        """The learner did not apply this step, nor any later one: forget and return them.

        Returns an empty list if they are forgotten already.
        """
        if self._applying.get(step.plan.index) is not step:
            return []
        undone = [each for each in self._applying.values() if each.version >= step.version]
        for each in undone:
            del self._applying[each.plan.index]
        return undone

    def apply(self, index: int) -> Step:
        """The learner has applied the step: count it."""
        step = self._applying.pop(index)
        self._count(step, self.progress, self.accounts)
        return step

    def end(self, epoch: int, *, is_finished: bool) -> list[Effect]:
        """Return a note if the epoch is complete, or the end of the run if failed batches are missing."""
        if not self.accounts.is_over(epoch):
            return []
        aside = self.accounts.aside_of(epoch)
        if not self._complete(epoch, self.progress, self.accounts):
            if is_finished:
                return []
            batches = ", ".join(str(each.batch) for each in aside)
            which = f"batch{'es' * (len(aside) > 1)} {batches}"
            text = f"epoch {epoch + 1} is not complete: {which} failed wherever tried ({aside[0].reason})"
            return [Finish("", error=text)]
        without = f" without {len(aside)} that failed" if aside else ""
        facts = {"epoch": epoch + 1, "aside": [each.batch for each in aside]}
        return [Note("epoch", f"epoch {epoch + 1} is complete{without}", facts)]

    def _complete(self, epoch: int, progress: Progress, accounts: Accounts) -> bool:
        """Count the epoch as complete and return True, if every batch is applied or may be skipped."""
        if not accounts.is_over(epoch) or (accounts.aside_of(epoch) and not self._skip_bad_batches):
            return False
        accounts.close(epoch)
        progress.epochs += 1
        return True

    def cut(
        self,
        version: int,
        cursor: Cursor,
        undone: Iterable[StepPlan],
        seconds: float,
        norms: UsualNorms | None = None,
    ) -> Cut:
        """Return the state after all decided steps; `undone`: steps that are planned and not decided."""
        progress, accounts = replace(self.progress), self.accounts.copy()
        for step in self._applying.values():
            self._count(step, progress, accounts)
            self._complete(step.plan.epoch, progress, accounts)
        steps = tuple(sorted(undone, key=lambda plan: plan.index))
        # An undone step tries all its batches again, also those set aside.
        again = {key for plan in steps for key in plan.keys}
        accounts.aside = [each for each in accounts.aside if (each.epoch, each.batch) not in again]
        return Cut(version, progress, cursor, steps, accounts, seconds, norms)

    def _count(self, step: Step, progress: Progress, accounts: Accounts) -> None:
        """Add a step to the counts."""
        batches = step.batches
        progress.steps += step.steps
        progress.rounds += step.plan.columns > 0
        progress.batches += batches
        progress.samples += step.samples
        progress.degraded_steps += self._quorum.is_short(step)
        accounts.apply(step.plan, batches)
