"""What it takes a coordinator to look at numbers: whether updates, and the weights after a step, are sound.

The product has no switch for that, and runs differ by more than it takes. So a run closes its eyes for half a
second, opens them for the next, and so on: each turn is compared with its neighbour. Only here, in a process
that is thrown away with what it trained. The CPU time of the looks is counted too.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from w5xde.control.trust.norm_limits import NormLimits
from w5xde.learn.step.finite import Gauge
from w5xde.learn.step.rollback import Undo

TURN_SECONDS = 0.5
# Reading the clock takes longer than a short look: so one of so many, by chance, is timed and counts for all,
# and what passes between two readings with nothing between them is taken off.
TIMED_OF = 16
_READINGS = 1000

# Who looks, and what one says whose eyes are closed.
_LOOKS: dict[tuple[type, str], Callable[..., Any]] = {
    (Gauge, "norms"): lambda gauge, body, vectors: [0.0] * len(vectors),
    (Gauge, "norm"): lambda gauge, vector: 0.0,
    (Gauge, "is_finite"): lambda gauge, vector: True,
    (Undo, "keep"): lambda undo, token, version: None,
    (Undo, "is_sound"): lambda undo, token, version: True,
    (NormLimits, "of"): lambda limit, batches: math.inf,
    (NormLimits, "learn"): lambda limit, norm, batches: None,
}


class CheckTurns:
    """Opens and closes the eyes of this process, and counts what was done meanwhile."""

    def __init__(self) -> None:
        # Batches a second of each turn, with open eyes and with closed ones.
        self.looking: list[float] = []
        self.blind: list[float] = []
        # CPU time of the process, and of the looks alone, in all turns with open eyes.
        self.cpu_seconds = 0.0
        self.look_cpu_seconds = 0.0
        self._is_on = False
        self._is_blind = False
        self._is_inside = False
        self._chance = random.Random(0)
        self._reading_seconds = 0.0
        # When the turn began, how many batches there were then, and how much CPU time.
        self._since: tuple[float, int, float] | None = None

    def start(self) -> None:
        self._is_on = True
        passed = [-time.thread_time() + time.thread_time() for _ in range(_READINGS)]
        self._reading_seconds = statistics.median(passed)
        for (owner, name), unseen in _LOOKS.items():
            setattr(owner, name, self._look(vars(owner)[name], unseen))

    def _look(self, look: Callable[..., Any], unseen: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*arguments: Any) -> Any:
            if self._is_blind:
                return unseen(*arguments)
            if self._is_inside:  # one look is part of another
                return look(*arguments)
            self._is_inside = True
            begun = time.thread_time() if self._chance.random() * TIMED_OF < 1 else None
            try:
                return look(*arguments)
            finally:
                self._is_inside = False
                if begun is not None:
                    took = time.thread_time() - begun - self._reading_seconds
                    self.look_cpu_seconds += TIMED_OF * took

        return looked

    def turn(self, now: float, batches: int) -> None:
        """So many batches are done by now: the next turn, if it is time for it."""
        if not self._is_on:
            return
        cpu = time.process_time()
        if self._since is not None:
            then, before, cpu_before = self._since
            if now - then < TURN_SECONDS:
                return
            (self.blind if self._is_blind else self.looking).append((batches - before) / (now - then))
            self.cpu_seconds += 0.0 if self._is_blind else cpu - cpu_before
            self._is_blind = not self._is_blind
        self._since = now, batches, cpu
