"""The node's mind: greet, work in order, beat, and come back after a break.

Knows no sockets, tensors or clocks; `now` and the random generator come in through the door.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from w5xde.control.pool.members import BEAT_SECONDS

# A coordinator that says nothing for this long is gone; it beats every two seconds.
COORDINATOR_SILENCE_SECONDS = 8.0
# Waiting between attempts doubles up to the most, shortened by chance so that nodes do not come as one.
RETRY_SECONDS_FIRST = 0.25
RETRY_SECONDS_MOST = 4.0
# At first somebody sits before the screen and waits, or the coordinator is just being started again.
RETRY_SECONDS_MOST_AT_FIRST = 1.0
AT_FIRST_SECONDS = 60.0
# After a break the coordinator may be restarting on a slow machine; somebody must look after it by then.
RECONNECT_SECONDS = 600.0
TICK_SECONDS = 0.25


# --- events ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Opened:
    """The connection stands."""


@dataclass(slots=True)
class DialFailed:
    reason: str


@dataclass(slots=True)
class Lost:
    """The connection is gone without a goodbye."""

    reason: str


@dataclass(slots=True)
class Welcomed:
    """The coordinator took us; our model and data must now be checked against its own."""


@dataclass(slots=True)
class Checked:
    """Model and data match."""


@dataclass(slots=True)
class Given:
    """Parameters, or work with these leases. `item` is the body's own."""

    item: Any
    leases: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Finished:
    """The item in hand is done."""


@dataclass(slots=True)
class Cancelled:
    leases: list[int]


@dataclass(slots=True)
class Parted:
    """The coordinator said goodbye."""

    reason: str
    finished: bool


@dataclass(slots=True)
class LeaveAsked:
    """Our user wants to go, after the work in hand."""


@dataclass(slots=True)
class Ticked:
    """Time has passed."""


Event: TypeAlias = (
    Opened
    | DialFailed
    | Lost
    | Welcomed
    | Checked
    | Given
    | Finished
    | Cancelled
    | Parted
    | LeaveAsked
    | Ticked
)

# --- effects --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Dial:
    """Connect, after this long."""

    after_seconds: float


@dataclass(slots=True)
class Greet:
    """Say who we are."""


@dataclass(slots=True)
class Check:
    """Compare our model and data with the coordinator's."""


@dataclass(slots=True)
class Handle:
    """Load these parameters or compute this work, then say Finished."""

    item: Any


@dataclass(slots=True)
class SayReady:
    """Tell the coordinator that we match."""


@dataclass(slots=True)
class SayBeat:
    """Tell the coordinator that we are here."""


@dataclass(slots=True)
class Hang:
    """Close the connection."""

    reason: str


@dataclass(slots=True)
class Exit:
    """The node's work is over; an error says that it is not as it should be."""

    reason: str
    error: str = ""


Effect: TypeAlias = Dial | Greet | Check | Handle | SayReady | SayBeat | Hang | Exit


class NodeCore:
    """All decisions of a node."""

    def __init__(self, rng: random.Random, wait_seconds: float) -> None:
        self._rng = rng
        self._wait_seconds = wait_seconds
        self._queue: deque[Given] = deque()
        self._in_hand: Given | None = None
        self.cancelled: set[int] = set()
        self.has_joined = False
        self.is_over = False
        self._is_connected = False
        self._may_beat = False
        self._checks = 0
        self._is_leaving = False
        self._attempts = 0
        self._alone_since: float | None = None
        self._heard_at = 0.0
        self._beat_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in hand and nothing waits."""
        return self._in_hand is None and not self._queue

    def start(self, now: float) -> list[Effect]:
        self._alone_since = now
        return [Dial(0.0)]

    def heard(self, now: float) -> None:
        """Any byte of the coordinator's shows that it is there."""
        self._heard_at = now

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.is_over:
            return []
        match event:
            case Opened():
                self._is_connected, self._heard_at, self._beat_at = True, now, now
                return [Greet()]
            case DialFailed():
                return self._retry(event.reason, now)
            case Lost():
                return self._lost(event.reason, now)
            case Welcomed():
                self._may_beat = True
                self._checks += 1
                return [Check()]
            case Checked():
                # A check begun on a connection that broke meanwhile says nothing on the new one.
                self._checks -= 1
                if self._checks or not self._may_beat:
                    return []
                self.has_joined = True
                self._attempts, self._alone_since = 0, None
                return [SayReady()]
            case Given():
                self._queue.append(event)
                return self._next()
            case Finished():
                if self._in_hand is not None:
                    self.cancelled.difference_update(self._in_hand.leases)
                self._in_hand = None
                return self._next()
            case Cancelled():
                self._cancel(event.leases)
                return []
            case Parted():
                self.is_over = True
                return [Exit(event.reason, error="" if event.finished else event.reason)]
            case LeaveAsked():
                self._is_leaving = True
                self._queue.clear()
                return self._next()
            case Ticked():
                return self._ticked(now)

    def _next(self) -> list[Effect]:
        if self._in_hand is not None:
            return []
        if self._is_leaving:
            self.is_over = True
            return [Exit("left politely")]
        if not self._queue:
            return []
        self._in_hand = self._queue.popleft()
        return [Handle(self._in_hand.item)]

    def _cancel(self, leases: list[int]) -> None:
        held = [given for given in (self._in_hand, *self._queue) if given is not None]
        known = {lease for given in held for lease in given.leases}
        self.cancelled.update(known.intersection(leases))

    def _ticked(self, now: float) -> list[Effect]:
        if not self._is_connected:
            return []
        if now - self._heard_at > COORDINATOR_SILENCE_SECONDS:
            return [Hang(f"the coordinator was silent for {now - self._heard_at:.0f} s")]
        if now - self._beat_at >= BEAT_SECONDS and self._may_beat:
            self._beat_at = now
            return [SayBeat()]
        return []

    def _lost(self, reason: str, now: float) -> list[Effect]:
        # Leases of a broken connection are void: the coordinator has lent them again.
        self._queue.clear()
        self.cancelled.clear()
        self._is_connected = self._may_beat = False
        if self._alone_since is None:
            self._alone_since = now
        return self._retry(reason, now)

    def _retry(self, reason: str, now: float) -> list[Effect]:
        if self._is_leaving:
            self.is_over = True
            return [Exit("left politely")]
        patience = RECONNECT_SECONDS if self.has_joined else self._wait_seconds
        if self._alone_since is not None and now - self._alone_since >= patience:
            self.is_over = True
            return [Exit(reason, error=reason)]
        is_early = self._alone_since is None or now - self._alone_since < AT_FIRST_SECONDS
        longest = RETRY_SECONDS_MOST_AT_FIRST if is_early else RETRY_SECONDS_MOST
        most = min(longest, RETRY_SECONDS_FIRST * 2 ** min(self._attempts, 10))
        self._attempts += 1
        return [Dial(most * self._rng.uniform(0.5, 1.0))]
