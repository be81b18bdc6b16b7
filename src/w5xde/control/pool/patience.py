"""Patience: when the coordinator gives up a connection that keeps it waiting.

Knows no sockets and no clock: callers pass what a connection shows, and `now`.
"""

from __future__ import annotations

from typing import NamedTuple

# How long a peer that is not ready yet may be silent; before it is admitted this is all its time.
GREETING_SECONDS = 10.0
# How long a ready node may read nothing of what waits for it, or send a frame more slowly than any link does.
STUCK_SECONDS = 30.0
SLOW_SECONDS, SLOW_BYTES_PER_SECOND = 15.0, 8 * 1024
# Connections are looked at every two seconds; after a longer gap the coordinator itself stood still.
NAP_SECONDS = 5.0


class Signs(NamedTuple):
    """What a connection shows of its peer."""

    is_ready: bool
    heard_at: float
    # Since when the peer has read nothing of what waits for it; None: nothing waits.
    stuck_since: float | None
    # After how many received bytes the frame began that is still arriving; None: no frame is.
    frame_began: int | None
    bytes_received: int


def complain_if_unready(welcomed_at: float, patience_seconds: float, now: float, awake_since: float) -> str:
    """Why to close the connection of a peer that was welcomed and is still not ready, or an empty string."""
    if now - max(welcomed_at, awake_since) < patience_seconds:
        return ""
    return f"it was not ready after {patience_seconds:.0f} s"


class Wakefulness:
    """Since when the coordinator has looked at its peers without a gap."""

    def __init__(self) -> None:
        self._looked_at = self._awake_since = 0.0

    def awake_since(self, now: float) -> float:
        if now - self._looked_at > NAP_SECONDS:
            # The coordinator was stopped or busy, so it could not hear any peer meanwhile.
            self._awake_since = now
        self._looked_at = now
        return self._awake_since


class Patience:
    """The coordinator's patience with one peer."""

    def __init__(self) -> None:
        # The frame that was arriving at the last look: where it began, since when, how far it was.
        self._frame: tuple[int, float, int] | None = None

    def complaint(self, signs: Signs, now: float, awake_since: float) -> str:
        """Why to close the connection now, or an empty string. Time before `awake_since` does not count."""
        if not signs.is_ready and now - max(signs.heard_at, awake_since) > GREETING_SECONDS:
            return f"it said nothing for {GREETING_SECONDS:.0f} s"
        if signs.stuck_since is not None and now - max(signs.stuck_since, awake_since) > STUCK_SECONDS:
            return f"it took nothing of what was sent to it for {STUCK_SECONDS:.0f} s"
        if self._is_too_slow(signs, now, awake_since):
            return f"it sent less than {SLOW_BYTES_PER_SECOND} bytes a second for {SLOW_SECONDS:.0f} s"
        return ""

    def _is_too_slow(self, signs: Signs, now: float, awake_since: float) -> bool:
        """Whether one frame has been arriving for long, with hardly any progress."""
        began, received, seen = signs.frame_began, signs.bytes_received, self._frame
        if began is None:
            self._frame = None
        elif seen is None or seen[0] != began or seen[1] < awake_since:
            self._frame = began, now, received
        elif now - seen[1] >= SLOW_SECONDS:
            self._frame = began, now, received
            return received - seen[2] < SLOW_BYTES_PER_SECOND * (now - seen[1])
        return False
