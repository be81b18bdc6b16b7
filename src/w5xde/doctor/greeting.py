"""How a doctor greets a coordinator, only to look, and how it receives the answers. Opens no connection."""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

import w5xde
from w5xde.messages import PROTOCOL_VERSION, Beat, Hello, Message
from w5xde.protocol.wire import MAGIC, Decoder
from w5xde.ticket import Ticket


def greeting(ticket: Ticket | None, probe: int = 0) -> Hello:
    """A greeting that uses nothing of the ticket. `probe`: bytes that are wanted with the answer."""
    proof = ticket.id + ticket.secret.reveal() if ticket is not None else b""
    return Hello(
        protocol=PROTOCOL_VERSION,
        package=w5xde.__version__,
        name="doctor",
        ticket=proof,
        looks=True,
        probe=probe,
    )


class Received(NamedTuple):
    """A message, and how long it took from its first bytes to the end of its body."""

    message: Message
    seconds: float


def receive(sock: socket.socket, decoder: Decoder, deadline: float) -> Received | None:
    """The next message that is no beat, once its body is complete; None if the peer speaks something else.

    Raises TimeoutError at the deadline, a time of the monotonic clock.
    """
    began = None
    while (left := deadline - time.monotonic()) > 0:
        sock.settimeout(left)
        buffer = decoder.get_buffer()
        count = sock.recv_into(buffer)
        if not count or (began is None and buffer[: min(count, 2)] != MAGIC[:count]):
            return None
        if began is None:
            began = time.perf_counter()
        for frame in decoder.buffer_updated(count):
            if not isinstance(frame.message, Beat):
                return Received(frame.message, time.perf_counter() - began)
        if not decoder.filled and not decoder.is_in_body:
            # Beats are complete, and the next bytes begin a message.
            began = None
    raise TimeoutError("no answer")
