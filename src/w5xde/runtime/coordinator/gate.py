"""The gate: large updates come in one at a time, in the order in which they are added.

Otherwise each node's vector would need its place in memory at once, and most would wait there for another.
A node on a slow link does not keep the others out: after a moment the next one may begin too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from w5xde.learn.model.buffers import POOLED_BYTES_MIN
from w5xde.runtime.net.connection import Connection

# On this machine or a fast network a vector of a hundred megabytes has come by then.
PATIENCE_SECONDS = 0.25
# Whose link is known to be quick is waited for a few times as long as it should take, but not for ever.
PATIENCE_FACTOR, PATIENCE_SECONDS_MAX = 3.0, 1.0
# Nobody waits longer: a connection on which nothing moves for ten seconds is given up by its sender's system.
WAIT_SECONDS_MAX = 4.0


class _Waiting(NamedTuple):
    """Who waits: for the place of what it brings, since when, how much that is, and what then happens."""

    place: tuple[int, ...]
    since: float
    body_bytes: int
    patience: float
    enter: Callable[[], None]


class Gate:
    """Decides whose large body is read next."""

    def __init__(self, budget_bytes: float = math.inf) -> None:
        # Who is sending, until when nobody else may, and how much.
        self._arriving: dict[Connection, tuple[float, int]] = {}
        self._waiting: dict[Connection, _Waiting] = {}
        # All that arrives at a time must fit into this, whoever waits and however long.
        self._budget_bytes = budget_bytes

    def ask(
        self,
        connection: Connection,
        place: tuple[int, ...],
        body_bytes: int,
        now: float,
        link: float = 0.0,
        enter: Callable[[], None] | None = None,
    ) -> bool:
        """Whether this body may come in now; if not, `enter` is called when it may, or it just goes on.

        `link`: bytes a second at which it may be expected; 0: nobody knows.
        """
        if body_bytes < POOLED_BYTES_MIN:
            return True
        seconds = body_bytes / link if link else math.inf
        patience = PATIENCE_SECONDS
        if seconds <= PATIENCE_SECONDS_MAX:
            patience = max(patience, min(PATIENCE_FACTOR * seconds, PATIENCE_SECONDS_MAX))
        if self._is_free(now) and self._has_room(body_bytes):
            self._arriving[connection] = (now + patience, body_bytes)
            return True
        self._waiting[connection] = _Waiting(place, now, body_bytes, patience, enter or connection.go_on)
        return False

    def done(self, connection: Connection, now: float) -> None:
        """It has arrived, or never will."""
        self._waiting.pop(connection, None)
        if self._arriving.pop(connection, None) is not None:
            self.tick(now)

    def tick(self, now: float) -> None:
        """Let the next one in, if nobody is in its way."""
        for connection, each in list(self._waiting.items()):
            if now - each.since > WAIT_SECONDS_MAX and self._has_room(each.body_bytes):
                self._let_in(connection, now)
        while self._waiting and self._is_free(now):
            first = min(self._waiting, key=lambda each: self._waiting[each][:2])
            if not self._has_room(self._waiting[first].body_bytes):
                return
            self._let_in(first, now)

    def _let_in(self, connection: Connection, now: float) -> None:
        waited = self._waiting.pop(connection)
        self._arriving[connection] = (now + waited.patience, waited.body_bytes)
        waited.enter()

    @property
    def waiting(self) -> list[Connection]:
        """Whom we keep waiting: their silence is our doing."""
        return list(self._waiting)

    def _is_free(self, now: float) -> bool:
        return all(now > until for until, _ in self._arriving.values())

    def _has_room(self, body_bytes: int) -> bool:
        # One may always come: what no budget allows was refused by its length.
        taken = sum(count for _, count in self._arriving.values())
        return not taken or taken + body_bytes <= self._budget_bytes
