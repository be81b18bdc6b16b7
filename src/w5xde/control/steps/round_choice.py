"""The choice of how far rounds grow, with `--local-steps auto`: once, from the first rounds of a run.

    seconds of a round = columns of a node × steps × seconds of a step + seconds of talk

The talk of a round hardly depends on its length, so that long rounds make its share small. Only decides:
knows no tensors, no sockets and no clock.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from w5xde.control.pool.members import Members
from w5xde.control.steps.plan import Plan, StepPlan
from w5xde.specs.round_lengths import STEPS_MIN, RoundLengths
from w5xde.specs.round_settings import AUTO_STEPS_MAX

# Rounds grow until nodes compute for this share of the time.
USE = 0.9
# A gradient takes about this many times the bytes of a difference in 4 bits.
GRADIENT_BYTES = 9
# The talk is the median of this many rounds, without the first ones, which start nodes.
ROUNDS_MEASURED = 15


class RoundChoice:
    """Measures the rounds of a plan while they are short, and then says how far they grow."""

    def __init__(self, plan: Plan, members: Members, *, is_wanted: bool) -> None:
        self._plan = plan
        self._members = members
        self.is_open = is_wanted and plan.rounds is not None and plan.rounds.growth > 0
        self._decided_at: float | None = None
        # Seconds of talk of the last rounds, and of the steps that a node makes in one step of a round.
        self._talk: deque[float] = deque(maxlen=ROUNDS_MEASURED)
        self._step_seconds = 0.0

    def decided(self, step: StepPlan, now: float) -> str:
        """A round is complete. Returns a sentence once the choice is made, else nothing."""
        lengths = self._plan.rounds
        if not self.is_open or lengths is None:
            return ""
        before, self._decided_at = self._decided_at, now
        if before is not None:
            self._measure(step, now - before)
        # Up to here rounds are as short as they can be, however far they will grow.
        if step.index + step.steps < lengths.growth * (STEPS_MIN + 1):
            return ""
        self.is_open = False
        if not self._talk:
            return f"no round could be measured yet: rounds grow up to {lengths.most} steps"
        return self._choose(lengths)

    def _measure(self, step: StepPlan, seconds: float) -> None:
        computing = [member.compute_seconds for member in self._members if member.compute_seconds]
        if not computing or not step.columns:
            return
        at_once = min(step.columns, max(1, self._members.parallel))
        self._step_seconds = median(computing) * math.ceil(step.columns / at_once)
        self._talk.append(max(0.0, seconds - step.steps * self._step_seconds))

    def _choose(self, lengths: RoundLengths) -> str:
        talk, step = median(self._talk), self._step_seconds
        useful = math.ceil(USE / (1 - USE) * talk / step) if step else STEPS_MIN
        most = min(max(STEPS_MIN, useful), AUTO_STEPS_MAX)
        self._plan.rounds = RoundLengths(most, lengths.growth)
        text = (
            f"a round talks for {talk:.2g} s and a step takes {step:.2g} s: rounds grow up to {most} steps,"
            f" and nodes then compute for {_share(most * step, talk):.0%} of the time"
        )
        sync = _share(step, GRADIENT_BYTES * talk)
        if sync >= USE:
            text += f"; on this link --mode sync would use {sync:.0%} of it, and needs fewer samples"
        return text


def _share(computing: float, talking: float) -> float:
    return computing / (computing + talking) if computing + talking else 1.0
