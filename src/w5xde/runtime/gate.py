"""The gate: large updates come in one at a time, in the order in which they are added.

Otherwise each node's vector would need its place in memory at once, and most would wait there for another.
A node on a slow link does not keep the others out: after a moment the next one may begin too.
"""

from __future__ import annotations

import math

from w5xde.learn.buffers import POOLED_BYTES_MIN
from w5xde.runtime.transport import Connection

# On this machine or a fast network a vector of a hundred megabytes has come by then.
PATIENCE_SECONDS = 0.25
# Nobody waits longer: a connection on which nothing moves for ten seconds is given up by its sender's system.
WAIT_SECONDS_MAX = 4.0


class Gate:
    """Decides whose large body is read next."""

    def __init__(self, budget_bytes: float = math.inf) -> None:
        # Who is sending, since when, and how much; and who waits, by the place of what it brings.
        self._arriving: dict[Connection, tuple[float, int]] = {}
        self._waiting: dict[Connection, tuple[tuple[int, ...], float, int]] = {}
        # All that arrives at a time must fit into this, whoever waits and however long.
        self._budget_bytes = budget_bytes

    def ask(self, connection: Connection, place: tuple[int, ...], body_bytes: int, now: float) -> bool:
        """Whether this body may come in now; if not, the connection is told when."""
        if body_bytes < POOLED_BYTES_MIN:
            return True
        if self._is_free(now) and self._has_room(body_bytes):
            self._arriving[connection] = (now, body_bytes)
            return True
        self._waiting[connection] = (place, now, body_bytes)
        return False

    def done(self, connection: Connection, now: float) -> None:
        """It has arrived, or never will."""
        self._waiting.pop(connection, None)
        if self._arriving.pop(connection, None) is not None:
            self.tick(now)

    def tick(self, now: float) -> None:
        """Let the next one in, if nobody is in its way."""
        for connection, (_, since, body_bytes) in list(self._waiting.items()):
            if now - since > WAIT_SECONDS_MAX and self._has_room(body_bytes):
                self._let_in(connection, now)
        while self._waiting and self._is_free(now):
            first = min(self._waiting, key=lambda each: self._waiting[each])
            if not self._has_room(self._waiting[first][2]):
                return
            self._let_in(first, now)

    def _let_in(self, connection: Connection, now: float) -> None:
        _, _, body_bytes = self._waiting.pop(connection)
        self._arriving[connection] = (now, body_bytes)
        connection.go_on()

    @property
    def waiting(self) -> list[Connection]:
        """Whom we keep waiting: their silence is our doing."""
        return list(self._waiting)

    def _is_free(self, now: float) -> bool:
        return all(now - since > PATIENCE_SECONDS for since, _ in self._arriving.values())

    def _has_room(self, body_bytes: int) -> bool:
        # One may always come: what no budget allows was refused by its length.
        taken = sum(count for _, count in self._arriving.values())
        return not taken or taken + body_bytes <= self._budget_bytes
