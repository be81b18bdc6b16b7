"""Header lies and bombs: each a claim that is not true, the reason it is refused with, and what it may cost.

No `assert`: `python -O` runs all of this too.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lz4.block
import lz4.frame
import msgspec
import torch
import zstandard

from tests.protocol.streams import around, head
from tests.security import decoders, files
from tests.security.measure import KIB, MIB, core_seconds, peak_bytes, refusal_of, require
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.data.payload import unpack
from w5xde.learn.model.layout import Blueprint
from w5xde.learn.step.checkpoint import restore
from w5xde.learn.trust.canary import compute_canary
from w5xde.message_types import CANARY_BODY_BYTES_MAX, DictOf, Item, ListOf, TensorAt, Value
from w5xde.messages import TRAINED, Beat, Canary, Entry, Fill, Layout
from w5xde.protocol.wire import GREETING_LIMITS, Decoder, Limits, encode
from w5xde.runtime.node.limits import WELCOME_LIMITS

# What a coordinator accepts of a node that works on a vector of 256 KiB.
VECTOR = 256 * KIB
WORKING = Limits(MIB, VECTOR)
# Beside our buffer a refusal has its words and its traceback, and tracemalloc counts these too.
WORDS_BYTES = 8 * KIB
# The CPU a refusal may cost; generous, because another process may share the core's caches.
REFUSAL_SECONDS = 0.1


@dataclass(frozen=True)
class Lie:
    """`tell` is refused with words that hold `reason`, in at most `bytes_max` of memory."""

    tell: Callable[[], object]
    reason: str
    bytes_max: int

    def check(self) -> None:
        refused: list[Exception | None] = []
        # Once before it is measured: what is imported or cached at the first time is not the lie's.
        refusal_of(self.tell)
        peak = peak_bytes(lambda: refused.append(refusal_of(self.tell)))
        require(refused[0] is not None, "it was believed")
        require(self.reason in str(refused[0]), f"refused, but with {str(refused[0])!r}")
        require(peak <= self.bytes_max, f"{peak} bytes were taken, {self.bytes_max} are allowed")
        seconds = min(core_seconds(lambda: refusal_of(self.tell)) for _ in range(3))
        require(seconds <= REFUSAL_SECONDS, f"{seconds:.3f} s of CPU")


# --- frames ---------------------------------------------------------------------------------------


def _hear(data: bytes, limits: Limits) -> Callable[[], object]:
    view = memoryview(data)

    def tell() -> None:
        decoder = Decoder(limits)
        at = 0
        while at < len(view):
            buffer = decoder.get_buffer()
            if limits is GREETING_LIMITS:
                require(len(buffer) <= 4 * KIB, f"a stranger is given {len(buffer)} bytes")
            count = min(len(buffer), len(view) - at)
            buffer[:count] = view[at : at + count]
            at += count
            decoder.buffer_updated(count)

    return tell


def _stranger(data: bytes, reason: str) -> Lie:
    return Lie(_hear(data, GREETING_LIMITS), reason, 4 * KIB + WORDS_BYTES)


def _node(data: bytes, reason: str) -> Lie:
    return Lie(_hear(data, WORKING), reason, WORKING.meta_bytes_max + VECTOR + MIB)


def _packed(value: object) -> bytes:
    return around(msgspec.msgpack.encode(value))


HELLO = {"type": "hello", "protocol": 1, "package": "0.1.0", "name": "apple"}
UPDATE = {"type": "update", "version": 1}
_MANY = b"\x84\xa4type\xa6update\xa7version\x00\xa7answers"

STRANGERS: dict[str, Lie] = {
    "a message of 0 bytes": _stranger(head(0), "makes no sense"),
    "a message of 1 byte": _stranger(head(1) + b"\x80", "makes no sense"),
    "a message one byte too long": _stranger(head(4081), "are accepted now"),
    "a message of 2^31 bytes": _stranger(head(2**31), "are accepted now"),
    "a message of 2^32 - 1 bytes": _stranger(head(2**32 - 1), "are accepted now"),
    "a body of 1 byte": _stranger(head(1, 1), "are accepted now"),
    "a body of 2^31 bytes": _stranger(head(1, 2**31), "are accepted now"),
    "a body of 2^32 - 1 bytes": _stranger(head(1, 2**32 - 1), "are accepted now"),
    "a body of 2^63 bytes": _stranger(head(1, 2**63), "are accepted now"),
    "a body of 2^64 - 1 bytes": _stranger(head(1, 2**64 - 1), "are accepted now"),
    "every flag": _stranger(head(1, flags=255) + b"\x80", "flags 255"),
    "one unknown flag": _stranger(head(1, flags=128) + b"\x80", "flags 128"),
    "a version of tomorrow": _stranger(head(1, version=2) + b"\x80", "frames of version 2"),
    "another magic": _stranger(head(1, magic=b"5W"), "not a w5xde connection"),
    "an HTTP request": _stranger(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "not a w5xde connection"),
    "an array of 2^32 - 1 in 5 bytes": _stranger(around(b"\xdd\xff\xff\xff\xff"), "makes no sense"),
    "a map of 2^32 - 1 in 5 bytes": _stranger(around(b"\xdf\xff\xff\xff\xff"), "makes no sense"),
    "a string of 2^32 - 1 in 5 bytes": _stranger(around(b"\xdb\xff\xff\xff\xff"), "makes no sense"),
    "nesting as deep as a frame": _stranger(around(b"\x91" * 4080), "makes no sense"),
    "a batch before any greeting": _stranger(
        _packed({"type": "work", "version": 0, "loans": [[0] * 6 + [[[0, 1, 0, ["l", [["l", []]] * 900]]]]]}),
        "makes no sense",
    ),
    "a name with an escape": _stranger(_packed(HELLO | {"name": "a\x1b[2J"}), "makes no sense"),
    "a name that is markup": _stranger(_packed(HELLO | {"name": "<b>a</b>"}), "makes no sense"),
    "a name of two lines": _stranger(_packed(HELLO | {"name": "a\nb"}), "makes no sense"),
    "a name that is a path": _stranger(_packed(HELLO | {"name": "../../a"}), "makes no sense"),
    "a name of a mebibyte": _stranger(_packed(HELLO | {"name": "a" * MIB})[:4096], "are accepted now"),
    "a name of 4,000 letters": _stranger(_packed(HELLO | {"name": "a" * 4000}), "makes no sense"),
    "a device of 201 letters": _stranger(_packed(HELLO | {"device": "c" * 201}), "makes no sense"),
    "a field said twice, with another type": _stranger(
        around(b"\x82\xa4type\xa5hello\xa4name\x01"), "makes no sense"
    ),
    "more cores than can be counted": _stranger(_packed(HELLO | {"cores": 2**62}), "makes no sense"),
}
NODES: dict[str, Lie] = {
    "a body one byte too long": _node(head(1, VECTOR + 1), "are accepted now"),
    "a body of 2^63 from a node": _node(head(1, 2**63), "are accepted now"),
    "a message one byte beyond a mebibyte": _node(head(MIB + 1), "are accepted now"),
    "a mebibyte of message that never comes": _node(head(MIB) + b"\xc1" * MIB, "makes no sense"),
    "answers of two bytes": _node(
        around(_MANY + b"\xdd\x00\x07\xa1\x20" + b"\x91\x00" * 500_000), "makes no sense"
    ),
    "a million answers in five bytes": _node(around(_MANY + b"\xdd\x00\x0f\x42\x40"), "makes no sense"),
    "a length below zero": _node(
        _packed(UPDATE | {"answers": [[1, 0, 0, [], False, "", "lz4", -1]]}), "sense"
    ),
    "a failure longer than a text": _node(
        _packed(UPDATE | {"answers": [[1, 0, 0, [], False, "x" * 5000]]}), "makes no sense"
    ),
    "a thousand empty frames, then nonsense": _node(
        encode(Beat()) * 1000 + b"nonsense-nonsense", "not a w5xde"
    ),
}

# --- batches --------------------------------------------------------------------------------------


def _batch(item: Item, reason: str, body_bytes: int = KIB) -> Lie:
    body = bytearray(body_bytes)
    return Lie(lambda: unpack(item, body), reason, body_bytes + MIB)


def _deep(depth: int) -> Item:
    item: Item = Value(1)
    for _ in range(depth):
        item = ListOf([item])
    return item


BATCHES: dict[str, Lie] = {
    "an unknown dtype": _batch(TensorAt("object", (1,), 0), "unknown dtype"),
    "no dtype": _batch(TensorAt("", (1,), 0), "unknown dtype"),
    "a dtype that is a function of torch": _batch(TensorAt("load", (1,), 0), "unknown dtype"),
    "one value too many": _batch(TensorAt("uint8", (KIB + 1,), 0), "beyond the end"),
    "one byte beyond the end": _batch(TensorAt("uint8", (KIB,), 1), "beyond the end"),
    "a place beyond the end": _batch(TensorAt("uint8", (1,), 2**62 - 1), "beyond the end"),
    "nothing, beyond the end": _batch(TensorAt("uint8", (0,), KIB + 1), "beyond the end"),
    "a shape of 2^62": _batch(TensorAt("float32", (2**61,), 0), "beyond the end"),
    "a shape whose product overflows to nothing": _batch(TensorAt("int64", (2**32, 2**32), 0), "beyond"),
    "a shape that is empty and endless": _batch(TensorAt("uint8", (0, 2**61, 2**61), 0), "beyond the end"),
    "a value that begins between two": _batch(TensorAt("float32", (1,), 2), "beyond the end"),
    "an integer with a gradient": _batch(TensorAt("int64", (1,), 0, True), "requires a gradient"),
    "the same bytes a thousand times": _batch(
        ListOf([TensorAt("uint8", (64 * KIB,), 0)] * 1000), "more than their body", 64 * KIB
    ),
    "a dict with a key too many": _batch(DictOf(["a", "b"], [Value(1)]), "more keys than values"),
    "lists deeper than anybody needs": _batch(_deep(40), "nested more than"),
}

# --- canaries -------------------------------------------------------------------------------------

# Two layers of two parameters, and three buffers: 12 + 12 bytes, padded, and 8, padded.
_FILL = Fill(0.0, 1.0, -1.0, 1.0)
_FILLS: list[Fill | None] = [_FILL] * 4 + [None] * 3
_BUFFERS = 128
_INPUT = TensorAt("float32", (4, 2), 0)


def _canary(
    reason: str, *, fills: list[Fill | None] = _FILLS, item: Item = _INPUT, length: int = _BUFFERS + 32
) -> Lie:
    body = bytearray(length)
    return Lie(lambda: compute_canary(decoders.a_trainer(), Canary(fills, item), body), reason, length + MIB)


def _welcome(data: bytes) -> Lie:
    return Lie(_hear(data, WELCOME_LIMITS), "are accepted now", MIB)


CANARIES: dict[str, Lie] = {
    "a canary for another layout": _canary("does not fit its layout", fills=_FILLS[:-1]),
    "a canary with an entry too many": _canary("does not fit its layout", fills=[*_FILLS, None]),
    "a canary that fills a buffer": _canary("does not fit its layout", fills=[_FILL] * 7),
    "a canary without buffers": _canary("does not fit its layout", length=_BUFFERS - 1),
    "a canary without its batch": _canary("beyond the end", length=_BUFFERS),
    "a canary one byte too short": _canary("beyond the end", length=_BUFFERS + 31),
    "a canary whose batch is there a thousand times": _canary(
        "more than their body", item=ListOf([_INPUT] * 1000)
    ),
    "a canary of an unknown dtype": _canary("unknown dtype", item=TensorAt("object", (1,), 0)),
    "a canary nested without end": _canary("nested more than", item=_deep(40)),
    "a canary one byte too long": _welcome(head(1, CANARY_BODY_BYTES_MAX + 1)),
    "a canary of 2^63 bytes": _welcome(head(1, 2**63)),
}

# --- vectors --------------------------------------------------------------------------------------

_BLUEPRINT = Blueprint(Layout([Entry("w", "float32", (VECTOR // 4,), TRAINED)]))


def _vector(spec: str, body: bytes, reason: str) -> Lie:
    view = memoryview(bytearray(body))
    raw = torch.zeros(VECTOR, dtype=torch.uint8)
    return Lie(lambda: parse(spec).decode(view, raw, _BLUEPRINT.moving_groups), reason, VECTOR + MIB)


def _table(*blocks: bytes, lengths: list[int] | None = None) -> bytes:
    return struct.pack("<I", (lengths or [len(blocks[0])])[0]) + b"".join(blocks)


def _lz4(data: bytes) -> bytes:
    return bytes(lz4.block.compress(data, store_size=False))


def _lz4frame(data: bytes) -> bytes:
    return bytes(lz4.frame.compress(data, store_size=True, content_checksum=True))


@dataclass(frozen=True)
class _Smash:
    """A compressor, and how it is refused: too short, too long, far too long, or not of one piece."""

    spec: str
    compress: Callable[[bytes], bytes]
    short: str
    long: str
    bomb: str
    torn: str


_SIZE, _END, _FAILED, _EXPECTED = "another size", "end where it should", "be decompressed", "were expected"
_SMASHES = (
    _Smash("zlib:1", zlib.compress, _EXPECTED, _EXPECTED, _END, _END),
    _Smash("lz4", _lz4, _EXPECTED, _FAILED, _FAILED, _FAILED),
    _Smash("lz4frame", _lz4frame, _SIZE, _SIZE, _SIZE, _END),
    _Smash("zstd:1", zstandard.ZstdCompressor().compress, _SIZE, _SIZE, _SIZE, _FAILED),
)


def _bombs() -> Iterator[tuple[str, Lie]]:
    for by in _SMASHES:
        name, spec, smash = by.spec, by.spec, by.compress
        right = smash(bytes(VECTOR))
        yield f"{name}: one byte fewer", _vector(spec, _table(smash(bytes(VECTOR - 1))), by.short)
        yield f"{name}: one byte more", _vector(spec, _table(smash(bytes(VECTOR + 1))), by.long)
        yield f"{name}: 32 MiB of zeros", _vector(spec, _table(smash(bytes(32 * MIB))), by.bomb)
        yield f"{name}: two members", _vector(spec, _table(right + right), by.torn)
        yield f"{name}: a thousand empty members", _vector(spec, _table(right + smash(b"") * 1000), by.torn)
        yield f"{name}: trailing bytes", _vector(spec, _table(right + b"more"), by.torn)
        yield f"{name}: cut short", _vector(spec, _table(right[:-1]), by.torn)
        yield f"{name}: bytes after the last block", _vector(spec, _table(right) + b"x", "the table says")
        lie = _table(right, lengths=[2**31 - 1])
        yield f"{name}: a block of 2^31 - 1 bytes", _vector(spec, lie, "the table says")
        stored = _table(bytes(9), lengths=[9 | 1 << 31])
        yield f"{name}: stored, and too short", _vector(spec, stored, "were expected")


def _zstd_header(content_bytes: int) -> bytes:
    """A frame that says how much it will become, and holds nothing of it."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", content_bytes) + b"\x01\x00\x00"


VECTORS: dict[str, Lie] = {
    **dict(_bombs()),
    "zstd: a header that says 2^60": _vector("zstd:1", _table(_zstd_header(2**60)), "another size"),
    "zstd: a header that says what is expected": _vector(
        "zstd:1", _table(_zstd_header(VECTOR)), "decompressed"
    ),
    "no table": _vector("zstd:1", b"\x00", "too few for a table"),
    "none, one byte short": _vector("none", bytes(VECTOR - 1), "were expected"),
    "none, one byte long": _vector("none", bytes(VECTOR + 1), "were expected"),
    "int8, as long as float32": _vector("int8", bytes(VECTOR), "were expected"),
    "bf16, as long as float32": _vector("bf16", bytes(VECTOR), "were expected"),
}

# --- files ----------------------------------------------------------------------------------------


def _learner(name: str, data: bytes, reason: str) -> Lie:
    def tell() -> None:
        restore(files.a_learner(), files.honest_files() | {name: data})

    # What a learner and its checkpoint take themselves is far below this.
    return Lie(tell, reason, len(data) * 3 + MIB)


def _entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def _weights(header: Any, data: bytes = bytes(4), reason: str = "cannot be used") -> Lie:
    return _learner("model.safetensors", files.safetensors(header, data), reason)


def _facts(text: bytes, reason: str = "cannot be used") -> Lie:
    return _learner("learner.json", text, reason)


FILES: dict[str, Lie] = {
    "a header of 2^63 bytes": _learner(
        "model.safetensors", struct.pack("<Q", 2**63) + b"{}", "cannot be used"
    ),
    "a header of 2^32 - 1 bytes": _learner(
        "model.safetensors", struct.pack("<Q", 2**32 - 1) + b"{}", "cannot"
    ),
    "a header of 0 bytes": _learner("model.safetensors", struct.pack("<Q", 0), "cannot be used"),
    "a header one byte too long": _learner(
        "model.safetensors", struct.pack("<Q", 3) + b"{}", "cannot be used"
    ),
    "the same tensor two thousand times": _weights(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2000 + b'"b":1}'
    ),
    "an unknown kind of number": _weights({"weight": _entry("X32")}),
    "a side below zero": _weights({"weight": _entry(shape=(-1,))}),
    "sides whose product overflows": _weights({"weight": _entry(shape=(2**32, 2**32))}),
    "a tensor before the beginning": _weights({"weight": _entry(offsets=(-4, 0))}),
    "a tensor that ends before it begins": _weights({"weight": _entry(offsets=(4, 0))}),
    "two tensors on one place": _weights({"weight": _entry(), "bias": _entry()}),
    "a hole between tensors": _weights({"weight": _entry(), "bias": _entry(offsets=(8, 12))}, bytes(12)),
    "a tensor missing": _weights({"weight": _entry()}),
    "a tensor of another name": _weights({"weights": _entry()}),
    "a number that is none": _facts(b'{"version":NaN}'),
    "an endless number": _facts(b'{"version":Infinity}'),
    "a number beyond doubles": _facts(b'{"version":1e999}'),
    "a number of 10^5 digits": _facts(b'{"version":' + b"9" * 100_000 + b"}"),
    "nesting of 10^5": _facts(b"[" * 100_000),
    "half a character": _facts(b'{"optimizer":"\\ud800"}'),
    "text that is not UTF-8": _facts(b'{"optimizer":"\xff"}'),
    "a key said twice": _facts(b'{"version":1,"version":"x"}'),
    "64 KiB and one byte of blanks": _facts(b" " * (64 * KIB + 1)),
    "another version of the facts": _facts(json.dumps({"version": -1}).encode()),
}

LIES: dict[str, Lie] = {**STRANGERS, **NODES, **BATCHES, **CANARIES, **VECTORS, **FILES}


# --- numbers --------------------------------------------------------------------------------------

_NAN, _INFINITE = float("nan"), float("inf")


def _spoiled(spec: str, value: float) -> bytes:
    """An honest vector of one parameter with one number that is none, as it travels."""
    raw = torch.zeros(VECTOR, dtype=torch.uint8)
    raw.view(torch.float32)[777] = value
    return b"".join(parse(spec).encode(raw, _BLUEPRINT.moving_groups))


def check_number(spec: str, value: float) -> None:
    """What is not finite stays so however it is encoded, so that whoever looks sees it."""
    raw = torch.zeros(VECTOR, dtype=torch.uint8)
    body = bytearray(_spoiled(spec, value))
    parse(spec).decode(body, raw, _BLUEPRINT.moving_groups)
    require(not bool(raw.view(torch.float32).isfinite().all()), f"{value} vanished in {spec}")


NUMBERS = [(spec, value) for spec in decoders.SPECS for value in (_NAN, _INFINITE, -_INFINITE)]
