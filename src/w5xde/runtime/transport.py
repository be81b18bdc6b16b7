"""Connections: TCP in, frames out, and the other way round.

One `Connection` per peer: it decodes straight into place, checks every word against the session's table,
and sends large bodies in slices, so that no peer makes our memory grow. It decides nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from w5xde.errors import JoinError, RemoteProtocolError, UsageError
from w5xde.protocol.session import Session
from w5xde.protocol.wire import GREETING_LIMITS, Decoder, Limits, encode

if TYPE_CHECKING:
    from w5xde.messages import Message

Buffer = bytes | bytearray | memoryview

# Below this a frame is joined and written at once: one system call, and no queue.
JOIN_BYTES_MAX = 64 * 1024
# Large bodies are written in slices, because asyncio copies what the socket does not take at once.
SLICE_BYTES = 256 * 1024
# Data on the way that a dead peer never acknowledges: the kernel gives up after this long.
USER_TIMEOUT_MILLISECONDS = 10_000
DIAL_SECONDS = 5.0
# How long a parting peer may take to read our last words.
LAST_WORDS_SECONDS = 5.0


class Connection(asyncio.BufferedProtocol):
    """One peer."""

    def __init__(
        self,
        side: str,
        *,
        opened: Callable[[Connection], None],
        heard: Callable[[Connection, Message, bytearray], None],
        lost: Callable[[Connection, str], None],
        alive: Callable[[], None],
        limits: Limits = GREETING_LIMITS,
    ) -> None:
        self.session = Session(side)
        self.peer = "?"
        self.bytes_sent = 0
        self.bytes_received = 0
        self._decoder = Decoder(limits)
        self._opened, self._heard, self._lost, self._alive = opened, heard, lost, alive
        self._transport: asyncio.Transport | None = None
        self._queue: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._unsent: list[Callable[[], None]] = []
        self._held = b""
        self._is_paused = False
        self._is_closing = False
        self._reason = ""

    @property
    def limits(self) -> Limits:
        return self._decoder.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._decoder.limits = limits

    # --- asyncio's side ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Told whenever asyncio holds anything back: then what we gave it must not change yet.
        self._transport.set_write_buffer_limits(high=0)
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
        _configure(transport.get_extra_info("socket"))
        self._opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        # Any byte is a sign of life: a large body may take longer than silence is forgiven.
        self._alive()
        try:
            for message, body in self._decoder.buffer_updated(nbytes):
                if self.session.hear(message, len(body)):
                    self._heard(self, message, body)
        except RemoteProtocolError as error:
            self._reason = error.what
            self.abort()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        waiting, self._unsent = self._unsent, []
        for sent in waiting:
            sent()
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._queue.clear()
        self._lost(self, self._reason or (str(exc) if exc else "the connection closed"))

    # --- our side ---------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        pieces: Sequence[Buffer] = (),
        sent: Callable[[], None] | None = None,
        *,
        hold: bool = False,
    ) -> None:
        """Say something. `sent` is called when the pieces may be changed again.

        With `hold` a small message waits for the next one and travels with it, in one system call.
        """
        if self._transport is None or self._is_closing:
            return
        self.session.say(message)
        body_bytes = sum(len(piece) for piece in pieces)
        head = encode(message, body_bytes)
        self.bytes_sent += len(head) + body_bytes
        if not self._queue and body_bytes <= JOIN_BYTES_MAX:
            self._held = b"".join((self._held, head, *pieces))
            if not hold:
                self._release()
            if sent is not None:
                sent()
            return
        self._release()
        self._queue.append((memoryview(head), None))
        last = len(pieces) - 1
        for at, piece in enumerate(pieces):
            self._queue.append((memoryview(piece).cast("B"), sent if at == last else None))
        self._pump()

    def _release(self) -> None:
        if self._held and self._transport is not None:
            self._transport.write(self._held)
        self._held = b""

    def close(self) -> None:
        """Part once everything has been sent."""
        self._is_closing = True
        self._release()
        if self._transport is not None and not self._queue:
            self._transport.close()
        if self._transport is not None:
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self.abort)

    def abort(self) -> None:
        """Part now."""
        if self._transport is not None:
            self._transport.abort()

    def _pump(self) -> None:
        while self._queue and not self._is_paused and self._transport is not None:
            piece, sent = self._queue.popleft()
            if len(piece) > SLICE_BYTES:
                self._queue.appendleft((piece[SLICE_BYTES:], sent))
                piece, sent = piece[:SLICE_BYTES], None
            self._transport.write(piece)
            if sent is not None and self._transport.get_write_buffer_size():
                self._unsent.append(sent)
            elif sent is not None:
                sent()
        if self._is_closing and not self._queue and self._transport is not None:
            self._transport.close()


def _configure(sock: Any) -> None:
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MILLISECONDS)


async def listen(make: Callable[[], Connection], host: str, port: int) -> asyncio.Server:
    """Open the coordinator's port."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(make, host, port, backlog=1024)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {_reason(error)}",
            code="W5-110",
            fix="choose another --port (--port 0: any that is free), or another --host",
        ) from error


async def dial(make: Callable[[], Connection], host: str, port: int) -> Connection:
    """Connect to a coordinator, or say why that is not possible."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            _, connection = await loop.create_connection(make, host, port)
            return connection
    except TimeoutError:
        raise JoinError(
            f"no answer from {host}:{port} within {DIAL_SECONDS:.0f} s",
            code="W5-104",
            fix="open that port in the coordinator's firewall, or check the address",
        ) from None
    except (OSError, UnicodeError) as error:
        raise JoinError(
            f"nothing answers at {host}:{port} ({_reason(error)})",
            code="W5-103",
            why="the coordinator is not running there, or listens only on its own machine",
            fix="start  w5xde serve  there; for other machines with  --host 0.0.0.0",
        ) from error


def _reason(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return "that is not a host name"
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)
