"""What the tests of the protocol share: one message of every kind, and ways to cut a stream to pieces."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import pairwise

from w5xde.message_types import Bytes, Call, DictOf, ListOf, MappingOf, RecordOf, TensorAt, TupleOf, Value
from w5xde.messages import (
    Answer,
    Batch,
    Beat,
    Bye,
    Canary,
    Cancel,
    Difference,
    Entry,
    Fill,
    Hello,
    Layout,
    Leave,
    Loan,
    Message,
    Offer,
    Params,
    Ready,
    Refuse,
    Rejected,
    Rules,
    SampleList,
    StepRates,
    Update,
    Welcome,
    Work,
)
from w5xde.protocol.wire import Decoder, Limits, encode

ROOMY = Limits(meta_bytes_max=64 * 1024, body_bytes_max=1024 * 1024)

_LIST = SampleList(bytes(range(128)), b"\x05", bytes(16))
_ITEM = DictOf(
    ["x", 7, None, "row"],
    [
        TensorAt("float32", (2, 3), 0),
        ListOf([Value("pear"), Value(None), Bytes(b"\x00\xff")]),
        TupleOf([Value(True), RecordOf(":Pair", ["left"], [Value(-1)])]),
        MappingOf("orchard:Row", ["x"], [Value(2.5)]),
    ],
)

# One of every kind, with every field that has no default and a few that have.
WORDS: dict[type, Message] = {
    type(word): word
    for word in (
        Hello(protocol=1, package="0.1.0", name="apple", device="cpu", torch="2.6"),
        Welcome(
            run="orchard",
            incarnation=1,
            name="apple",
            layout=Layout([Entry("weight", "float32", (2,), "trained")]),
            rules=Rules(
                mode="sync",
                seed=7,
                precision="fp32",
                threads=1,
                data="local",
                steps=90,
                weight_unit=0.5,
                metrics=["accuracy", "loss"],
                validation_samples=70,
                validation_digest="cd" * 32,
            ),
            canary=Canary([Fill(0.0, 0.5, -1.0, 1.0), None], _ITEM),
        ),
        Offer(
            "train.py:small", {"train.py": 3, "lib/a.py": 4}, "ab" * 32, {"yaml": "PyYAML"}, {"PyYAML": "6.0"}
        ),
        Ready(
            layout_digest="ab" * 32, seconds=0.5, cache=b"orchard", cache_slots=9, versions={"torch": "2.6"}
        ),
        Refuse("W5-107", "this node speaks protocol 2", fix="install the same w5xde on both machines"),
        Params(version=3, whole=True),
        Difference(1, 3, "q4 | zstd:1", bytes(16), adds=False),
        Work(
            3,
            [
                Loan(11, 0, 0, 1, 4, 128, [Batch(0, 32, 0, _ITEM, _LIST)], step=3),
                Loan(12, 0, 2, 3, 4, 99, [Batch(2, 32, 0, _ITEM)], step=3, validates=True),
            ],
            rates=StepRates(3, [[0.1], [0.2]], sums_before=[0.5]),
            counted=5,
            call=Call("d", b"\x05", b"\x80", seeds_numpy=True),
        ),
        Update(
            3,
            [
                Answer(11, loss_sum=2.5, absent=[1]),
                Answer(12, dropped=True, missing=b"\x03"),
                Answer(13, metrics=[[0.5, 1.5]]),
            ],
            0.25,
            weights=[2.0, 0.0, 0.0],
        ),
        Cancel([12, 13]),
        Rejected(11, "computed on version 3, now 90"),
        Beat(),
        Leave("the machine is needed"),
        Bye("interrupted", finished=True, stopped=True, counted=5),
    )
}


def head(
    meta_bytes: int, body_bytes: int = 0, *, magic: bytes = b"W5", version: int = 1, flags: int = 0
) -> bytes:
    """A frame's first sixteen bytes, written down again so that the tests do not trust the code."""
    return struct.pack("<2sBBIQ", magic, version, flags, meta_bytes, body_bytes)


def around(meta: bytes) -> bytes:
    """A frame with a correct header and any content."""
    return head(len(meta)) + meta


def written(frames: Iterable[tuple[Message, bytes]]) -> bytes:
    """Frames as they travel."""
    return b"".join(encode(message, len(body)) + body for message, body in frames)


def feed(decoder: Decoder, data: bytes) -> list[tuple[Message, bytes]]:
    """Hand bytes to a decoder as a socket would: never more than it has room for."""
    frames = []
    at = 0
    while at < len(data):
        buffer = decoder.get_buffer()
        count = min(len(buffer), len(data) - at)
        buffer[:count] = data[at : at + count]
        at += count
        frames += [(message, bytes(body)) for message, body in decoder.buffer_updated(count)]
    return frames


def feed_cut(decoder: Decoder, data: bytes, cuts: Iterable[int]) -> list[tuple[Message, bytes]]:
    """The same, in pieces that end at the cuts."""
    places = [0, *sorted(cuts), len(data)]
    return [frame for start, stop in pairwise(places) for frame in feed(decoder, data[start:stop])]
