"""Restarts: what an engine does when a command that it minds has ended. Pure: callers wait and start.

    0                       the run is over
    75                      it was stopped, or its run is in use elsewhere: start it again
    killed by a signal      start it again, but not for ever
    any other code          a mistake that would be made again: show it to the user

A pause before each start grows while lives are short.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from w5xde.engines.minded import Ended
from w5xde.engines.told import code_of_error
from w5xde.errors import NOT_OVER

# A command that lived so long has done something: the next pause begins anew.
LONG_LIFE_SECONDS = 60.0
# Pauses before the next start, by the number of short lives before it; the last one stays.
PAUSES_SECONDS = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# So many short lives that a signal ended, one after the other, mean that it will not work.
KILLED_MAX = 10
# The device was lost or memory ran out; or a ticket was used up, or is of an earlier run, and will be
# replaced: the same command may work the next time.
_PASSING = {"W5-302", "W5-105", "W5-113"}


class Next(Enum):
    """What follows the end of a command."""

    OVER = "over"
    AGAIN = "again"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows, and after how many seconds."""

    next: Next
    pause_seconds: float = 0.0


class Restarts:
    """Decides for one command; remembers how many short lives it had in a row."""

    def __init__(self) -> None:
        self._short_lives = 0
        self._killed = 0

    def after(self, ended: Ended) -> Decision:
        """Decide what follows this end."""
        if ended.status == 0:
            return Decision(Next.OVER)
        is_short = ended.seconds <= LONG_LIFE_SECONDS
        self._short_lives = self._short_lives + 1 if is_short else 0
        if ended.status != NOT_OVER:
            if ended.status > 0 and code_of_error(ended.lines) not in _PASSING:
                return Decision(Next.FAILED)
            self._killed = self._killed + 1 if is_short else 0
            if self._killed >= KILLED_MAX:
                return Decision(Next.FAILED)
        return Decision(Next.AGAIN, PAUSES_SECONDS[min(self._short_lives, len(PAUSES_SECONDS) - 1)])
