"""Round lengths: how many steps each round has, by the number of steps that were made before it.

    grow:50:20    a step more for each 50 steps, from 2 up to 20
    12            always 12

Rounds that are long from the beginning never reach the loss that growing ones do (docs/findings.md). The
length depends on the step number alone, so that links and nodes do not change the weights. Knows no epochs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Shorter rounds save too little traffic to be worth their cost in samples.
STEPS_MIN = 2
# By this many steps the length of a round grows by one: measured, see docs/findings.md.
GROWTH_STEPS = 50
# A round that takes longer than that gains nothing on any link, and loses a lot with a node that dies.
ROUND_STEPS_MAX = 4096
_FORM = re.compile(r"(?:grow:(\d{1,6}):)?(\d{1,6})")


@dataclass(frozen=True, slots=True)
class RoundLengths:
    """Rounds of `most` steps, or with `growth` at first fewer: one more for each `growth` steps."""

    most: int
    growth: int = 0

    def at(self, step: int) -> int:
        """The number of steps of a round that begins after this many steps."""
        if not self.growth:
            return self.most
        return min(max(STEPS_MIN, step // self.growth), self.most)

    def __str__(self) -> str:
        return f"grow:{self.growth}:{self.most}" if self.growth else str(self.most)

    @classmethod
    def parse(cls, text: str) -> RoundLengths:
        """Read what `str` gives; ValueError if the text is something else."""
        found = _FORM.fullmatch(text)
        if found is None or not 1 <= int(found[2]) <= ROUND_STEPS_MAX or (found[1] and not int(found[1])):
            raise ValueError(f"{text!r} are no lengths of rounds")
        return cls(int(found[2]), int(found[1] or 0))
