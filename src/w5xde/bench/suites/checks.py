"""The cost of the coordinator's checks that updates, and the weights after a step, are finite and plausible.

The product cannot switch these checks off, and runs differ by more than they cost. So within one run they are
off for half a second, on for the next, and so on, and each turn is compared with its neighbour. Only in the
process of a benchmark, whose model is thrown away. The CPU time of the checks is measured too.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from w5xde.control.trust.norm_limits import NormLimits
from w5xde.learn.step.bounds import StateBounds
from w5xde.learn.step.finite import Gauge
from w5xde.learn.step.rollback import Undo

TURN_SECONDS = 0.5
# Reading the clock takes longer than a short check. So one of this many checks, at random, is timed and
# counts for all, less the time between two readings with nothing between them.
TIMED_OF = 16
_READINGS = 1000

# The checks, and what each returns while they are off.
_LOOKS: dict[tuple[type, str], Callable[..., Any]] = {
    (Gauge, "norms"): lambda gauge, body, vectors: [0.0] * len(vectors),
    (Gauge, "norm"): lambda gauge, vector: 0.0,
    (Gauge, "is_finite"): lambda gauge, vector: True,
    (StateBounds, "allow"): lambda bounds, version, norms, weights: True,
    (Undo, "save"): lambda undo, token, version: None,
    (Undo, "accept"): lambda undo, token, version: True,
    (NormLimits, "of"): lambda limit, batches: math.inf,
    (NormLimits, "learn"): lambda limit, norm, batches: None,
}


class CheckTurns:
    """Switches the checks of this process on and off, and measures each turn."""

    def __init__(self) -> None:
        # Batches a second of each turn, with checks and without.
        self.looking: list[float] = []
        self.blind: list[float] = []
        # CPU time of the process, and of the checks alone, in all turns with checks.
        self.cpu_seconds = 0.0
        self.look_cpu_seconds = 0.0
        self._is_on = False
        self._is_blind = False
        self._is_inside = False
        self._chance = random.Random(0)
        self._reading_seconds = 0.0
        # The beginning of the turn: time, batches and CPU time.
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
            if self._is_inside:  # one check calls another
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
        """Begin the next turn if it is time; `batches` is the total by now."""
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
