"""Verification: which answers are computed a second time before they count, and who is still new.

Leases are chosen when they are lent, by chance that no node can foresee; of a newcomer the first ten are, all
of them. Nothing is chosen unless that was asked for. Whether an answer is right is found out elsewhere.
Knows no tensors and no clock; chance comes in through the door.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import Share

# Of a node that just came, so many leases are verified whatever the share.
FIRST_LEASES = 10
# Leases that ended without an answer are forgotten when there may be so many of them.
_FORGOTTEN_MAX = 1024


class Verification:
    """Chooses what is verified, and holds answers back until they are."""

    def __init__(self, share: float, chance: random.Random | None, leases: Leases) -> None:
        """Without chance everything is verified, if anything is."""
        self._share = share
        self._chance = chance
        self._leases = leases
        self._chosen: set[int] = set()
        # Answers that are being verified: their norms.
        self._waiting: dict[int, float] = {}
        self._lent: Counter[str] = Counter()
        self._applied: Counter[str] = Counter()

    def choose(self, leases: Iterable[Lease]) -> list[int]:
        """Which of these, just lent, will be verified."""
        if not self._share:
            return []
        chosen = [lease.id for lease in leases if self._is_chosen(lease)]
        self._chosen.update(chosen)
        if len(self._chosen) > _FORGOTTEN_MAX:
            self._chosen = {number for number in self._chosen if self._leases.holds(number)}
        return chosen

    def _is_chosen(self, lease: Lease) -> bool:
        self._lent[lease.node] += 1
        if self._chance is None or self._lent[lease.node] <= FIRST_LEASES:
            return True
        return self._chance.random() < self._share

    def joined(self, node: str) -> None:
        """Whoever comes is new, whatever it is called."""
        self._lent.pop(node, None)

    def holds_back(self, lease: int) -> bool:
        return lease in self._chosen

    def begin(self, lease: int, norm: float) -> bool:
        """The answer is there; False if it was there already."""
        if lease in self._waiting:
            return False
        self._waiting[lease] = norm
        return True

    def end(self, lease: int) -> float:
        """It is verified; returns its norm."""
        self._chosen.discard(lease)
        return self._waiting.pop(lease, 0.0)

    def applied(self, shares: list[Share]) -> None:
        for start, stop, node, _ in shares if self._share else ():
            self._applied[node] += stop - start

    def applied_of(self, node: str) -> int:
        """How many batches of this node have changed the model."""
        return self._applied[node]
