"""The loss band: the smallest, the largest and the last loss of the steps between two rows of metrics."""

from __future__ import annotations

import math
from typing import TypedDict


class BandRow(TypedDict):
    """What a row of metrics says of the band."""

    loss_min: float | None
    loss_max: float | None
    loss_last: float | None


class LossBand:
    """Collects the losses of steps until a row takes them."""

    def __init__(self) -> None:
        self._least, self._most = math.inf, -math.inf
        self._last: float | None = None

    def add(self, loss: float) -> None:
        self._last = loss
        # A loss that is not a number is in no band, but it is the last one.
        if loss < self._least:
            self._least = loss
        if loss > self._most:
            self._most = loss

    def take(self) -> BandRow:
        """The band since the last call; without a step, only the last loss."""
        is_empty = self._least > self._most
        found = BandRow(
            loss_min=None if is_empty else self._least,
            loss_max=None if is_empty else self._most,
            loss_last=self._last,
        )
        self._least, self._most = math.inf, -math.inf
        return found
