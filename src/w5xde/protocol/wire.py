"""Frames: turns bytes into messages and back, and checks every size before it allocates memory.

    0      2    3    4           8                16            16 + meta
    +------+----+----+-----------+-----------------+-------------+-----------------+
    | "W5" |  1 |flag| meta: u32 | body: u64       | MessagePack | raw bytes       |
    +------+----+----+-----------+-----------------+-------------+-----------------+

With flag 1 the body lies in memory that both sides share; then 8 bytes say where it begins there, and no body
follows. `Decoder` has the interface of asyncio's `BufferedProtocol` (`get_buffer`, `buffer_updated`), so that
a large body is received straight into its final memory, and several small frames take one system call. Knows
no sockets, no clock, no torch, and not which message may follow which.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from w5xde.errors import LocalProtocolError, RemoteProtocolError
from w5xde.messages import Beat, Bye, Hello, Leave, Message, Offer, Ready, Refuse, Welcome
from w5xde.sanitize import harmless

MAGIC = b"W5"
WIRE_VERSION = 1
_HEADER = struct.Struct("<2sBBIQ")
HEADER_BYTES = _HEADER.size
# The flag of a frame whose body lies in shared memory, and the place of the body there.
SHARED = 1
_PLACE = struct.Struct("<Q")
PLACE_BYTES = _PLACE.size

# Many small frames arrive in one read. A read from the loopback returns at most 64 KiB.
SCRATCH_BYTES = 64 * 1024

_encoder = msgspec.msgpack.Encoder()
Words = Literal["all", "greeting", "welcome", "offer"]
# Before a node works, only the messages that are legal then are decoded: a batch in 4 KiB would become 100
# KiB of objects.
_decoders: dict[Words, msgspec.msgpack.Decoder[Any]] = {
    "all": msgspec.msgpack.Decoder(Message),
    "greeting": msgspec.msgpack.Decoder(Hello | Ready | Beat | Leave),
    "welcome": msgspec.msgpack.Decoder(Welcome | Refuse | Beat | Bye),
    # For a node that asked for the job's code.
    "offer": msgspec.msgpack.Decoder(Offer | Refuse),
}


class Limits(NamedTuple):
    """The largest frame that we accept at present."""

    meta_bytes_max: int
    body_bytes_max: int
    # Which words are read: all, or only those that a node or a coordinator may say before the node works.
    words: Words = "all"
    # How many MessagePack values a message may have: a value of one byte takes up to 60 in memory.
    values_max: int = 2**32

    @property
    def scratch_bytes(self) -> int:
        """Room for many small frames; for a peer that is not working yet, for one message."""
        return SCRATCH_BYTES if self.words == "all" else min(self.meta_bytes_max, SCRATCH_BYTES)


# A greeting needs a few hundred bytes; no unknown peer may make us hold more.
GREETING_LIMITS = Limits(meta_bytes_max=4096 - HEADER_BYTES, body_bytes_max=0, words="greeting")


Body = bytearray | memoryview


class Stream(Protocol):
    """Takes a body while it arrives."""

    @property
    def body(self) -> Body:
        """The bytes that remain of a complete body."""
        ...

    def get_buffer(self) -> memoryview:
        """Memory for the next bytes, at least one."""
        ...

    def buffer_updated(self, count: int) -> None:
        """Take `count` bytes that were written there."""
        ...


class Frame(NamedTuple):
    """A message and its raw bytes."""

    message: Message
    body: Body


def encode(message: Message, body_bytes: int = 0, shared_at: int | None = None) -> bytes:
    """Header and message of a frame; on the wire the body follows, unless it lies in shared memory."""
    try:
        meta = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"cannot encode {type(message).__name__}: {error}") from error
    if shared_at is not None:
        return (
            _HEADER.pack(MAGIC, WIRE_VERSION, SHARED, len(meta), body_bytes) + meta + _PLACE.pack(shared_at)
        )
    return _HEADER.pack(MAGIC, WIRE_VERSION, 0, len(meta), body_bytes) + meta


class Decoder:
    """Turns the bytes of one connection into frames, in whatever pieces they arrive."""

    def __init__(self, limits: Limits, place: Callable[[Message, int], Body | Stream] | None = None) -> None:
        """`place` gives the memory for a large body when it begins to arrive."""
        self.limits = limits
        # Gives the body at an offset of the memory that is shared with the peer, by its length; None: no
        # memory is shared.
        self.shared: Callable[[int, int], Body] | None = None
        self._place = place or (lambda message, count: bytearray(count))
        self._scratch = bytearray(HEADER_BYTES + limits.scratch_bytes)
        self._filled = 0
        # A body that does not fit the scratch: its message, its length, its first bytes, and its memory.
        self._message: Message | None = None
        self._body_bytes = 0
        self._first = b""
        self._body: Body | Stream | None = None
        self._body_filled = 0
        self._broken = False

    @property
    def is_in_body(self) -> bool:
        """Whether a part of a body has arrived."""
        return self._message is not None

    @property
    def filled(self) -> int:
        """The number of bytes of an unfinished frame in the scratch."""
        return self._filled

    @property
    def arriving(self) -> tuple[Message, int] | None:
        """The message whose body is arriving, and the length of that body."""
        return (self._message, self._body_bytes) if self._message is not None else None

    def get_buffer(self) -> memoryview:
        """The memory for the next bytes: the rest of a body, or the scratch."""
        if self._message is None:
            return memoryview(self._scratch)[self._filled :]
        if self._body is None:
            self._body = self._place(self._message, self._body_bytes)
            self._put_first(self._body)
        if isinstance(self._body, bytearray | memoryview):
            return memoryview(self._body)[self._body_filled :]
        return self._body.get_buffer()[: self._body_bytes - self._body_filled]

    def _put_first(self, body: Body | Stream) -> None:
        """Write the first bytes of a body, which arrived with its message."""
        first, self._first = self._first, b""
        if isinstance(body, bytearray | memoryview):
            body[: len(first)] = first
            return
        while first:
            room = body.get_buffer()
            count = min(len(room), len(first))
            room[:count] = first[:count]
            body.buffer_updated(count)
            first = first[count:]

    def buffer_updated(self, count: int) -> list[Frame]:
        """Take `count` bytes that were written into the buffer; returns the frames that they complete."""
        if self._broken:
            raise RemoteProtocolError("bytes after an error in the stream", code="W5-120")
        if self._message is not None and self._body is not None:
            self._body_filled += count
            body = self._body
            if not isinstance(body, bytearray | memoryview):
                body.buffer_updated(count)
                body = body.body
            if self._body_filled < self._body_bytes:
                return []
            frame = Frame(self._message, body)
            self._message = self._body = None
            return [frame]
        self._filled += count
        try:
            return self._parse()
        except RemoteProtocolError:
            self._broken = True
            raise

    def _parse(self) -> list[Frame]:
        frames = []
        view = memoryview(self._scratch)
        at = 0
        while self._filled - at >= HEADER_BYTES:
            meta_bytes, body_bytes, is_shared = self._read_header(at)
            meta_end = at + HEADER_BYTES + meta_bytes
            if self._filled < meta_end + (PLACE_BYTES if is_shared else 0):
                break
            meta = view[at + HEADER_BYTES : meta_end]
            # A value takes at least a byte, so that most messages need not be counted.
            if meta_bytes > self.limits.values_max:
                _check_values(meta, self.limits.values_max)
            message = _read_message(_decoders[self.limits.words], meta)
            if is_shared and self.shared is not None:
                (place,) = _PLACE.unpack_from(self._scratch, meta_end)
                frames.append(Frame(message, self.shared(place, body_bytes)))
                at = meta_end + PLACE_BYTES
                continue
            here = self._filled - meta_end
            if here < body_bytes:
                # The rest of the body arrives straight in its memory.
                self._message, self._body_bytes = message, body_bytes
                self._first = bytes(view[meta_end : self._filled])
                self._body_filled = here
                at = self._filled
                break
            frames.append(Frame(message, bytearray(view[meta_end : meta_end + body_bytes])))
            at = meta_end + body_bytes
        view.release()
        self._compact(at)
        return frames

    def _read_header(self, at: int) -> tuple[int, int, bool]:
        magic, version, flags, meta_bytes, body_bytes = _HEADER.unpack_from(self._scratch, at)
        if magic != MAGIC:
            raise RemoteProtocolError("this is not a w5xde connection", code="W5-120")
        if version != WIRE_VERSION or flags & ~SHARED:
            raise RemoteProtocolError(
                f"frames of version {version}, flags {flags}; we read version {WIRE_VERSION}", code="W5-107"
            )
        if flags and self.shared is None:
            raise RemoteProtocolError("a body in shared memory, and we share none", code="W5-120")
        if meta_bytes > self.limits.meta_bytes_max or body_bytes > self.limits.body_bytes_max:
            raise RemoteProtocolError(
                f"a frame of {meta_bytes} + {body_bytes} bytes; at most "
                f"{self.limits.meta_bytes_max} + {self.limits.body_bytes_max} are accepted now",
                code="W5-121",
            )
        return meta_bytes, body_bytes, bool(flags)

    def _compact(self, at: int) -> None:
        """Move the unfinished frame to the front, and make room for the rest of it."""
        rest = self._filled - at
        if at:
            self._scratch[:rest] = self._scratch[at : self._filled]
        self._filled = rest
        wanted = HEADER_BYTES + self.limits.scratch_bytes
        if rest >= HEADER_BYTES:
            wanted = max(wanted, HEADER_BYTES + self._read_header(0)[0] + PLACE_BYTES)
        if len(self._scratch) < wanted:
            # A new one: the reader may still hold a view of the old one, which then cannot grow.
            larger = bytearray(wanted)
            larger[:rest] = self._scratch[:rest]
            self._scratch = larger


# For first bytes of MessagePack values: how many bytes of a number or a length follow. Strings and bytes
# follow their length; arrays and maps have as many values, or twice as many. All other values are one byte,
# or have their length in it.
_WIDTHS = dict(zip(range(0xC4, 0xE0), (1, 2, 4, 0, 0, 0, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=False))
_WIDTHS |= {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_BYTES = frozenset((0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB))


def _check_values(meta: memoryview, values_max: int) -> None:
    """Refuse a message of more values than this, before any of them is made. Nonsense is left to decoding."""
    at, awaited, count = 0, 1, 0
    while awaited and at < len(meta):
        first = meta[at]
        width = _WIDTHS.get(first, 0)
        at, awaited, count = at + 1 + width, awaited - 1, count + 1
        if 0x80 <= first < 0xA0:
            awaited += (first & 15) * (2 if first < 0x90 else 1)
        elif 0xA0 <= first < 0xC0:
            at += first & 31
        elif first in _BYTES:
            at += int.from_bytes(meta[at - width : at], "big")
        elif 0xDC <= first < 0xE0:
            awaited += int.from_bytes(meta[at - width : at], "big") * (2 if first >= 0xDE else 1)
        # The announced values count at once: an array is made as long as it says.
        if count + awaited > values_max:
            raise RemoteProtocolError(
                f"a message of more than {values_max} values, which take more memory than bytes",
                code="W5-121",
            )


def _read_message(decoder: msgspec.msgpack.Decoder[Any], meta: memoryview) -> Message:
    try:
        message: Message = decoder.decode(meta)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The error quotes what was sent, for example the name of an unknown field.
        what = f"a message that makes no sense: {harmless(str(error))}"
        raise RemoteProtocolError(what, code="W5-120") from None
    return message
