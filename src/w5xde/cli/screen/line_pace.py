"""When the next line of progress is due in a log: every few seconds at first, ever more seldom later.

Knows no clock: callers pass the seconds since the beginning.
"""

from __future__ import annotations

# A line is due after a tenth of the time so far, so that a log of any length has about as many lines for its
# last hour as for its first minutes.
PART = 0.1
SECONDS_MIN, SECONDS_MAX = 5.0, 600.0


class LinePace:
    """The pace of one log."""

    def __init__(self) -> None:
        self._next = 0.0

    def is_due(self, seconds: float) -> bool:
        """Whether a line is due now; if so, the next one is later."""
        if seconds < self._next:
            return False
        self._next = seconds + min(SECONDS_MAX, max(SECONDS_MIN, PART * seconds))
        return True
