"""`--override`: what a user changes in a run that is resumed. Knows no optimizer.

lr=0.01    the next step is made with this learning rate
lr=x0.1    ... with a tenth of the rate it would have had
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"lr=(x?)(\d*\.?\d+(?:e[+-]?\d{1,2})?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RateOverride:
    """Another learning rate: a number, or a factor on what it is."""

    value: float
    is_factor: bool = False

    def __str__(self) -> str:
        return f"lr={'x' if self.is_factor else ''}{self.value!r}"

    @classmethod
    def parse(cls, text: str) -> RateOverride:
        """Read what a user wrote, or what `str` gives; ValueError if it is something else."""
        found = _FORM.fullmatch(text.strip())
        value = float(found[2]) if found is not None else 0.0
        if found is None or not 0 < value < float("inf"):
            raise ValueError(f"override {text!r} must be like lr=0.001, or lr=x0.1 for a tenth of the rate")
        return cls(value, bool(found[1]))
