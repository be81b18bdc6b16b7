"""A peer: a node's connection, what was sent over it, and whether it keeps us waiting."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from w5xde.control.codec_choice import CodecChoice
from w5xde.learn.codecs.sender import CodecSender
from w5xde.learn.step.incoming import Arrival
from w5xde.messages import Update
from w5xde.runtime.net.connection import Connection
from w5xde.runtime.net.listener import Candidate

# Silence of a node that is known and not ready yet; strangers have so long in all.
GREETING_SECONDS = 10.0
# A ready node that takes nothing of what waits for it, or sends a frame more slowly than any link would.
STUCK_SECONDS = 30.0
SLOW_SECONDS, SLOW_BYTES_PER_SECOND = 15.0, 8 * 1024


# Who keeps us waiting is looked at every two seconds; after a longer gap it was us who kept others waiting.
NAP_SECONDS = 5.0


class Watch:
    """Since when we have looked at our peers without a gap."""

    def __init__(self) -> None:
        self._looked_at = self._awake_since = 0.0

    def awake_since(self, now: float) -> float:
        if now - self._looked_at > NAP_SECONDS:
            # We were stopped, or busy with something else, and heard nobody meanwhile.
            self._awake_since = now
        self._looked_at = now
        return self._awake_since


@dataclass(slots=True, eq=False)
class Peer:
    """A node's connection, and what was sent over it."""

    connection: Connection
    visit: Candidate
    name: str = ""
    # By which its credential is known; empty for nodes of our own, and before it has shown who it is.
    node_id: bytes = b""
    is_looking: bool = False
    device: str = ""
    machine: str = ""
    cores: int = 0
    welcomed_at: float = 0.0
    is_ready: bool = False
    # What a batch may take it, by what it took to prove itself.
    guess_seconds: float | None = None
    is_gone: bool = False
    # The version it was last sent, and the newest that is on its way to it.
    version: int = -1
    version_asked: int = -1
    # Works on their way: (leases, and how many batches of each are apart; batches; when sent). Answers come
    # in the same order.
    works: deque[tuple[dict[int, int], int, float]] = field(default_factory=deque)
    heard_at: float = 0.0
    answered_at: float = 0.0
    frame_vectors: int = 1
    # Where the large update goes that is arriving, and which that is; and whether we let it wait before.
    arrival: Arrival | None = None
    arrival_of: Update | None = None
    is_kept_waiting: bool = False
    # What of its traffic has been told.
    told_sent: int = 0
    told_received: int = 0
    # The frame that was arriving when we last looked: where it began, since when we look, how far it was.
    frame_seen: tuple[int, float, int] | None = None
    # How parameters are encoded for it, once that is worth thinking about.
    sender: CodecSender | None = None
    choice: CodecChoice = field(default_factory=CodecChoice)

    def link(self, update: Update) -> float:
        """Bytes a second at which we may expect what it sends; 0: nobody knows."""
        # Before anything large has come from it, what it says of the other direction has to do.
        said = update.link if 0 < update.link < math.inf else 0.0
        return self.connection.link or said

    def complaint(self, now: float, awake_since: float) -> str:
        """Why we part with it now; nothing if it keeps up. What was before we were awake does not count."""
        if not self.is_ready and now - max(self.heard_at, awake_since) > GREETING_SECONDS:
            return f"it said nothing for {GREETING_SECONDS:.0f} s"
        stuck_since = self.connection.stuck_since
        if stuck_since is not None and now - max(stuck_since, awake_since) > STUCK_SECONDS:
            return f"it took nothing of what was sent to it for {STUCK_SECONDS:.0f} s"
        if self._is_dawdling(now, awake_since):
            return f"it sent less than {SLOW_BYTES_PER_SECOND} bytes a second for {SLOW_SECONDS:.0f} s"
        return ""

    def _is_dawdling(self, now: float, awake_since: float) -> bool:
        """Whether one frame has been arriving for long, and hardly any of it came."""
        began, received = self.connection.frame_began, self.connection.bytes_received
        seen = self.frame_seen
        if began is None:
            self.frame_seen = None
        elif seen is None or seen[0] != began or seen[1] < awake_since:
            self.frame_seen = began, now, received
        elif now - seen[1] >= SLOW_SECONDS:
            self.frame_seen = began, now, received
            return received - seen[2] < SLOW_BYTES_PER_SECOND * (now - seen[1])
        return False
