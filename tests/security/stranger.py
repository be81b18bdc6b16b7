"""A peer that a test speaks for by hand: it greets a coordinator and says whatever the test wants."""

from __future__ import annotations

import itertools
import socket
import ssl
from collections.abc import Callable
from typing import Any

import torch

from tests.processes import HERE
from tests.system import jobs
from w5xde.learn.job.node_setup import prepare_node
from w5xde.messages import PROTOCOL_VERSION, Beat, Hello, Message, Ready, Welcome
from w5xde.protocol.wire import Body, Decoder, Limits, encode
from w5xde.runtime.net import tls
from w5xde.ticket import Ticket

ANSWER_LIMITS = Limits(1 << 20, 1 << 24)
# Each stranger comes from its own address of this machine, so that limits for one address do not meet it.
_ADDRESSES = (f"127.0.{1 + number // 200}.{1 + number % 200}" for number in itertools.count())


class Stranger:
    """A connection to the coordinator of a ticket."""

    def __init__(
        self, ticket: Ticket, *, source: str = "", host: str = HERE, context: ssl.SSLContext | None = None
    ) -> None:
        near = (source or next(_ADDRESSES), 0) if host == HERE else None
        self.sock = socket.create_connection((host, ticket.addresses[0][1]), 10, near)
        self._ticket = ticket
        if not ticket.is_clear:
            self.sock = (context or tls.inspection_context()).wrap_socket(self.sock)
        self._decoder = Decoder(ANSWER_LIMITS)
        self._frames: list[tuple[Message, Body]] = []
        # The body of the last message.
        self.body: Body = bytearray()

    def say(self, *messages: Message, body: bytes = b"") -> None:
        self.sock.sendall(b"".join(encode(message, len(body)) for message in messages) + body)

    def greet(self, **changes: Any) -> None:
        proof = self._ticket.id + self._ticket.secret.reveal()
        fields = {"protocol": PROTOCOL_VERSION, "package": "0", "name": "stranger", "ticket": proof}
        self.say(Hello(**{**fields, **changes}))

    def hear(self) -> Message | None:
        """Return the next message that is not a heartbeat, or None if the other side hung up."""
        while True:
            while not self._frames:
                if not self._receive():
                    return None
            message, self.body = self._frames.pop(0)
            # A coordinator may send heartbeats at any time; on a busy machine one comes before an answer.
            if not isinstance(message, Beat):
                return message

    def _receive(self) -> bool:
        """Decode what arrives next; return False if the other side hung up."""
        try:
            count = self.sock.recv_into(self._decoder.get_buffer())
        except (ConnectionResetError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return False
        if count:
            self._frames += self._decoder.buffer_updated(count)
        return count > 0

    def get_ready(self, spoil: Callable[[bytes], bytes] = lambda proof: proof) -> None:
        """Compute the canary as a node does after its greeting; `spoil` changes the answer that is sent."""
        welcome = self.hear()
        assert isinstance(welcome, Welcome)
        parts = prepare_node(jobs.job, welcome, torch.device("cpu"))
        parts.prove(welcome, self.body)
        assert parts.proof is not None
        self.say(Ready(parts.layout_digest), body=spoil(bytes(parts.proof.body)))

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()
