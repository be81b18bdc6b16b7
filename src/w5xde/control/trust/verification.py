"""Verification: which answers the coordinator computes again before they count.

Leases are chosen when they are lent, by random numbers that no node can foresee, and all of the first ten of
a newcomer. Without `--verify` only those are chosen that the norm check needs. Whether an answer is right is
found out elsewhere. Knows no tensors and no clock.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from w5xde.control import events as ev
from w5xde.control.steps.cut import Progress
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import Share
from w5xde.control.trust.norm_limits import NormCheck

# Verify this many leases of a node that just joined, whatever the share.
FIRST_LEASES = 10
# Chosen leases that ended without an answer are forgotten when more than this many are remembered.
_CHOSEN_MAX = 1024


class Verification:
    """Chooses the leases to verify, and holds their answers back until they are."""

    def __init__(
        self, share: float, chance: random.Random | None, leases: Leases, norm_check: NormCheck
    ) -> None:
        """With `--verify` and without `chance` every lease is chosen."""
        self._norm_check = norm_check
        self._share = share
        self._chance = chance
        self._leases = leases
        # Leases to verify, and the norms of their answers once these are being verified.
        self._chosen: dict[int, float | None] = {}
        self._lent: Counter[str] = Counter()
        self._applied: Counter[str] = Counter()

    def choose(self, leases: Iterable[Lease], *, is_alone: bool) -> list[int]:
        """Return which of these new leases will be verified; `is_alone`: there is only one node."""
        if not self._share and not self._norm_check.doubted_steps:
            return []
        chosen = [
            lease.id
            for lease in leases
            if self._is_chosen(lease) or self._norm_check.needs_coordinator(lease, is_alone=is_alone)
        ]
        self._chosen.update(dict.fromkeys(chosen))
        if len(self._chosen) > _CHOSEN_MAX:
            self._chosen = {each: norm for each, norm in self._chosen.items() if self._leases.holds(each)}
        return chosen

    def _is_chosen(self, lease: Lease) -> bool:
        if not self._share:
            return False
        self._lent[lease.node] += 1
        if self._chance is None or self._lent[lease.node] <= FIRST_LEASES:
            return True
        return self._chance.random() < self._share

    def joined(self, node: str) -> None:
        """Treat a node that joins as new, whatever its name."""
        self._lent.pop(node, None)
        self._norm_check.joined(node)

    def holds_back(self, lease: int) -> bool:
        return lease in self._chosen

    def begin(self, lease: int, norm: float) -> bool:
        """Start to verify an answer; return False if that was started before."""
        is_new = self._chosen[lease] is None
        self._chosen[lease] = norm
        return is_new

    def end(self, lease: int) -> float:
        """Finish verifying an answer; return its norm."""
        return self._chosen.pop(lease, None) or 0.0

    def count(self, event: ev.Verified, progress: Progress) -> list[ev.Effect]:
        """Count the batches of an answer that is not wrong; report it if it could not be computed again."""
        lease = self._leases.get(event.lease)
        if lease is None:
            return []
        if not event.unknown and lease.step.validates:
            return []  # the share of what was verified is that of the training
        if not event.unknown:
            progress.verified_batches += lease.batches
            return []
        progress.unverified_batches += 0 if lease.step.validates else lease.batches
        text = f"what {event.node} gave for {lease.where} counts without being verified: {event.unknown}"
        return [ev.Note("unverified", text, {"node": event.node})]

    def applied(self, shares: list[Share], leaf_batches: int) -> None:
        for start, stop, node, _ in shares:
            self._applied[node] += (stop - start) * leaf_batches

    def applied_of(self, node: str) -> int:
        """Return how many batches of this node have changed the model."""
        return self._applied[node]
