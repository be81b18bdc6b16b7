"""The correction of delays: how far ahead of its version a lease is computed, and how small a late step is.

A gradient is right for the weights on which it was computed. In async mode the model has moved on when it
comes, by about as many updates each time, so that a lease can be computed on weights that look that far
ahead. That makes up for one update of delay; for the others an update makes a smaller step. Knows no tensors:
`learn/step/look_ahead.py` has the weights.
"""

from __future__ import annotations

from w5xde.control.pool.members import Member
from w5xde.control.steps.leases import Lease

# The weight of the newest answer in the mean staleness of a node.
_NEWEST = 0.2
# The farthest look: with updates that are 7 late, a reach of 3.5 and one of 8.4 teach alike, in a simulation.
AHEAD_MAX = 8.0
# One update of delay needs no smaller step if the weights look ahead. More do: the weights of three updates
# ahead are known badly (docs/findings.md).
MADE_UP_MAX = 1.0


class DelayCorrection:
    """Rules for late updates: `scales_rates` and `looks_ahead` say which of them are in use."""

    def __init__(self, *, scales_rates: bool = False, looks_ahead: bool = False) -> None:
        self._scales_rates = scales_rates
        self._looks_ahead = looks_ahead

    def ahead(self, member: Member, others: int) -> float:
        """How many updates a lease of this member looks ahead, if `others` leases are outstanding."""
        if not self._looks_ahead:
            return 0.0
        expected = others if member.staleness is None else member.staleness
        # In halves: weights that hardly look ahead are not worth a copy of the model.
        return min(round(2 * expected) / 2, AHEAD_MAX)

    def measured(self, member: Member, lease: Lease, staleness: int) -> None:
        """Note how late an answer of this member came."""
        if not lease.updates:
            # All nodes began together, so that the first to answer is not late, and later it is.
            return
        before = staleness if member.staleness is None else member.staleness
        member.staleness = before + _NEWEST * (staleness - before)

    def made_up(self, lease: Lease) -> float:
        """The updates of delay for which looking ahead makes up, so that the step need not be smaller."""
        return min(lease.ahead, MADE_UP_MAX)

    def rate(self, late: float) -> float:
        """The factor on the learning rate of an update that is late by so many updates."""
        # The best rate for gradients that are late by t steps is about lr / (1 + t/2).
        return 1.0 / (1.0 + late / 2) if self._scales_rates else 1.0
