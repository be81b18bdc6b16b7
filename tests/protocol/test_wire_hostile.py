"""Whatever a stranger sends gives frames or RemoteProtocolError, and nothing is believed after an error."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.streams import ROOMY, WORDS, around, feed, feed_cut, head, written
from w5xde.errors import RemoteProtocolError
from w5xde.message_types import PROBE_BYTES_MAX
from w5xde.messages import Beat, Params, Update
from w5xde.protocol.wire import GREETING_LIMITS, HEADER_BYTES, Decoder, Limits, encode

HELLO = {"type": "hello", "protocol": 1, "package": "0.1.0", "name": "apple"}
WORK_HEAD = {"type": "work", "version": 1}


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def nested(depth: int) -> bytes:
    """A batch of lists in lists: ["l", [["l", [ … ]]]]."""
    innermost = packed(["v", 1])
    item = b"\x92\xa1l\x91" * depth + innermost
    return (
        packed(WORK_HEAD)[:1].replace(b"\x82", b"\x83")
        + (
            packed(WORK_HEAD)[1:]
            + packed("loans")
            + b"\x91\x97"
            + bytes([11, 0, 0, 1, 4, 32])
            + b"\x91\x94\x00\x20\x00"
        )
        + item
    )


NONSENSE: dict[str, bytes] = {
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "a TLS greeting": bytes.fromhex("16030100f8010000f40303") + bytes(32),
    "an SSH greeting": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "another magic": head(1, magic=b"w5") + b"\x80",
    "an older version": head(1, version=0) + b"\x80",
    "a newer version": head(1, version=2) + b"\x80",
    "an unknown flag": head(1, flags=2) + b"\x80",
    "a body in memory that is not shared": head(1, 1, flags=1) + b"\x80" + bytes(8),
    "every flag": head(1, flags=255) + b"\x80",
    "a message that is too long": head(ROOMY.meta_bytes_max + 1),
    "a body that is too long": head(1, ROOMY.body_bytes_max + 1),
    "no message at all": head(0),
    "a byte that MessagePack never uses": around(b"\xc1"),
    "half a message": around(encode(WORDS[Update])[HEADER_BYTES:-3]),
    "a message and a little more": around(encode(WORDS[Beat])[HEADER_BYTES:] + b"\x00"),
    "nothing": around(packed(None)),
    "a number": around(packed(5)),
    "a list": around(packed(["hello", 1, "0.1.0", "apple"])),
    "a map without a tag": around(packed({"protocol": 1})),
    "an unknown tag": around(packed({"type": "run", "command": "rm"})),
    "a tag that is no string": around(packed({"type": 3})),
    "a key that is no string": around(packed({"type": "beat", 3: 4})),
    "an unknown field": around(packed(HELLO | {"shell": "sh"})),
    "a missing field": around(packed({"type": "hello", "protocol": 1})),
    "a field of another type": around(packed(HELLO | {"protocol": "1"})),
    "a whole number that is not": around(packed(HELLO | {"protocol": 1.5})),
    "a negative version": around(packed({"type": "params", "version": -1, "whole": True})),
    "a version beyond counting": around(packed({"type": "params", "version": 2**62, "whole": True})),
    "a name that is markup": around(packed(HELLO | {"name": "[red]apple"})),
    "a name that is a path": around(packed(HELLO | {"name": "../apple"})),
    "a name that is too long": around(packed(HELLO | {"name": "a" * 65})),
    "an empty name": around(packed(HELLO | {"name": ""})),
    "a name with a new line": around(packed(HELLO | {"name": "apple\n"})),
    "a label that is too long": around(packed(HELLO | {"device": "c" * 201})),
    "a probe that is too large": around(packed(HELLO | {"probe": PROBE_BYTES_MAX + 1})),
    "a text that is too long": around(packed({"type": "leave", "reason": "r" * 4097})),
    "text that is not UTF-8": around(packed(HELLO).replace(b"apple", b"app\xffe")),
    "a field's name that is not UTF-8": around(packed(HELLO).replace(b"package", b"pack\xffge")),
    "a tag that is not UTF-8": around(packed(HELLO).replace(b"hello", b"hel\xffo")),
    "an extension type": around(b"\x81\xa4type\xd4\x05\x00"),
    "nesting without end": around(b"\x91" * 50_000),
    "nesting without end in a batch": around(nested(12_000)),
    "a string longer than its frame": around(b"\xdb\xff\xff\xff\xff" + b"abc"),
    "an array longer than its frame": around(b"\xdd\xff\xff\xff\xff" + b"abc"),
    "a map longer than its frame": around(b"\xdf\xff\xff\xff\xff" + b"abc"),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_the_peers_error_however_it_arrives(nonsense):
    with pytest.raises(RemoteProtocolError):
        feed(Decoder(ROOMY), nonsense)
    with pytest.raises(RemoteProtocolError):
        feed_cut(Decoder(ROOMY), nonsense, range(1, min(len(nonsense), 3000)))


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
def test_nothing_is_accepted_after_an_error(nonsense):
    decoder = Decoder(ROOMY)
    with pytest.raises(RemoteProtocolError):
        feed(decoder, nonsense)
    with pytest.raises(RemoteProtocolError):
        feed(decoder, written([(WORDS[Beat], b"")]))
    with pytest.raises(RemoteProtocolError):
        feed(decoder, nonsense)


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
def test_an_error_is_one_line_with_a_code(nonsense):
    with pytest.raises(RemoteProtocolError) as caught:
        feed(Decoder(ROOMY), nonsense)
    line, more = caught.value.lines()
    assert line.startswith("error[W5-1")
    assert more == f"  more: w5xde explain {caught.value.code}"
    assert "\n" not in line
    assert len(line) < 500


def test_frames_of_another_version_are_told_by_number():
    with pytest.raises(RemoteProtocolError, match="version 2, flags 0; we read version 1") as caught:
        feed(Decoder(ROOMY), NONSENSE["a newer version"])
    assert caught.value.code == "W5-107"


def test_nonsense_and_too_much_are_told_apart():
    with pytest.raises(RemoteProtocolError, match="makes no sense") as nonsense:
        feed(Decoder(ROOMY), NONSENSE["an unknown tag"])
    with pytest.raises(RemoteProtocolError, match="are accepted now") as too_much:
        feed(Decoder(GREETING_LIMITS), head(10**6))
    assert (nonsense.value.code, too_much.value.code) == ("W5-120", "W5-121")


def test_a_batch_nested_as_deep_as_anybody_needs_is_read():
    [(work, _)] = feed(Decoder(ROOMY), around(nested(40)))
    item = work.loans[0].batches[0].item
    for _ in range(40):
        [item] = item.items
    assert item.value == 1


def test_less_than_a_header_is_waited_for():
    assert feed(Decoder(ROOMY), b"W5\x01") == []
    assert feed(Decoder(ROOMY), head(5, 0)[:-1]) == []


# --- chance ---------------------------------------------------------------------------------------

VALID = written([*((word, b"") for word in WORDS.values()), (WORDS[Params], bytes(range(200)))])


def decoded_or_refused(data: bytes, chance: random.Random, limits=ROOMY) -> bool:
    """Feed in random pieces; anything but frames or RemoteProtocolError escapes and fails the test."""
    decoder = Decoder(limits)
    try:
        feed_cut(decoder, data, [chance.randrange(len(data) + 1) for _ in range(chance.randrange(4))])
    except RemoteProtocolError:
        return False
    return True


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One to three small accidents: bytes changed, lost, repeated or from elsewhere."""
    buffer = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(buffer))
        size = chance.choice((1, 1, 1, 2, 4, 30))
        match chance.randrange(5):
            case 0:
                buffer[at] ^= 1 << chance.randrange(8)
            case 1:
                buffer[at : at + size] = chance.randbytes(size)
            case 2 if len(buffer) > size:
                del buffer[at : at + size]
            case 3:
                buffer[at:at] = buffer[at : at + size]
            case _:
                other = chance.randrange(len(buffer))
                buffer[at : at + size] = buffer[other : other + size]
    return bytes(buffer)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=2000, deadline=None, derandomize=True, database=None)
def test_a_damaged_stream_gives_frames_or_the_peers_error(seed):
    chance = random.Random(seed)
    decoded_or_refused(mutated(VALID, chance), chance)


@given(seed=st.integers(0, 2**32), kind=st.sampled_from([*WORDS]))
@settings(max_examples=2000, deadline=None, derandomize=True, database=None)
def test_a_damaged_message_in_a_sound_frame_gives_a_frame_or_the_peers_error(seed, kind):
    chance = random.Random(seed)
    meta = mutated(encode(WORDS[kind])[HEADER_BYTES:], chance)
    decoded_or_refused(around(meta), chance)


@given(data=st.binary(max_size=5000), seed=st.integers(0, 2**32))
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
def test_any_bytes_give_frames_or_the_peers_error(data, seed):
    decoded_or_refused(data, random.Random(seed), GREETING_LIMITS)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=6,
)
_FIELDS = st.sampled_from([encode(word)[HEADER_BYTES:] for word in WORDS.values()]).map(
    msgspec.msgpack.decode
)


@given(word=_FIELDS, values=st.lists(_ANYTHING, min_size=1, max_size=3), seed=st.integers(0, 2**32))
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_any_value_in_any_field_gives_a_frame_or_the_peers_error(word, values, seed):
    chance = random.Random(seed)
    for value in values:
        field = chance.choice([key for key in word if key != "type"] or ["type"])
        word[field] = value
    decoded_or_refused(around(packed(word)), chance)


def test_the_accidents_are_neither_all_harmless_nor_all_fatal():
    survived = 0
    for seed in range(100):
        for word in WORDS.values():
            chance = random.Random(seed)
            survived += decoded_or_refused(around(mutated(encode(word)[HEADER_BYTES:], chance)), chance)
    assert 20 < survived < 100 * len(WORDS) / 2


# --- values are counted before they are made ------------------------------------------------------

NUMBERS = [0, 127, 128, 255, 256, 70_000, 2**33, 2**63, -1, -33, -200, -70_000, -(2**40), 0.5, None, True]
LENGTHS = [0, 3, 15, 16, 31, 32, 255, 256, 70_000]


def some_value(rng: random.Random, depth: int) -> Any:
    match rng.randrange(5 if depth else 3):
        case 0:
            return rng.choice(NUMBERS)
        case 1:
            return "x" * rng.choice(LENGTHS)
        case 2:
            return b"y" * rng.choice(LENGTHS)
        case 3:
            return [some_value(rng, depth - 1) for _ in range(rng.choice(LENGTHS[:6]))]
        case _:
            return {str(key): some_value(rng, depth - 1) for key in range(rng.choice(LENGTHS[:5]))}


def values_in(value: Any) -> int:
    match value:
        case dict():
            return 1 + sum(1 + values_in(each) for each in value.values())
        case list():
            return 1 + sum(map(values_in, value))
    return 1


@pytest.mark.parametrize("seed", range(20))
def test_a_message_of_more_values_than_may_be_is_refused_before_it_is_decoded(seed: int) -> None:
    rng = random.Random(seed)
    said = [
        some_value(rng, 2),
        [0] * rng.choice(LENGTHS),
        {str(key): 1 for key in range(rng.choice(LENGTHS))},
    ]
    meta, count = msgspec.msgpack.encode(said), values_in(said)
    for values_max, code in ((count, "W5-120"), (count - 1, "W5-121")):
        limits = Limits(len(meta), 0, "welcome", values_max)
        with pytest.raises(RemoteProtocolError) as refused:
            feed(Decoder(limits), around(meta))
        assert refused.value.code == code
