"""One peer's conversation: a table of what may be said when, and by whom.

    new ──Hello──▶ greeted ──Welcome──▶ checking ──Ready──▶ working ──Leave / Bye──▶ closed
                      └──────Refuse──────────┴───────────────────┘

Both ends hold a `Session`. Words that cross on the wire are legal: after our own last word we
hear the peer out and ignore it. Knows no sockets and no clock.
"""

from __future__ import annotations

from w5xde.errors import LocalProtocolError, RemoteProtocolError
from w5xde.messages import (
    Beat,
    Bye,
    Cancel,
    Hello,
    Leave,
    Message,
    Params,
    Ready,
    Refuse,
    Rejected,
    Update,
    Welcome,
    Work,
)

NEW, GREETED, CHECKING, WORKING, CLOSED = "new", "greeted", "checking", "working", "closed"
NODE, COORDINATOR = "node", "coordinator"

# (state, who speaks) -> what may be said -> the state after it
TABLE: dict[tuple[str, str], dict[type, str]] = {
    (NEW, NODE): {Hello: GREETED},
    (GREETED, COORDINATOR): {Welcome: CHECKING, Refuse: CLOSED},
    (GREETED, NODE): {Leave: CLOSED},
    (CHECKING, NODE): {Ready: WORKING, Beat: CHECKING, Leave: CLOSED},
    (CHECKING, COORDINATOR): {Beat: CHECKING, Refuse: CLOSED, Bye: CLOSED},
    (WORKING, NODE): {Update: WORKING, Beat: WORKING, Leave: CLOSED},
    (WORKING, COORDINATOR): {
        Params: WORKING,
        Work: WORKING,
        Cancel: WORKING,
        Rejected: WORKING,
        Beat: WORKING,
        Refuse: CLOSED,
        Bye: CLOSED,
    },
}
WITH_BODY = (Welcome, Ready, Params, Work, Update)


class Session:
    """Checks every word of one conversation, ours and theirs, against the table."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._peer = COORDINATOR if side == NODE else NODE
        self.state = NEW

    def say(self, message: Message) -> None:
        """We are about to say this; illegal words are our bug."""
        after = TABLE.get((self.state, self._side), {}).get(type(message))
        if after is None:
            raise LocalProtocolError(f"{self._side} may not say {type(message).__name__} when {self.state}")
        self.state = after

    def may_say(self, kind: type) -> bool:
        return kind in TABLE.get((self.state, self._side), {})

    def hear(self, message: Message, body_bytes: int) -> bool:
        """The peer said this. False: we have parted already, so it no longer matters."""
        if self.state == CLOSED:
            return False
        after = TABLE.get((self.state, self._peer), {}).get(type(message))
        if after is None:
            raise RemoteProtocolError(
                f"{self._peer} may not say {type(message).__name__} when {self.state}", code="W5-120"
            )
        if body_bytes and not isinstance(message, WITH_BODY):
            raise RemoteProtocolError(f"{type(message).__name__} carries no body", code="W5-120")
        self.state = after
        return True
