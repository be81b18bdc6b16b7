"""The schedule of checkpoints: when to write the next one, and when to retry one that failed.

Knows no files and no clock: callers pass `now`.
"""

from __future__ import annotations

from w5xde.control import events as ev

# A failed disk is tried again soon, then less often: a user who makes room should not wait long.
RETRY_SECONDS_FIRST = 1.0
RETRY_SECONDS_MOST = 10.0


class SaveSchedule:
    """Decides when to save, by seconds or by steps; one checkpoint at a time."""

    def __init__(self, every_seconds: float | None, every_steps: int | None, *, is_resumed: bool) -> None:
        self._every_seconds = every_seconds
        self._every_steps = every_steps
        self._is_on = every_seconds is not None or every_steps is not None
        self._is_saving = False
        # A new run saves at once: a state that cannot be saved should be known before hours of work.
        self._is_wanted = not is_resumed
        self._steps = 0
        self._next_at = 0.0
        self.failures = 0

    def is_due(self, steps: int, now: float) -> bool:
        if not self._is_on or self._is_saving:
            return False
        if self.failures:
            return now >= self._next_at
        if self._is_wanted:
            return True
        if self._every_steps is not None:
            return steps - self._steps >= self._every_steps
        return steps > self._steps and now >= self._next_at

    def count_from(self, steps: int, now: float) -> None:
        """Count from these steps on: their checkpoint is being written, or was restored."""
        self._steps = steps
        self._next_at = now + (self._every_seconds or 0.0)

    def begun(self, steps: int, now: float) -> None:
        self._is_saving, self._is_wanted = True, False
        self.count_from(steps, now)

    def saved(self, steps: int) -> list[ev.Effect]:
        """A checkpoint is written; return a note if the one before failed."""
        failures, self.failures = self.failures, 0
        self._is_saving = False
        text = f"checkpoints are written again; {steps} steps are safe"
        return [ev.Note("storage", text)] if failures else []

    def failed(self, reason: str, safe_steps: int, now: float) -> list[ev.Effect]:
        """A checkpoint could not be written; return a note for the first failure in a row."""
        self._is_saving = False
        self._next_at = now + min(RETRY_SECONDS_MOST, RETRY_SECONDS_FIRST * 2**self.failures)
        self.failures += 1
        text = f"a checkpoint could not be written: {reason}; training goes on"
        return [ev.Note("storage", f"{text}, but only {safe_steps} steps are safe")] * (self.failures == 1)

    def want(self) -> None:
        """Save as soon as possible."""
        self._is_wanted = True
