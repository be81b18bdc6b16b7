"""The lease trace: when leases were lent, sent, answered and ended, and how each of them ended.

A sample of them, because a small model has thousands of leases a second: at most `TRACED_MAX` begin in the
time between two calls of `take`. The ledger knows of every batch which node computed it; the trace adds the
times. Knows no files and no clock: callers pass `now`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from w5xde.control.steps.leases import Lease
from w5xde.messages import Answer
from w5xde.sanitize import sane_seconds

# As many bars as a picture of one second has room for.
TRACED_MAX = 64

# How a lease ends: its answer counts, in a step or in a validation; another node was sooner; or its node
# could not compute it. Every other outcome is a sentence.
APPLIED, MEASURED, CANCELLED, FAILED = "applied", "measured", "not needed", "failed"


@dataclass(slots=True)
class _TracedLease:
    lease: Lease
    sent_at: float
    answered_at: float | None = None
    compute_seconds: float = 0.0
    codec: str = ""


class LeaseTrace:
    """Follows some of the leases of a run."""

    def __init__(self) -> None:
        self._open: dict[int, _TracedLease] = {}
        self._ended: list[tuple[_TracedLease, str, float]] = []
        # Leases that were sent, and those of them that are followed, since the last `take`.
        self._sent = 0
        self._followed = 0

    def sent(self, leases: Iterable[Lease], now: float) -> None:
        """These leases were sent to their node."""
        for lease in leases:
            self._sent += 1
            if self._followed < TRACED_MAX:
                self._followed += 1
                self._open[lease.id] = _TracedLease(lease, now)

    def answered(self, answers: Iterable[Answer], now: float) -> None:
        """Their node has answered."""
        if not self._open:
            return
        for answer in answers:
            found = self._open.get(answer.lease)
            if found is not None:
                found.answered_at = now
                found.compute_seconds = sane_seconds(answer.seconds)
                found.codec = answer.codec

    def ended(self, lease: int, outcome: str, now: float) -> None:
        """A lease has ended: its answer is applied, or the outcome says why there is none."""
        found = self._open.pop(lease, None) if self._open else None
        if found is not None:
            self._ended.append((found, outcome, now))

    def take(self, now: float, wall: float, is_open: Callable[[int], bool]) -> dict[str, Any] | None:
        """What has ended since the last call, as a line of trace.jsonl; None if no lease was sent or ended.

        `wall` is the time of day at `now`; `is_open` tells whether a lease is outstanding.
        """
        for lease in [lease for lease in self._open if not is_open(lease)]:
            self.ended(lease, FAILED, now)
        if not self._ended and not self._sent:
            return None
        row = {
            "time": round(wall, 3),
            "of": self._sent,
            "leases": [_line(each, outcome, ended, wall - now) for each, outcome, ended in self._ended],
        }
        self._ended, self._sent, self._followed = [], 0, 0
        return row


def _line(traced: _TracedLease, outcome: str, ended_at: float, to_wall: float) -> dict[str, Any]:
    lease = traced.lease
    answered = traced.answered_at
    return {
        "lease": lease.id,
        "node": lease.node,
        "step": lease.step.index,
        "epoch": lease.step.epoch,
        "first": lease.step.first + lease.span.start,
        "last": lease.step.first + lease.span.stop - 1,
        "lent": round(lease.granted_at + to_wall, 4),
        "sent": round(traced.sent_at + to_wall, 4),
        "answered": round(answered + to_wall, 4) if answered is not None else None,
        "ended": round(ended_at + to_wall, 4),
        "compute_seconds": round(traced.compute_seconds, 4),
        "codec": traced.codec,
        "outcome": outcome,
    }
