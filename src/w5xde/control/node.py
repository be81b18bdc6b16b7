"""The core of a node: decides when to connect, greet, work, beat, reconnect and end.

Events in, effects out. Knows no sockets, tensors or clocks: callers pass `now` and the random generator.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from w5xde.control.pool.members import BEAT_SECONDS

# A coordinator that is silent for this long counts as lost; it beats every two seconds.
COORDINATOR_SILENCE_SECONDS = 8.0
# The wait between attempts doubles up to the most; a random part of it keeps nodes from connecting all at
# once.
RETRY_SECONDS_FIRST = 0.25
RETRY_SECONDS_MOST = 4.0
# In the first minute a user may be watching, or the coordinator is just being started again.
RETRY_SECONDS_MOST_AT_FIRST = 1.0
AT_FIRST_SECONDS = 60.0
# After a break the coordinator may be restarting on a slow machine; after this long it needs its user, unless
# the node's user said to wait longer.
RECONNECT_SECONDS = 600.0
# Why a node ends that was told to leave.
LEFT = "left as asked"
# How long a node that leaves in a hurry goes on with the item in progress before it gives that back: its
# process must end within 20 s, and it still has to say goodbye.
LEAVE_SECONDS = 8.0
TICK_SECONDS = 0.25


# --- events ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Opened:
    """The connection is open."""


@dataclass(slots=True)
class Lost:
    """The connection broke without a goodbye, or could not be opened."""

    reason: str


@dataclass(slots=True)
class Welcomed:
    """The coordinator admits the node, whose model and data must now be compared with its own."""


@dataclass(slots=True)
class Checked:
    """Model and data match."""


@dataclass(slots=True)
class Given:
    """Parameters arrived, or work with these leases. Only the body of the node reads `item`."""

    item: Any
    leases: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Finished:
    """The item in progress is done."""


@dataclass(slots=True)
class Cancelled:
    """The coordinator no longer needs these leases."""

    leases: list[int]


@dataclass(slots=True)
class Parted:
    """The coordinator said goodbye."""

    reason: str
    finished: bool


@dataclass(slots=True)
class LeaveRequested:
    """The node is to end after the item in progress; `hurries`: or without it, if it takes long."""

    hurries: bool = False


@dataclass(slots=True)
class TimePassed:
    """Time has passed."""


Event: TypeAlias = (
    Opened | Lost | Welcomed | Checked | Given | Finished | Cancelled | Parted | LeaveRequested | TimePassed
)

# --- effects --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Dial:
    """Open a connection, after this long."""

    after_seconds: float


@dataclass(slots=True)
class Greet:
    """Send the greeting."""


@dataclass(slots=True)
class CheckModel:
    """Compare the model and data with the coordinator's, then report Checked."""


@dataclass(slots=True)
class Handle:
    """Load these parameters or compute this work, then report Finished."""

    item: Any


@dataclass(slots=True)
class SayReady:
    """Tell the coordinator that model and data match."""


@dataclass(slots=True)
class SayBeat:
    """Tell the coordinator that the node is there."""


@dataclass(slots=True)
class HangUp:
    """Close the connection."""

    reason: str


@dataclass(slots=True)
class Exit:
    """The node ends; `error` is empty if it ends as it should."""

    reason: str
    error: str = ""


Effect: TypeAlias = Dial | Greet | CheckModel | Handle | SayReady | SayBeat | HangUp | Exit


class NodeCore:
    """All decisions of a node. `wait_seconds`: how long it tries to join for the first time."""

    def __init__(self, rng: random.Random, wait_seconds: float) -> None:
        self._rng = rng
        self._wait_seconds = wait_seconds
        self._queue: deque[Given] = deque()
        self._in_progress: Given | None = None
        self.cancelled: set[int] = set()
        self.has_joined = False
        self.is_over = False
        self._is_connected = False
        self._may_beat = False
        self._checks = 0
        self._is_leaving = False
        # When a node that leaves in a hurry does so whatever is in progress.
        self._leaves_at: float | None = None
        self._attempts = 0
        # Since when the node has no checked connection; None while it has one.
        self._alone_since: float | None = None
        self._heard_at = 0.0
        self._beat_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in progress and nothing waits."""
        return self._in_progress is None and not self._queue

    def start(self, now: float) -> list[Effect]:
        self._alone_since = now
        return [Dial(0.0)]

    def heard(self, now: float) -> None:
        """Note that a byte came from the coordinator, so that it is not silent."""
        self._heard_at = now

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.is_over:
            return []
        match event:
            case Opened():
                self._is_connected, self._heard_at, self._beat_at = True, now, now
                return [Greet()]
            case Lost():
                return self._lost(event.reason, now)
            case Welcomed():
                self._may_beat = True
                self._checks += 1
                return [CheckModel()]
            case Checked():
                # A check that began on a connection which broke meanwhile does not count for the new one.
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
                if self._in_progress is not None:
                    self.cancelled.difference_update(self._in_progress.leases)
                self._in_progress = None
                return self._next()
            case Cancelled():
                self._cancel(event.leases)
                return []
            case Parted():
                return self._exit(event.reason, error="" if event.finished else event.reason)
            case LeaveRequested():
                self._is_leaving = True
                if event.hurries and self._leaves_at is None:
                    self._leaves_at = now + LEAVE_SECONDS
                self._queue.clear()
                return self._next()
            case TimePassed():
                return self._ticked(now)

    def _next(self) -> list[Effect]:
        if self._in_progress is not None:
            return []
        if self._is_leaving:
            return self._exit(LEFT)
        if not self._queue:
            return []
        self._in_progress = self._queue.popleft()
        return [Handle(self._in_progress.item)]

    def _exit(self, reason: str, error: str = "") -> list[Effect]:
        self.is_over = True
        return [Exit(reason, error)]

    def _cancel(self, leases: list[int]) -> None:
        held = [*([self._in_progress] if self._in_progress else []), *self._queue]
        known = {lease for given in held for lease in given.leases}
        self.cancelled.update(known.intersection(leases))

    def _ticked(self, now: float) -> list[Effect]:
        if self._leaves_at is not None and now >= self._leaves_at:
            return self._exit(LEFT)
        if not self._is_connected:
            return []
        if now - self._heard_at > COORDINATOR_SILENCE_SECONDS:
            return [HangUp(f"the coordinator was silent for {now - self._heard_at:.0f} s")]
        if now - self._beat_at >= BEAT_SECONDS and self._may_beat:
            self._beat_at = now
            return [SayBeat()]
        return []

    def _lost(self, reason: str, now: float) -> list[Effect]:
        # Leases of a broken connection are void: the coordinator lends them again.
        self._queue.clear()
        self.cancelled.clear()
        self._is_connected = self._may_beat = False
        if self._is_leaving:
            return self._exit(LEFT)
        if self._alone_since is None:
            self._alone_since = now
        alone_seconds = now - self._alone_since
        longest_alone = self._wait_seconds
        if self.has_joined:
            longest_alone = max(longest_alone, RECONNECT_SECONDS)
        if alone_seconds >= longest_alone:
            return self._exit(reason, error=reason)
        is_early = alone_seconds < AT_FIRST_SECONDS
        longest = RETRY_SECONDS_MOST_AT_FIRST if is_early else RETRY_SECONDS_MOST
        most = min(longest, RETRY_SECONDS_FIRST * 2 ** min(self._attempts, 10))
        self._attempts += 1
        return [Dial(most * self._rng.uniform(0.5, 1.0))]
