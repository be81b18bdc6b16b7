"""What comes in: honest bytes and what accidents or malice make of them, as strategies of hypothesis."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from tests.protocol.streams import WORDS
from w5xde.protocol.wire import encode

# Places count modulo the length of what is changed, so that they shrink well and fit everything.
_PLACES = st.integers(0, 2**16)
# Lengths, tags and ends of ranges, as they are found in headers.
_TELLING = [
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xc1",
    b"\n",
    b"\x00" * 8,
    b"\xff" * 4,
    b"\xff" * 8,
    b"\xff\xff\xff\x7f",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"W5\x01\x00",
    b"\\ud800",
    b"1e999",
    b"NaN",
    b'"',
]
_PIECES = st.sampled_from(_TELLING) | st.binary(max_size=8)
_EDITS = st.lists(
    st.tuples(st.sampled_from(["set", "put", "cut", "twice", "move", "end"]), _PLACES, _PLACES, _PIECES),
    min_size=1,
    max_size=3,
)
Edits = list[tuple[str, int, int, bytes]]


def edited(data: bytes, edits: Edits) -> bytes:
    """The bytes after a few accidents: changed, added, lost, repeated, from elsewhere, cut off."""
    found = bytearray(data)
    for kind, first, second, piece in edits:
        at = first % (len(found) + 1)
        size = second % 40
        match kind:
            case "set":
                found[at : at + len(piece)] = piece
            case "put":
                found[at:at] = piece
            case "cut":
                del found[at : at + size]
            case "twice":
                found[at:at] = found[at : at + size]
            case "move":
                other = second % (len(found) + 1)
                found[at : at + 8] = found[other : other + 8]
            case _:
                del found[at:]
    return bytes(found)


edits = _EDITS
cuts = st.lists(_PLACES, max_size=4)

# --- values ---------------------------------------------------------------------------------------

_ODD = ["", "\x00", "\x1b[2J", "../x", "none", "zstd:1", "float32", "quint8", "trained", "dict", "tensor"]
_NUMBERS = [0, -1, 1, 255, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1]
scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from(_NUMBERS)
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from(_ODD)
    | st.text(max_size=6)
)
anything = st.recursive(
    scalars | st.binary(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=4,
)
# What JSON can hold; it has no bytes, and only strings for keys.
json_anything = st.recursive(
    scalars.filter(lambda value: not isinstance(value, float) or value == value),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["int", "float", "tuple", "dict"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)
changes = st.lists(st.tuples(st.lists(_PLACES, min_size=1, max_size=6), anything), min_size=1, max_size=3)
json_changes = st.lists(
    st.tuples(st.lists(_PLACES, min_size=1, max_size=8), json_anything), min_size=1, max_size=3
)

# For a ledger: an audit counts as far as a record says, so numbers stay small (see `any_value_in_a_ledger`).
_few = st.none() | st.booleans() | st.integers(-3, 300) | st.sampled_from(_ODD) | st.text(max_size=4)
ledger_changes = st.lists(
    st.tuples(st.lists(_PLACES, min_size=1, max_size=6), _few | st.lists(_few, max_size=3)),
    min_size=1,
    max_size=3,
)


def changed(value: Any, path: list[int], to: Any) -> Any:
    """The value with another one at some place inside; it is named by numbers, modulo what there is."""
    if not path or not isinstance(value, (list, dict)) or not value:
        return to
    first, rest = path[0], path[1:]
    if isinstance(value, list):
        at = first % len(value)
        return [changed(each, rest, to) if i == at else each for i, each in enumerate(value)]
    key = list(value)[first % len(value)]
    return value | {key: changed(value[key], rest, to)}


# --- words ----------------------------------------------------------------------------------------

bodies = st.sampled_from([b"", b"\x00", b"W5\x01\x00" * 5, bytes(range(200))]) | st.binary(max_size=30)
frames = st.lists(st.tuples(st.sampled_from([*WORDS.values()]), bodies), min_size=1, max_size=4)
words = st.sampled_from([msgspec.to_builtins(word) for word in WORDS.values()])
metas = st.sampled_from([encode(word)[16:] for word in WORDS.values()])
