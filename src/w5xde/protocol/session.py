"""The conversation with one peer: a table of which side may send which message in which state.

    new ──Hello──▶ greeted ──Welcome──▶ checking ──Ready──▶ working ──Leave / Bye──▶ closed
                      └──Offer / Refuse──────┴───────────────────┘

Both ends hold a `Session`. Messages may cross on the wire: after our own last message we still accept
messages of the peer, and ignore them. Knows no sockets and no clock.
"""

from __future__ import annotations

from w5xde import messages as msg
from w5xde.errors import LocalProtocolError, RemoteProtocolError

NEW, GREETED, CHECKING, WORKING, CLOSED = "new", "greeted", "checking", "working", "closed"
NODE, COORDINATOR = "node", "coordinator"

# (state, sending side) -> legal messages -> the state after each
TABLE: dict[tuple[str, str], dict[type, str]] = {
    (NEW, NODE): {msg.Hello: GREETED},
    (GREETED, COORDINATOR): {msg.Welcome: CHECKING, msg.Offer: CLOSED, msg.Refuse: CLOSED},
    (GREETED, NODE): {msg.Leave: CLOSED},
    (CHECKING, NODE): {msg.Ready: WORKING, msg.Beat: CHECKING, msg.Leave: CLOSED},
    (CHECKING, COORDINATOR): {msg.Beat: CHECKING, msg.Refuse: CLOSED, msg.Bye: CLOSED},
    (WORKING, NODE): {msg.Update: WORKING, msg.Beat: WORKING, msg.Leave: CLOSED},
    (WORKING, COORDINATOR): {
        **dict.fromkeys((msg.Params, msg.Difference, msg.Work, msg.Cancel, msg.Rejected, msg.Beat), WORKING),
        **dict.fromkeys((msg.Refuse, msg.Bye), CLOSED),
    },
}
WITH_BODY = (msg.Welcome, msg.Offer, msg.Ready, msg.Params, msg.Difference, msg.Work, msg.Update)


class Session:
    """Checks every message of one conversation, sent or received, against the table."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._peer = COORDINATOR if side == NODE else NODE
        self.state = NEW

    def say(self, message: msg.Message) -> None:
        """Check a message that we are about to send; an illegal one is our bug."""
        after = TABLE.get((self.state, self._side), {}).get(type(message))
        if after is None:
            raise LocalProtocolError(f"{self._side} may not say {type(message).__name__} when {self.state}")
        self.state = after

    def may_say(self, kind: type) -> bool:
        return kind in TABLE.get((self.state, self._side), {})

    def hear(self, message: msg.Message, body_bytes: int) -> bool:
        """Check a message of the peer. False: we have sent our last message, so ignore it."""
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
