"""Connections: turns bytes from a socket into messages, and messages into bytes.

A `Connection` decodes each body straight into its final memory, checks every message against the session's
table, and sends large bodies in slices, so that a slow peer does not make the process grow. It decides
nothing, and knows neither nodes nor coordinators.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from w5xde.errors import RemoteProtocolError
from w5xde.protocol.session import Session
from w5xde.protocol.wire import GREETING_LIMITS, Body, Decoder, Limits, Stream, encode
from w5xde.runtime.net.sockets import round_trip_seconds

if TYPE_CHECKING:
    from w5xde.messages import Message

Buffer = bytes | bytearray | memoryview

# A frame with a body up to this size is joined and written in one system call, without a queue.
JOIN_BYTES_MAX = 64 * 1024
# Larger bodies are written in slices, because asyncio copies what the socket does not take at once.
SLICE_BYTES = 256 * 1024
# Pieces of at least this size bypass asyncio, which would copy them; so much is written per system call.
DIRECT_BYTES_MIN = 512 * 1024
DIRECT_BYTES = 4 * 1024 * 1024
# Only a body of at least this size says how fast the link is: shorter ones arrive in one piece.
MEASURED_BYTES_MIN = 64 * 1024
# The weight of the newest measurement of the link.
_NEWEST = 0.5
# How long a peer may take to read what was sent before the connection closes.
LAST_WORDS_SECONDS = 5.0
# How long a peer may take to close its side once it has our last message.
GOODBYE_SECONDS = 1.0
# What a peer sends after our last message goes here, and nobody reads it.
_unread = memoryview(bytearray(64 * 1024))


class SharedMemory(Protocol):
    """Memory that both sides of a connection map: a body that lies there is not sent, only its place."""

    def offset_of(self, piece: memoryview) -> int | None:
        """Where these bytes lie in the memory that the peer can read; None if they lie elsewhere."""

    def body_at(self, offset: int, count: int) -> Body:
        """A body that the peer has put there; raises RemoteProtocolError if nothing can lie there."""
        ...


@dataclass(frozen=True, slots=True)
class Owner:
    """The callbacks of a connection's owner."""

    opened: Callable[[Connection], None]
    heard: Callable[[Connection, Message, Body], None]
    lost: Callable[[Connection, str], None]
    # Any byte has arrived.
    alive: Callable[[], None]
    configure: Callable[[Any], None] = lambda sock: None
    # Returns the memory for a large body.
    place: Callable[[Message, int], Body | Stream] | None = None
    # Returns whether a body may arrive now, or must wait for `go_on`.
    admit: Callable[[Connection, Message, int], bool] | None = None


class Connection(asyncio.BufferedProtocol):
    """The connection with one peer."""

    def __init__(self, side: str, owner: Owner, limits: Limits = GREETING_LIMITS) -> None:
        self.session = Session(side)
        self.peer = "?"
        self.bytes_sent = 0
        self.bytes_received = 0
        # Time from the first to the last byte of frames, summed.
        self.seconds_sending = 0.0
        self.seconds_receiving = 0.0
        # Bytes per second at which large bodies arrive; 0 until the first one has.
        self.link = 0.0
        self._is_inside_machine = False
        self._sending_since: float | None = None
        # When the body that is arriving began, and after how many bytes of this connection.
        self._body_since: tuple[float, int] | None = None
        self._decoder = Decoder(limits, owner.place)
        self._owner = owner
        self._shared: SharedMemory | None = None
        self._transport: asyncio.Transport | None = None
        self._queue: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._unsent: list[Callable[[], None]] = []
        # Small messages that wait for the next one.
        self._held = b""
        self._direct: socket.socket | None = None
        self._direct_bytes_min: float = DIRECT_BYTES_MIN
        self._is_paused = False
        self._paused_at = 0.0
        self._is_closing = False
        self._reason = ""
        # The error code of a rule of the protocol that the peer broke; empty if it broke none.
        self.fault = ""

    @property
    def limits(self) -> Limits:
        return self._decoder.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._decoder.limits = limits

    def share(self, memory: SharedMemory) -> None:
        """From now on bodies that lie in this memory are not sent, and the peer need not send its own."""
        self._shared, self._decoder.shared = memory, memory.body_at

    @property
    def reported_link(self) -> float:
        """The link as the peer is told, to choose a codec by; 0, which means unknown, inside one machine.

        There no codec is faster than a copy, and trying them would take its cores from the nodes.
        """
        return 0.0 if self._is_inside_machine else self.link

    @property
    def round_trip_seconds(self) -> float | None:
        """The round-trip time that the system measures; None inside one machine, or where it tells none."""
        if self._transport is None or self._is_inside_machine:
            return None
        return round_trip_seconds(self._transport.get_extra_info("socket"))

    @property
    def stuck_since(self) -> float | None:
        """The monotonic time since when the peer has read nothing of what waits; None if nothing waits."""
        return self._paused_at if self._is_paused else None

    @property
    def frame_began(self) -> int | None:
        """After how many received bytes the frame began that is still arriving; None if none is."""
        if self._body_since is not None:
            return self._body_since[1]
        return self.bytes_received - self._decoder.filled if self._decoder.filled else None

    # --- called by asyncio ------------------------------------------------------------------------

    @property
    def descriptor(self) -> int | None:
        """The file descriptor of its socket; None if it is not connected."""
        return self._transport.get_extra_info("socket").fileno() if self._transport is not None else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # asyncio must tell whenever it buffers anything, because then `sent` must wait. With a limit of zero
        # its TLS would pause writing with an empty buffer, and never resume.
        is_secured = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(high=1 if is_secured else 0)
        if is_secured:
            # Bytes written to the socket itself would bypass TLS in clear text.
            self._direct_bytes_min = math.inf
        address = transport.get_extra_info("peername")
        # Without an address it is a Unix socket.
        self.peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this machine"
        self._is_inside_machine = not isinstance(address, tuple)
        self._owner.configure(transport.get_extra_info("socket"))
        self._owner.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.get_buffer() if not self._is_closing else _unread

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        if self._is_closing:
            return
        # Any byte is a sign of life: a large body may take longer than a node may be silent.
        self._owner.alive()
        try:
            frames = self._decoder.buffer_updated(nbytes)
            if self._body_since is not None and not self._decoder.is_in_body:
                self._body_ended(*self._body_since)
            for message, body in frames:
                if self.session.hear(message, len(body)):
                    self._owner.heard(self, message, body)
            # Only after the messages before it were handled: they may say what the body is for.
            if self._body_since is None and self._decoder.is_in_body:
                self._body_began()
        except RemoteProtocolError as error:
            self._reason, self.fault = error.what, error.code
            self.abort()

    def _body_began(self) -> None:
        self._body_since = (time.perf_counter(), self.bytes_received)
        arriving = self._decoder.arriving
        admit = self._owner.admit
        if admit is not None and arriving is not None and not admit(self, *arriving):
            self._pause_reading()

    def _body_ended(self, then: float, before: int) -> None:
        """The body is complete that began at time `then`, when `before` bytes had arrived."""
        now = time.perf_counter()
        self._body_since = None
        self.seconds_receiving += now - then
        if self.bytes_received - before >= MEASURED_BYTES_MIN and now > then:
            rate = (self.bytes_received - before) / (now - then)
            self.link += (_NEWEST if self.link else 1.0) * (rate - self.link)

    def _pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Let the body arrive that `admit` made wait."""
        # The time that it waited says nothing about the link.
        self._body_since = (time.perf_counter(), self.bytes_received)
        if self._is_writable:
            cast(asyncio.Transport, self._transport).resume_reading()

    def pause_writing(self) -> None:
        self._is_paused, self._paused_at = True, time.monotonic()

    def resume_writing(self) -> None:
        self._is_paused = False
        waiting, self._unsent = self._unsent, []
        for sent in waiting:
            sent()
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._shared = self._decoder.shared = None
        if self._direct is not None:
            self._stop_writing_directly()
            self._direct.close()
            self._direct = None
        # The memory of what was not sent is its owner's again.
        unsent = [*self._unsent, *(sent for _, sent in self._queue if sent is not None)]
        self._queue.clear()
        self._unsent.clear()
        for sent in unsent:
            sent()
        reason = str(exc) if exc else "the connection closed"
        if isinstance(exc, ConnectionError):
            # A reset. The error number says nothing to users.
            reason = f"the connection closed ({exc.strerror or exc})"
        self._owner.lost(self, self._reason or reason)

    # --- called by the owner ----------------------------------------------------------------------

    @property
    def _is_writable(self) -> bool:
        """Whether asyncio takes what is written. It logs every write to a connection that has failed."""
        return self._transport is not None and not self._transport.is_closing()

    def send(
        self,
        message: Message,
        pieces: Sequence[Buffer] = (),
        sent: Callable[[], None] | None = None,
        *,
        hold: bool = False,
    ) -> None:
        """Send a message with a body. `sent` is called when the memory of the pieces may be reused.

        With `hold` a small message waits for the next one, and both are written in one system call.
        """
        if self._is_closing or not self._is_writable:
            if sent is not None:
                sent()
            return
        self.session.say(message)
        body_bytes = sum(len(piece) for piece in pieces)
        shared_at = self._shared_at(pieces)
        head = encode(message, body_bytes, shared_at)
        if shared_at is not None:
            pieces, body_bytes = (), 0
        self.bytes_sent += len(head) + body_bytes
        if not self._queue and body_bytes <= JOIN_BYTES_MAX:
            self._held = b"".join((self._held, head, *pieces))
            if not hold:
                self._release()
            if sent is not None:
                sent()
            return
        self._release()
        if self._sending_since is None:
            self._sending_since = time.perf_counter()
        last = len(pieces) - 1
        self._queue.append((memoryview(head), sent if last < 0 else None))
        for at, piece in enumerate(pieces):
            self._queue.append((memoryview(piece).cast("B"), sent if at == last else None))
        self._pump()

    def _shared_at(self, pieces: Sequence[Buffer]) -> int | None:
        """Where in shared memory a body of one piece lies."""
        if self._shared is None or len(pieces) != 1 or not isinstance(pieces[0], memoryview):
            return None
        return self._shared.offset_of(pieces[0]) if len(pieces[0]) else None

    def _write_directly(self, piece: memoryview) -> memoryview:
        """Write as much as the socket takes; returns the rest, which is written once there is room."""
        loop = asyncio.get_running_loop()
        if self._direct is None:
            # asyncio does not let us write to its socket object, so this is a second handle of the socket.
            own = cast(asyncio.Transport, self._transport).get_extra_info("socket")
            self._direct = socket.socket(own.family, own.type, own.proto, os.dup(own.fileno()))
            self._direct.setblocking(False)
        try:
            while len(piece):
                piece = piece[self._direct.send(piece[:DIRECT_BYTES]) :]
        except BlockingIOError:
            if not self._is_paused:
                self.pause_writing()
                loop.add_writer(self._direct, self._writable)
        except OSError as error:
            # asyncio finds the same error when it reads; this only finds it sooner.
            self._reason = self._reason or os.strerror(error.errno or 0)
            loop.call_soon(self.abort)
        return piece

    def _writable(self) -> None:
        self._stop_writing_directly()
        self.resume_writing()

    def _stop_writing_directly(self) -> None:
        if self._direct is not None:
            asyncio.get_running_loop().remove_writer(self._direct)

    def _release(self) -> None:
        if self._held and self._is_writable:
            begun = time.perf_counter()
            cast(asyncio.Transport, self._transport).write(self._held)
            self.seconds_sending += time.perf_counter() - begun
        self._held = b""

    def close(self) -> None:
        """Close once everything has been sent."""
        self._is_closing = True
        self._release()
        if self._transport is not None and not self._queue:
            self._end_writing()
        if self._transport is not None:
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self.abort)

    def _end_writing(self) -> None:
        """Everything was given to the transport: close it, as soon as the peer has closed its side.

        A peer that is sending when we close at once gets an error, and never reads our last message.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.can_write_eof():
            transport.write_eof()
            asyncio.get_running_loop().call_later(GOODBYE_SECONDS, transport.close)
        else:
            transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _pump(self) -> None:
        transport = cast(asyncio.Transport, self._transport)
        while self._queue and not self._is_paused and self._is_writable:
            piece, sent = self._queue.popleft()
            if len(piece) >= self._direct_bytes_min and not transport.get_write_buffer_size():
                rest = self._write_directly(piece)
                if len(rest):
                    self._queue.appendleft((rest, sent))
                    return
                if sent is not None:
                    sent()
                continue
            if len(piece) > SLICE_BYTES:
                self._queue.appendleft((piece[SLICE_BYTES:], sent))
                piece, sent = piece[:SLICE_BYTES], None
            transport.write(piece)
            if sent is not None and transport.get_write_buffer_size():
                self._unsent.append(sent)
            elif sent is not None:
                sent()
        if not self._queue and not self._is_paused and self._sending_since is not None:
            self.seconds_sending += time.perf_counter() - self._sending_since
            self._sending_since = None
        if self._is_closing and not self._queue and self._is_writable:
            # Not at once: asyncio may have called from the middle of its own writing, and would close twice.
            asyncio.get_running_loop().call_soon(self._end_writing)
