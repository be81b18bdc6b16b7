"""How long a coordinator looks at numbers: whether updates and the weights after a step are finite.

Nobody can switch that off, so it cannot be compared with a run without it. It is timed where it happens, in
CPU time, less what reading the clock takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from w5xde.learn.soundness import Gauge
from w5xde.learn.undo import Undo

# Who looks: at what arrives, and at what a step leaves (and what it could be put back to).
_LOOKS: list[tuple[type, tuple[str, ...]]] = [
    (Gauge, ("norms", "norm", "is_finite")),
    (Undo, ("keep", "is_sound")),
]


_CLOCK_READINGS = 1000


class CheckClock:
    """Counts the CPU time of all looks of this process, from `start` on. For a process of its own."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self._is_looking = False
        # What passes between two readings of the clock with nothing between them.
        self._reading_seconds = 0.0

    def start(self) -> None:
        passed = [-time.thread_time() + time.thread_time() for _ in range(_CLOCK_READINGS)]
        self._reading_seconds = statistics.median(passed)
        for owner, names in _LOOKS:
            for name in names:
                setattr(owner, name, self._timed(vars(owner)[name]))

    def _timed(self, look: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self._is_looking:  # one look inside another
                return look(*arguments)
            self._is_looking = True
            begun = time.thread_time()
            try:
                return look(*arguments)
            finally:
                self.cpu_seconds += max(0.0, time.thread_time() - begun - self._reading_seconds)
                self._is_looking = False

        return timed
