"""The schedule of evaluations: when one is due, whether it is skipped, and whether training waits for it.

    skip    an evaluation that is due while another one is under way is skipped
    wait    none is skipped: training goes on beside one evaluation, and waits if another one is due meanwhile
    hold    training waits for each result, because it decides how training goes on

Knows no models and no metrics, and no clock: callers pass `now`.
"""

from __future__ import annotations

from collections import deque

from w5xde.control import events as ev
from w5xde.control.steps.cut import EvaluatedUntil, Progress

SKIP, WAIT, HOLD = "skip", "wait", "hold"
# How many evaluations may be under way while training goes on.
_BESIDE = {SKIP: 1, WAIT: 1, HOLD: 0}


class EvaluationSchedule:
    """Decides when the model is evaluated."""

    def __init__(self, every_steps: int | None, policy: str, *, is_on: bool) -> None:
        """Begin a run. Without `every_steps` an evaluation is due after each epoch."""
        self._every_steps = every_steps
        self._policy = policy
        self._is_on = is_on
        # Where each evaluation that is under way was due; the first one is measured, the others wait.
        self._under_way: deque[EvaluatedUntil] = deque()
        # Up to here all that was due was begun or skipped; and up to here it has ended.
        self._begun = self._ended = EvaluatedUntil()
        self._waits_since: float | None = None
        self._has_told = False

    @property
    def ended(self) -> EvaluatedUntil:
        """Up to which step and epoch all evaluations that were due have ended, or were skipped."""
        return self._ended

    @property
    def holds(self) -> bool:
        """Whether no step may begin before an evaluation has ended."""
        return len(self._under_way) > _BESIDE[self._policy]

    def resume(self, ended: EvaluatedUntil | None, progress: Progress) -> None:
        """Continue where an earlier life was; None: it did not say, and nothing is made up for."""
        self._begun = self._ended = ended or EvaluatedUntil(progress.steps, progress.epochs)

    def begin_if_due(self, progress: Progress) -> list[ev.Effect]:
        """Have the model evaluated after these steps, if that is due; or say that it is skipped."""
        now, before = EvaluatedUntil(progress.steps, progress.epochs), self._begun
        if not self._is_on or not self._is_after(before, now):
            return []
        self._begun = now
        if self._under_way and self._policy == SKIP:
            progress.evaluations_skipped += 1
            return self._tell_skipped(now)
        self._under_way.append(now)
        return [ev.Evaluate(now.steps)]

    def _is_after(self, before: EvaluatedUntil, now: EvaluatedUntil) -> bool:
        every = self._every_steps
        return now.steps // every > before.steps // every if every else now.epochs > before.epochs

    def _tell_skipped(self, due: EvaluatedUntil) -> list[ev.Effect]:
        if self._has_told:
            return []
        self._has_told = True
        text = (
            f"the evaluation after step {due.steps} is skipped, because that of step"
            f" {self._under_way[0].steps} is still under way; later ones are counted, not told"
            " (--evaluate wait skips none)"
        )
        return [ev.Note("evaluation skipped", text, {"step": due.steps})]

    def end(self, progress: Progress, now: float) -> None:
        """The evaluation that was begun first has ended, with a result or without."""
        if self._under_way:
            self._ended = self._under_way.popleft()
        if not self._under_way:
            self._ended = self._begun
        if self._waits_since is not None and not self.holds:
            progress.evaluation_wait_seconds += now - self._waits_since
            self._waits_since = None

    def wait(self, now: float) -> None:
        """Note that nodes could be lent work now, if no evaluation was waited for."""
        if self._waits_since is None:
            self._waits_since = now
