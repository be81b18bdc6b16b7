"""Lossless codecs restore every bit, lossy ones stay within their error, and all refuse garbage."""

from __future__ import annotations

import contextlib
import os
import struct
import tracemalloc
import zlib

import lz4.block
import lz4.frame
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from w5xde import compression
from w5xde.compression import is_lossy
from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs import blocks, pipeline
from w5xde.learn.codecs.compressors import BLOCK_BYTES, Zlib
from w5xde.learn.codecs.feedback import ErrorFeedback
from w5xde.learn.codecs.numbers import SCALED_VALUES, Run
from w5xde.learn.codecs.pipeline import parse, register
from w5xde.learn.model.layout import DTYPES, Blueprint, DtypeGroup
from w5xde.messages import TRAINED, Entry, Layout

COMPRESSORS = ["zlib:1", "zlib:6", "lz4", "lz4:8", "lz4frame", "zstd:1", "zstd:3", "zstd:-5"]
LOSSLESS = ["none", "shuffle", *COMPRESSORS, *(f"shuffle | {name}" for name in COMPRESSORS)]
COARSE = ["int8", "int8 | shuffle | zlib:1", "q4", "q4 | zstd:1", "q4 | shuffle | lz4"]
LOSSY = ["fp16", "bf16", "bf16 | zstd:1", "fp16 | shuffle | lz4", *COARSE]
MIB = 1 << 20


def laid_out(*sizes: tuple[str, int]) -> tuple[list[DtypeGroup], int]:
    """Groups as a model with such parameters has them, and the bytes of its vector."""
    entries = [Entry(f"p{i}", dtype, (count,), TRAINED) for i, (dtype, count) in enumerate(sizes)]
    blueprint = Blueprint(Layout(entries))
    return blueprint.groups, blueprint.moving_bytes


def random_bytes(count: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


def gaussian(*sizes: tuple[str, int], seed: int = 0) -> tuple[Tensor, list[DtypeGroup]]:
    groups, raw_bytes = laid_out(*sizes)
    raw = random_bytes(raw_bytes, seed)
    noise = torch.Generator().manual_seed(seed)
    for group in groups:
        if group.dtype.is_floating_point:
            group.values_in(raw).copy_(torch.randn(group.count, generator=noise, dtype=torch.float64))
    return raw, groups


def body_of(spec: str, raw: Tensor, groups: list[DtypeGroup]) -> bytearray:
    return bytearray().join(parse(spec).encode(raw, groups))


def there_and_back(spec: str, raw: Tensor, groups: list[DtypeGroup]) -> Tensor:
    body = body_of(spec, raw, groups)
    assert len(body) <= parse(spec).encoded_bytes_max(raw.numel(), groups)
    found = torch.zeros_like(raw)
    parse(spec).decode(body, found, groups)
    return found


def bits(raw: Tensor, groups: list[DtypeGroup]) -> list[bytes]:
    ends = [group.start + group.count * group.dtype.itemsize for group in groups]
    return [bytes(raw[group.start : end].numpy()) for group, end in zip(groups, ends, strict=True)]


def refused(spec: str, body: bytes | bytearray, raw_bytes: int, groups: list[DtypeGroup]) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        parse(spec).decode(bytearray(body), torch.zeros(raw_bytes, dtype=torch.uint8), groups)
    assert caught.value.code == "W5-122"
    return caught.value.what


# --- exact ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 700)), max_size=5),
    spec=st.sampled_from(LOSSLESS),
    is_plain=st.booleans(),
    seed=st.integers(0, 9),
)
def test_what_is_lossless_restores_every_byte_of_every_dtype(sizes, spec, is_plain, seed):
    groups, raw_bytes = laid_out(*sizes)
    raw = random_bytes(raw_bytes, seed)
    if is_plain:  # something that shrinks
        raw //= 64
    assert bits(there_and_back(spec, raw, groups), groups) == bits(raw, groups)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_survives_every_lossless_spec(dtype):
    groups, raw_bytes = laid_out((dtype, 37), ("float32", 5))
    raw = random_bytes(raw_bytes)
    for spec in LOSSLESS:
        assert bits(there_and_back(spec, raw, groups), groups) == bits(raw, groups), spec


@pytest.mark.parametrize("spec", [*LOSSLESS, *LOSSY])
def test_nothing_at_all_travels_too(spec):
    empty = torch.empty(0, dtype=torch.uint8)
    for groups in ([], laid_out(("float32", 0))[0], laid_out(("int64", 0), ("float64", 0))[0]):
        assert sum(map(len, parse(spec).encode(empty, groups))) == 0
        parse(spec).decode(bytearray(), empty, groups)
        refused(spec, b"x", 0, groups)


def test_none_is_a_view_and_copies_nothing():
    raw, groups = gaussian(("float32", 300))
    [piece] = parse("none").encode(raw, groups)
    raw[7] = 99
    assert piece[7] == 99


def test_a_read_only_body_is_as_good_as_any():
    raw, groups = gaussian(("float32", 300))
    for spec in [*LOSSLESS, *LOSSY]:
        found = torch.zeros_like(raw)
        parse(spec).decode(memoryview(bytes(body_of(spec, raw, groups))), found, groups)
        assert bytes(found.numpy()) == bytes(there_and_back(spec, raw, groups).numpy())


def test_a_body_may_begin_anywhere_in_memory():
    raw, groups = gaussian(("float32", 3000), ("float64", 700))
    for spec in [*LOSSLESS, *LOSSY]:
        body = bytearray(b"xyz") + body_of(spec, raw, groups)
        found = torch.zeros_like(raw)
        parse(spec).decode(memoryview(body)[3:], found, groups)
        assert bits(found, groups) == bits(there_and_back(spec, raw, groups), groups)


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [MIB // 4, MIB // 4 + 1, 3 * MIB // 4 - 16, 3 * MIB // 4 + 5])
@pytest.mark.parametrize("spec", ["lz4", "shuffle | zstd:1", "bf16 | shuffle | lz4", "zlib:1", "q4 | zstd:1"])
def test_many_blocks_on_all_cores_hold_the_same_as_one_after_the_other(spec, count, monkeypatch):
    raw, groups = gaussian(("int64", 9), ("float32", count), ("bool", 3), ("complex128", 4001))
    raw[MIB : MIB + 5000] = 0
    body = body_of(spec, raw, groups)
    found = there_and_back(spec, raw, groups)

    def one_after_the_other(work, blocks_count):
        for number in range(blocks_count):
            work(number)

    monkeypatch.setattr(blocks, "on_all_cores", one_after_the_other)
    assert body_of(spec, raw, groups) == body
    assert bits(there_and_back(spec, raw, groups), groups) == bits(found, groups)
    if not is_lossy(spec):
        assert bits(found, groups) == bits(raw, groups)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_noise_is_stored_and_grows_by_its_table_alone(name):
    raw = random_bytes(2 * MIB + 64)
    groups, _ = laid_out(("uint8", raw.numel()))
    body = body_of(name, raw, groups)
    assert len(body) == raw.numel() + 3 * 4 == parse(name).encoded_bytes_max(raw.numel(), groups)
    assert struct.unpack("<3I", body[:12]) == (1 << 31 | MIB, 1 << 31 | MIB, 1 << 31 | 64)


# Pythons from 3.12 on warn of every fork in a process with threads, and torch has some.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    raw, groups = gaussian(("float32", MIB))
    body = body_of("lz4", raw, groups)
    child = os.fork()
    if child == 0:
        os._exit(body_of("lz4", raw, groups) != body)
    assert os.waitpid(child, 0)[1] == 0


def test_shuffling_lays_equal_places_together():
    plain = np.frombuffer(b"--abcdabcd-", np.uint8)
    runs = blocks.cover([Run(2, 2, 4)], 0, len(plain))
    shuffled = blocks.shuffle(plain, runs)
    assert bytes(shuffled) == b"--aabbccdd-"
    back = np.zeros_like(plain)
    blocks.unshuffle(shuffled, back, runs)
    assert bytes(back) == bytes(plain)


def test_gradients_shrink_by_shuffling():
    raw, groups = gaussian(("float32", 50_000))
    assert len(body_of("shuffle | zstd:1", raw, groups)) < 0.9 * raw.numel()


# --- rounded --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize(("spec", "off"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_sixteen_bits_are_near(spec, off, kind):
    raw, groups = gaussian((kind, 300_000), ("int32", 9))
    found = there_and_back(spec, raw, groups)
    before, after = groups[0].values_in(raw).double(), groups[0].values_in(found).double()
    assert ((before - after).abs() <= before.abs() * off * 1.001 + 1e-7).all()
    assert bits(found, groups)[1] == bits(raw, groups)[1]
    assert len(body_of(spec, raw, groups)) == parse(spec).encoded_bytes_max(raw.numel(), groups)


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("count", [1, 255, 256, 257, 300_000])
def test_eight_bits_are_within_half_a_step_of_their_block(kind, count):
    raw, groups = gaussian((kind, count), ("int32", 9))
    groups[0].values_in(raw)[: count // 2] *= 1e-6
    found = there_and_back("int8", raw, groups)
    before, after = groups[0].values_in(raw).double(), groups[0].values_in(found).double()
    for rows, result in zip(before.split(SCALED_VALUES), after.split(SCALED_VALUES), strict=True):
        assert (rows - result).abs().max() <= rows.abs().max() / 127 / 2 * 1.001
    assert bits(found, groups)[1] == bits(raw, groups)[1]
    assert len(body_of("int8", raw, groups)) == parse("int8").encoded_bytes_max(raw.numel(), groups)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"float", "float32", "double", "float64"}))
def test_what_is_no_float_of_32_or_64_bits_is_not_rounded(dtype):
    groups, raw_bytes = laid_out((dtype, 300))
    raw = random_bytes(raw_bytes)
    for spec in LOSSY:
        assert bits(there_and_back(spec, raw, groups), groups) == bits(raw, groups)


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("spec", LOSSY)
def test_what_is_not_finite_arrives_as_such(spec, kind):
    for bad in (float("nan"), float("inf"), float("-inf")):
        raw, groups = gaussian((kind, 1000))
        groups[0].values_in(raw)[600] = bad
        assert not groups[0].values_in(there_and_back(spec, raw, groups)).isfinite().all()


@pytest.mark.parametrize(("spec", "largest"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
def test_what_is_too_large_becomes_the_largest_there_is(spec, largest):
    raw, groups = gaussian(("float32", 100), ("float64", 3))
    groups[0].values_in(raw)[:4] = torch.tensor([3.4e38, -3.4e38, float("inf"), float("-inf")])
    groups[1].values_in(raw)[0] = 1e300
    found = there_and_back(spec, raw, groups)
    assert groups[0].values_in(found)[:4].tolist() == [largest, -largest, float("inf"), float("-inf")]
    assert groups[1].values_in(found)[0] == largest


def test_zeros_and_the_smallest_numbers_have_scales_too():
    raw, groups = gaussian(("float32", 1000))
    groups[0].values_in(raw)[:256] = 0
    groups[0].values_in(raw)[256:512] = 1e-45
    groups[0].values_in(raw)[512:768] = 2e-43
    found = groups[0].values_in(there_and_back("int8", raw, groups))
    assert (found[:768] == 0).all()
    assert found[768:].any()


def test_garbage_between_groups_does_not_travel_with_rounded_numbers():
    raw, groups = gaussian(("float32", 3), ("int32", 3))
    other = raw.clone()
    other[12:64] = 77
    for spec in LOSSY:
        assert body_of(spec, raw, groups) == body_of(spec, other, groups)


# --- error feedback -------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["int8", "int8 | zstd:1"])
def test_what_rounding_took_is_sent_later(spec):
    groups, raw_bytes = laid_out(("float32", 700), ("int64", 4))
    feedback = ErrorFeedback(groups)
    sent, true = torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    found = torch.zeros(raw_bytes, dtype=torch.uint8)
    for step in range(40):
        raw, _ = gaussian(("float32", 700), ("int64", 4), seed=step)
        groups[0].values_in(raw).mul_(torch.logspace(-3, 0, 700))
        integers = groups[1].values_in(raw).clone()
        true += groups[0].values_in(raw)
        parse(spec).decode(bytearray().join(feedback.encode(parse(spec), raw)), found, groups)
        sent += groups[0].values_in(found)
        assert (groups[1].values_in(found) == integers).all()
    quantum = torch.stack([rows.abs().max() for rows in groups[0].values_in(found).split(256)]) / 127
    quantum = quantum.repeat_interleave(256)[:700]
    assert ((sent - true).abs() <= quantum).all()
    # The next update goes exactly, and takes all of the rest along.
    raw = torch.zeros(raw_bytes, dtype=torch.uint8)
    parse("lz4").decode(bytearray().join(feedback.encode(parse("lz4"), raw)), found, groups)
    sent += groups[0].values_in(found)
    assert torch.allclose(sent, true, atol=1e-5)
    raw = torch.zeros(raw_bytes, dtype=torch.uint8)
    feedback.encode(parse("lz4"), raw)
    assert not raw.any()


@pytest.mark.parametrize("spec", ["int8", "q4"])
def test_a_gradient_that_is_not_finite_spoils_only_itself(spec):
    raw, groups = gaussian(("float32", 300))
    feedback = ErrorFeedback(groups)
    groups[0].values_in(raw)[3] = float("nan")
    feedback.encode(parse(spec), raw)
    raw, _ = gaussian(("float32", 300))
    feedback.encode(parse(spec), raw)
    assert groups[0].values_in(raw).isfinite().all()


# --- hostile --------------------------------------------------------------------------------------


def shrinking() -> tuple[Tensor, list[DtypeGroup]]:
    raw, groups = gaussian(("float32", 60), ("int64", 40))
    raw[64:400] = 5
    return raw, groups


@pytest.mark.parametrize("spec", [*LOSSLESS, *LOSSY])
def test_a_body_cut_anywhere_or_with_more_behind_it_is_refused(spec):
    raw, groups = shrinking()
    body = body_of(spec, raw, groups)
    for cut in range(len(body)):
        refused(spec, body[:cut], raw.numel(), groups)
    refused(spec, body + b"x", raw.numel(), groups)


@pytest.mark.parametrize("spec", COMPRESSORS)
def test_a_block_cut_anywhere_with_a_table_that_agrees_is_refused(spec):
    raw, groups = shrinking()
    block = body_of(spec, raw, groups)[4:]
    for cut in range(len(block)):
        refused(spec, struct.pack("<I", cut) + block[:cut], raw.numel(), groups)
    refused(spec, struct.pack("<I", len(block) + 1) + block + b"\0", raw.numel(), groups)
    refused(spec, struct.pack("<I", len(block) * 2) + block * 2, raw.numel(), groups)


@settings(max_examples=200, deadline=None)
@given(spec=st.sampled_from([*LOSSLESS, *LOSSY]), data=st.data())
def test_flipped_bytes_are_refused_or_read_but_nothing_else_happens(spec, data):
    raw, groups = shrinking()
    body = body_of(spec, raw, groups)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(RemoteProtocolError):
        parse(spec).decode(body, torch.zeros_like(raw), groups)


@settings(max_examples=100, deadline=None)
@given(spec=st.sampled_from(COMPRESSORS), garbage=st.binary(min_size=1, max_size=400))
def test_garbage_is_refused(spec, garbage):
    _, groups = shrinking()
    body = struct.pack("<I", len(garbage)) + garbage
    with contextlib.suppress(RemoteProtocolError):  # a lucky lz4 block may be read
        parse(spec).decode(bytearray(body), torch.zeros(576, dtype=torch.uint8), groups)


LONG = bytes(64 * MIB)
BOMBS = {
    "zlib:1": lambda: zlib.compress(LONG, 9),
    "lz4": lambda: lz4.block.compress(LONG[: 16 * MIB], store_size=False),
    "lz4frame": lambda: lz4.frame.compress(LONG, store_size=False),
    "lz4frame ": lambda: lz4.frame.compress(LONG, store_size=True),
    "zstd:1": lambda: zstandard.ZstdCompressor(write_content_size=True).compress(LONG),
    "zstd:1 ": lambda: zstandard.ZstdCompressor(write_content_size=False).compress(LONG),
}


@pytest.mark.parametrize("spec", BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(spec):
    bomb = BOMBS[spec]()[: MIB - 1]
    groups, raw_bytes = laid_out(("uint8", MIB))
    body = bytearray(struct.pack("<I", len(bomb)) + bomb)
    raw = torch.zeros(raw_bytes, dtype=torch.uint8)
    parse(spec)
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError):
        parse(spec).decode(body, raw, groups)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * MIB


def zstd_header(content: int, window: int) -> bytes:
    """A frame that says how much it holds, and how far back it looks, before its first block."""
    return struct.pack("<IBBQ", zstandard.MAGIC_NUMBER, 0b1100_0000, window << 3, content)


@pytest.mark.parametrize("content", [0, 575, 577, 1 << 40, (1 << 64) - 1])
def test_a_zstd_header_that_lies_about_its_content_is_refused(content):
    _, groups = shrinking()
    frame = zstd_header(content, 0) + b"\x01\x00\x00"
    assert "another size" in refused("zstd", struct.pack("<I", len(frame)) + frame, 576, groups)


@pytest.mark.parametrize("window", [11, 15, 20])
def test_a_zstd_header_that_wants_a_large_window_is_refused(window):
    _, groups = shrinking()
    frame = zstd_header(576, window) + b"\x01\x00\x00"
    assert "zstd frame" in refused("zstd", struct.pack("<I", len(frame)) + frame, 576, groups)


def test_a_frame_to_be_skipped_is_no_content():
    _, groups = shrinking()
    frame = struct.pack("<II", 0x184D2A50, 500) + bytes(500)
    for spec in ("zstd", "lz4frame"):
        refused(spec, struct.pack("<I", len(frame)) + frame, 576, groups)


def test_a_block_that_need_not_be_compressed_is_no_work_of_ours():
    raw = random_bytes(64)
    groups, _ = laid_out(("uint8", 64))
    block = zlib.compress(bytes(raw.numpy()))
    assert len(block) > 64
    refused("zlib", struct.pack("<I", len(block)) + block, 64, groups)
    refused("zlib", struct.pack("<I", 0), 64, groups)


def test_one_bad_block_among_many_is_refused_when_all_are_done():
    raw = random_bytes(3 * MIB) // 64
    groups, _ = laid_out(("uint8", 3 * MIB))
    for spec in ("zlib:1", "lz4", "lz4frame", "zstd:1"):
        body = body_of(spec, raw, groups)
        body[12:40] = b"\xff" * 28
        refused(spec, body, 3 * MIB, groups)


def test_after_a_bad_block_the_next_good_one_is_read():
    raw, groups = shrinking()
    for spec in COMPRESSORS:
        body = body_of(spec, raw, groups)
        refused(spec, body[:4] + bytes(len(body) - 4), raw.numel(), groups)
        assert bits(there_and_back(spec, raw, groups), groups) == bits(raw, groups)


# --- specs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", "none"),
        ("bf16|zstd", "bf16 | zstd:1"),
        (" lz4:1 ", "lz4"),
        ("lz4:8", "lz4:8"),
        ("zlib", "zlib:1"),
        ("zstd:-5", "zstd:-5"),
        ("int8|shuffle|lz4frame", "int8 | shuffle | lz4frame"),
        ("q4|zstd", "q4 | zstd:1"),
    ],
)
def test_a_spec_has_one_spelling(text, spec):
    assert parse(text).spec == spec
    assert parse(spec).spec == spec
    assert parse(text) is parse(text)


def test_what_rounds_says_so():
    assert [spec for spec in [*LOSSLESS, *LOSSY] if is_lossy(spec)] == LOSSY
    assert [spec for spec in LOSSY if parse(spec).is_coarse] == COARSE


def test_another_stage_can_be_registered(monkeypatch):
    for table, name in [(compression, "_NAMES"), (pipeline, "_NUMBERS"), (pipeline, "_COMPRESSORS")]:
        monkeypatch.setattr(table, name, dict(getattr(table, name)))

    class Backwards:
        """Not a compressor: the vector from its end."""

        def runs(self, groups):
            return [Run(0, groups[-1].start + groups[-1].count * groups[-1].dtype.itemsize, 1)]

        def pack(self, raw, groups):
            return raw[: self.runs(groups)[0].end].flip(0)

        def unpack(self, packed, raw, groups):
            raw[: len(packed)] = packed.flip(0)

    register("backwards", Backwards())
    register("best", Zlib(9))
    raw, groups = gaussian(("float32", 300))
    assert bits(there_and_back("backwards | best", raw, groups), groups) == bits(raw, groups)
    with pytest.raises(ValueError, match="cannot be called 'zstd'"):
        register("zstd", Zlib(9))


def test_a_block_is_no_longer_than_a_window_may_be():
    frame = zstandard.ZstdCompressor(level=19).compress(bytes(random_bytes(BLOCK_BYTES).numpy() // 2))
    assert zstandard.get_frame_parameters(frame).window_size <= BLOCK_BYTES
