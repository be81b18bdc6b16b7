"""The gate: large updates come in one at a time, in the order in which they are added.

Otherwise each node's vector would need its place in memory at once, and most would wait there for another.
A node on a slow link does not keep the others out: after a moment the next one may begin too.
"""

from __future__ import annotations

from w5xde.runtime.buffers import POOLED_BYTES_MIN
from w5xde.runtime.transport import Connection

# On this machine or a fast network a vector of a hundred megabytes has come by then.
PATIENCE_SECONDS = 0.25
# Nobody waits longer: a connection on which nothing moves for ten seconds is given up by its sender's system.
WAIT_SECONDS_MAX = 4.0


class Gate:
    """Decides whose large body is read next."""

    def __init__(self) -> None:
        # Who is sending, since when; and who waits, by the place of what it brings.
        self._arriving: dict[Connection, float] = {}
        self._waiting: dict[Connection, tuple[tuple[int, ...], float]] = {}

    def ask(self, connection: Connection, place: tuple[int, ...], body_bytes: int, now: float) -> bool:
        """Whether this body may come in now; if not, the connection is told when."""
        if body_bytes < POOLED_BYTES_MIN:
            return True
        if self._is_free(now):
            self._arriving[connection] = now
            return True
        self._waiting[connection] = (place, now)
        return False

    def done(self, connection: Connection, now: float) -> None:
        """It has arrived, or never will."""
        self._waiting.pop(connection, None)
        if self._arriving.pop(connection, None) is not None:
            self.tick(now)

    def tick(self, now: float) -> None:
        """Let the next one in, if nobody is in its way."""
        for connection, (_, since) in list(self._waiting.items()):
            if now - since > WAIT_SECONDS_MAX:
                self._let_in(connection, now)
        while self._waiting and self._is_free(now):
            self._let_in(min(self._waiting, key=lambda each: self._waiting[each]), now)

    def _let_in(self, connection: Connection, now: float) -> None:
        del self._waiting[connection]
        self._arriving[connection] = now
        connection.go_on()

    @property
    def waiting(self) -> list[Connection]:
        """Whom we keep waiting: their silence is our doing."""
        return list(self._waiting)

    def _is_free(self, now: float) -> bool:
        return all(now - since > PATIENCE_SECONDS for since in self._arriving.values())
