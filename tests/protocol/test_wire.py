"""Frames come out as they went in, however the network cuts them."""

from __future__ import annotations

import re
import tracemalloc
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.streams import ROOMY, WORDS, feed, feed_cut, head, written
from w5xde.errors import LocalProtocolError, RemoteProtocolError
from w5xde.message_types import Value
from w5xde.messages import Answer, Beat, Hello, Message, Params, Update, Work
from w5xde.protocol.wire import GREETING_LIMITS, HEADER_BYTES, SCRATCH_BYTES, Decoder, Limits, encode

BODY = bytes(range(256)) * 800  # 204,800 bytes: more than three times what the scratch holds

SMALL: list[tuple[Message, bytes]] = [
    *((word, b"") for word in WORDS.values()),
    (WORDS[Params], b"0123456789"),
    (WORDS[Update], bytes(64)),
]
LARGE: list[tuple[Message, bytes]] = [
    (WORDS[Beat], b""),
    (WORDS[Params], BODY),
    (WORDS[Beat], b""),
    (WORDS[Work], b"x"),
    (WORDS[Update], BODY[::-1]),
    (WORDS[Params], b""),
]
# So tight that the scratch is smaller than most frames of SMALL together, and some bodies do not fit in it.
TIGHT = Limits(
    meta_bytes_max=max(len(encode(word)) for word in WORDS.values()) - HEADER_BYTES, body_bytes_max=64
)


def ends(frames: list[tuple[Message, bytes]]) -> list[int]:
    """Where each header, message and body ends in the stream."""
    sizes = [size for m, body in frames for size in (HEADER_BYTES, len(encode(m)) - HEADER_BYTES, len(body))]
    return list(accumulate(sizes))


# --- cut anywhere ---------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [SMALL, LARGE], ids=["small", "large"])
def test_a_stream_that_comes_at_once_gives_its_frames(frames):
    assert feed(Decoder(ROOMY), written(frames)) == frames


@pytest.mark.parametrize("limits", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_a_stream_that_comes_byte_by_byte_gives_the_same(limits):
    data = written(SMALL)
    assert feed_cut(Decoder(limits), data, range(1, len(data))) == SMALL


def test_large_bodies_that_come_byte_by_byte_give_the_same():
    data = written(LARGE)
    assert feed_cut(Decoder(ROOMY), data, range(1, len(data))) == LARGE


@pytest.mark.parametrize("limits", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_a_stream_cut_in_two_anywhere_gives_the_same(limits):
    data = written(SMALL)
    for cut in range(1, len(data)):
        assert feed_cut(Decoder(limits), data, [cut]) == SMALL, f"cut at {cut}"


def test_a_stream_with_large_bodies_cut_in_two_gives_the_same():
    data = written(LARGE)
    near = {place + d for place in [*ends(LARGE), SCRATCH_BYTES, 2 * SCRATCH_BYTES] for d in range(-20, 21)}
    # Every place that means something, and inside the bodies one in every 499 bytes.
    for cut in sorted(near | set(range(1, len(data), 499))):
        if 0 < cut < len(data):
            assert feed_cut(Decoder(ROOMY), data, [cut]) == LARGE, f"cut at {cut}"


@given(cuts=st.sets(st.integers(1, len(written(SMALL)) - 1)))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_a_stream_cut_many_times_gives_the_same(cuts):
    assert feed_cut(Decoder(TIGHT), written(SMALL), cuts) == SMALL


@given(
    picks=st.lists(
        st.tuples(st.sampled_from([*WORDS.values()]), st.sampled_from([0, 1, 100, 4096, 204_800]))
    ),
    shares=st.lists(st.floats(0, 1), max_size=30),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_any_frames_cut_anywhere_give_the_same(picks, shares):
    frames = [(message, BODY[:size]) for message, size in picks]
    data = written(frames)
    assert feed_cut(Decoder(ROOMY), data, [int(share * len(data)) for share in shares]) == frames


# --- where bytes go -------------------------------------------------------------------------------


def test_a_large_body_is_received_in_place():
    allocated = []

    def place(message, size):
        allocated.append(bytearray(size))
        return allocated[-1]

    decoder = Decoder(ROOMY, place)
    assert feed(decoder, encode(WORDS[Params], len(BODY))) == []
    room = decoder.get_buffer()
    assert room.obj is allocated[0]
    assert len(room) == len(BODY)
    room[:] = BODY
    [frame] = decoder.buffer_updated(len(BODY))
    assert frame.body is allocated[0]
    assert frame.body == BODY
    assert len(allocated) == 1


def test_the_beginning_of_a_body_that_came_with_its_message_is_kept():
    decoder = Decoder(ROOMY)
    assert feed(decoder, encode(WORDS[Params], len(BODY)) + BODY[:1000]) == []
    assert len(decoder.get_buffer()) == len(BODY) - 1000
    assert feed(decoder, BODY[1000:]) == [(WORDS[Params], BODY)]


class Counted:
    """A body that is used up in pieces of a few bytes."""

    def __init__(self, piece):
        self.body = bytearray()
        self.heard = b""
        self._piece = bytearray(piece)

    def get_buffer(self):
        return memoryview(self._piece)

    def buffer_updated(self, count):
        self.heard += bytes(self._piece[:count])


@pytest.mark.parametrize("piece", [1, 7, 100_000, 10_000_000])
@pytest.mark.parametrize("first", [0, 1, 1000])
def test_a_body_may_be_used_while_it_arrives(piece, first):
    stream = Counted(piece)
    decoder = Decoder(ROOMY, lambda message, size: stream)
    data = encode(WORDS[Params], 3000) + BODY[:3000] + encode(Beat())
    frames = feed(decoder, data[: len(data) - 3000 - len(encode(Beat())) + first])
    frames += feed(decoder, data[len(data) - 3000 - len(encode(Beat())) + first :])
    assert frames == [(WORDS[Params], b""), (Beat(), b"")]
    assert stream.heard == BODY[:3000]


def test_the_room_offered_ends_with_the_body_so_that_the_next_frame_is_read_as_one():
    decoder = Decoder(ROOMY)
    feed(decoder, encode(WORDS[Params], len(BODY)) + BODY[:-3])
    assert len(decoder.get_buffer()) == 3


def test_there_is_always_room_for_more():
    decoder = Decoder(TIGHT)
    for byte in written(SMALL):
        buffer = decoder.get_buffer()
        assert len(buffer) > 0
        buffer[0] = byte
        decoder.buffer_updated(1)


def test_bodies_do_not_share_memory_with_each_other_or_with_what_comes_next():
    decoder = Decoder(ROOMY)
    data = written([(WORDS[Params], b"first"), (WORDS[Params], b"again")])
    buffer = decoder.get_buffer()
    buffer[: len(data)] = data
    one, two = decoder.buffer_updated(len(data))
    one.body[:] = b"spoil"
    feed(decoder, data)
    assert (one.body, two.body) == (b"spoil", b"again")


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [head(10, 2**40), head(2**32 - 1, 0), head(2**32 - 1, 2**64 - 1)], ids=["body", "meta", "both"]
)
def test_what_is_too_large_is_refused_before_anything_is_allocated(header):
    decoder = Decoder(ROOMY)
    feed(decoder, header[:-1])
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="at most"):
            feed(decoder, header[-1:])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * 1024


def test_a_body_is_allocated_only_when_its_message_made_sense():
    refused: list[int] = []

    def place(message, size):
        refused.append(size)
        return bytearray(size)

    with pytest.raises(RemoteProtocolError):
        feed(Decoder(ROOMY, place), head(1, 1024 * 1024) + b"\xc1")
    assert refused == []


def test_frames_as_large_as_the_limits_are_accepted_and_one_byte_more_is_not():
    message = WORDS[Update]
    meta_bytes = len(encode(message)) - HEADER_BYTES
    exact = Limits(meta_bytes, 100)
    assert feed(Decoder(exact), written([(message, bytes(100))])) == [(message, bytes(100))]
    with pytest.raises(RemoteProtocolError, match="at most"):
        feed(Decoder(exact), written([(message, bytes(101))]))
    with pytest.raises(RemoteProtocolError, match="at most"):
        feed(Decoder(Limits(meta_bytes - 1, 100)), written([(message, b"")]))


def test_a_stranger_may_say_hello_and_no_more():
    hello = WORDS[Hello]
    assert feed(Decoder(GREETING_LIMITS), encode(hello)) == [(hello, b"")]
    with pytest.raises(RemoteProtocolError, match="at most"):
        feed(Decoder(GREETING_LIMITS), encode(hello, 1))
    assert len(Decoder(GREETING_LIMITS).get_buffer()) == 4096


def test_limits_raised_after_the_greeting_hold_for_the_next_frame():
    decoder = Decoder(GREETING_LIMITS)
    feed(decoder, encode(WORDS[Hello]))
    decoder.limits = ROOMY
    frames = [(Update(1, [Answer(i, failure="x" * 90) for i in range(500)]), BODY)]
    assert len(encode(frames[0][0])) > SCRATCH_BYTES / 2
    assert feed(decoder, written(frames)) == frames


# --- our own mistakes -----------------------------------------------------------------------------


SHARED = bytes(range(256)) * 16


def shared_body(place: int, count: int) -> memoryview:
    """What a connection's shared memory gives; nothing lies beyond its end."""
    if place + count > len(SHARED):
        raise RemoteProtocolError("nothing lies there", code="W5-120")
    return memoryview(SHARED)[place : place + count]


@given(
    places=st.lists(
        st.tuples(st.integers(0, 2**64 - 1) | st.integers(0, 4096), st.integers(0, 4096)), max_size=5
    ),
    cuts=st.lists(st.integers(0, 200), max_size=20),
)
def test_bodies_in_shared_memory_come_as_they_lie_there_or_break_the_protocol(places, cuts):
    message = WORDS[Update]
    stream = b"".join(encode(message, count, place) + encode(WORDS[Beat]) for place, count in places)
    decoder = Decoder(ROOMY)
    decoder.shared = shared_body
    is_good = all(place + count <= len(SHARED) for place, count in places)
    try:
        found = feed_cut(decoder, stream, [min(cut, len(stream)) for cut in cuts])
    except RemoteProtocolError:
        assert not is_good
        return
    assert is_good
    bodies = [SHARED[place : place + count] for place, count in places]
    assert found == [frame for body in bodies for frame in ((message, body), (WORDS[Beat], b""))]


def test_a_body_in_shared_memory_is_as_long_as_the_limits_allow_and_no_longer():
    decoder = Decoder(Limits(1000, 10))
    decoder.shared = shared_body
    feed(decoder, encode(Beat(), 10, 0))
    with pytest.raises(RemoteProtocolError, match="a frame of"):
        feed(decoder, encode(Beat(), 11, 0))


def test_what_cannot_be_encoded_is_our_own_error():
    with pytest.raises(LocalProtocolError, match="cannot encode Value"):
        encode(Value(2**70))  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="cannot encode Value"):
        encode(Value(object()))  # type: ignore[arg-type]


# --- the example in the documentation -------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def example(name: str) -> bytes:
    """The bytes of the block that begins with ```hex and the name; what follows a bar is prose."""
    found = re.search(rf"```hex {name}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"docs/protocol.md has no example {name!r}"
    return bytes.fromhex("".join(line.split("|")[0] for line in found[1].splitlines()))


def test_the_documented_hello_is_what_we_write_and_read():
    hello = Hello(protocol=2, package="0.1.0", name="apple", device="cpu", torch="2.13.0")
    assert encode(hello).hex(" ") == example("hello").hex(" ")
    assert feed(Decoder(GREETING_LIMITS), example("hello")) == [(hello, b"")]


def test_the_documented_update_is_what_we_write_and_read():
    update = Update(version=3, answers=[Answer(lease=11, loss_sum=2.5, seconds=0.5)], waited_seconds=0.25)
    body = example("update")[-64:]
    assert written([(update, body)]).hex(" ") == example("update").hex(" ")
    assert feed(Decoder(ROOMY), example("update")) == [(update, body)]
