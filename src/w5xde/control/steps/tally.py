"""The tally: how far the run is, what is being applied, and what of each epoch is done.

Steps are decided, then applied by the learner in the same order, maybe a moment later. A cut counts what is
decided, because by the time the learner is asked for its state it has applied just that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from w5xde.control.events import Effect, Finish, Note, Step
from w5xde.control.steps.cut import Accounts, Aside, Cut, Progress, UsualNorms
from w5xde.control.steps.plan import Cursor, StepPlan
from w5xde.control.trust.quorum import Quorum


class Tally:
    """Counts steps, batches, samples and epochs of a run."""

    def __init__(self, quorum: Quorum, *, skip_bad_batches: bool) -> None:
        self._quorum = quorum
        self.progress = Progress()
        self.accounts = Accounts()
        self._skip_bad_batches = skip_bad_batches
        self._applying: dict[int, Step] = {}

    def resume(self, cut: Cut) -> list[Aside]:
        """Go on from a cut; returns what was set aside in epochs that are not complete: to be tried again."""
        self.progress = replace(cut.progress, durable_steps=cut.progress.steps)
        self.accounts = cut.accounts.copy()
        if self._skip_bad_batches:
            return []
        again = [each for each in self.accounts.aside if each.epoch in self.accounts.applied]
        self.accounts.aside = [each for each in self.accounts.aside if each not in again]
        return again

    @property
    def decided_steps(self) -> int:
        return self.progress.steps + sum(step.steps for step in self._applying.values())

    def decide(self, step: Step) -> list[Effect]:
        """A step will be applied; returns what is to be said of it."""
        self._applying[step.plan.index] = step
        return self._quorum.remark(step)

    def undo(self, step: Step) -> list[Step]:
        """The learner did not make the step, nor any decided since: they are decided no more.

        Nothing, if that is known already.
        """
        if self._applying.get(step.plan.index) is not step:
            return []
        undone = [each for each in self._applying.values() if each.version >= step.version]
        for each in undone:
            del self._applying[each.plan.index]
        return undone

    def apply(self, index: int) -> Step:
        """The learner has applied the step."""
        step = self._applying.pop(index)
        self._count(step, self.progress, self.accounts)
        return step

    def complete(self, epoch: int) -> bool:
        """Count the epoch as complete, if it is."""
        return self._complete(epoch, self.progress, self.accounts)

    def end(self, epoch: int, *, is_finished: bool) -> list[Effect]:
        """What is to be said if every batch of an epoch is applied or set aside."""
        if not self.accounts.is_over(epoch):
            return []
        aside = self.accounts.aside_of(epoch)
        if not self.complete(epoch):
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
        """All that is decided so far, as if it were applied."""
        progress, accounts = replace(self.progress), self.accounts.copy()
        for step in self._applying.values():
            self._count(step, progress, accounts)
            self._complete(step.plan.epoch, progress, accounts)
        steps = tuple(sorted(undone, key=lambda plan: plan.index))
        # A step that is begun again has all its batches before it, those set aside too.
        again = {key for plan in steps for key in plan.keys}
        accounts.aside = [each for each in accounts.aside if (each.epoch, each.batch) not in again]
        return Cut(version, progress, cursor, steps, accounts, seconds, norms)

    def _count(self, step: Step, progress: Progress, accounts: Accounts) -> None:
        """By how much everything grows with a step."""
        batches = sum(stop - start for start, stop, _, _ in step.shares)
        progress.steps += step.steps
        progress.batches += batches
        progress.samples += step.samples
        progress.degraded_steps += self._quorum.is_short(step)
        accounts.apply(step.plan, batches)
