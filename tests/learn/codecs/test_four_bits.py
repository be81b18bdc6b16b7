"""Four bits: what arrives has few bits and is near what was sent, and a block never spoils its neighbour."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from w5xde.compression import Directions, parse_compress
from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs.feedback import ErrorFeedback
from w5xde.learn.codecs.four_bits import BLOCK_VALUES, FourBits
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.codecs.receiver import CodecReceiver
from w5xde.learn.model.layout import DTYPES, DtypeGroup, aligned
from w5xde.messages import CARRIED, MOVING, TRAINED

LARGEST = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny
NAN, INF = float("nan"), float("inf")
# The rounding of one division: it may take a value just past the half towards the wrong neighbour.
DIVIDED = 1 + 2.0**-22
SPECS = ["q4", "q4 | zstd:1", "q4 | shuffle", "q4 | shuffle | zstd:1", "q4 | lz4"]

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Values of one magnitude, or of any: from a block that is all zeros to one that reaches the largest float.
vectors = st.lists(floats, min_size=1, max_size=200) | st.tuples(
    st.integers(1, 200), st.floats(-140, 120), st.integers(0, 99)
).map(lambda drawn: (np.random.default_rng(drawn[2]).standard_normal(drawn[0]) * 2.0 ** drawn[1]).tolist())


def laid_out(*sizes: tuple[str, torch.dtype, int]) -> tuple[list[DtypeGroup], int]:
    """Groups of these roles, dtypes and counts, and the bytes of their vector."""
    groups, at = [], 0
    for role, dtype, count in sizes:
        groups.append(DtypeGroup(role, dtype, at, count, ()))
        at = aligned(groups[-1].end)
    return groups, at


def body_of(spec: str, raw: Tensor, groups: list[DtypeGroup]) -> bytearray:
    return bytearray().join(parse(spec).encode(raw, groups))


def decoded(spec: str, body: bytearray, groups: list[DtypeGroup]) -> Tensor:
    raw = torch.zeros(aligned(groups[-1].end), dtype=torch.uint8)
    parse(spec).decode(body, raw, groups)
    return raw


def packed(values: Tensor, role: str = TRAINED) -> tuple[Tensor, Tensor]:
    """The bytes of the scales and of the codes of a group."""
    groups, raw_bytes = laid_out((role, values.dtype, len(values)))
    raw = torch.zeros(raw_bytes, dtype=torch.uint8)
    groups[0].values_in(raw).copy_(values)
    whole = FourBits().pack(raw, groups)
    scales, codes = FourBits().runs(groups)
    return whole[scales.start : scales.end], whole[codes.start : codes.end]


def there_and_back(values: Tensor, role: str = TRAINED) -> Tensor:
    groups, raw_bytes = laid_out((role, values.dtype, len(values)))
    raw = torch.zeros(raw_bytes, dtype=torch.uint8)
    groups[0].values_in(raw).copy_(values)
    return groups[0].values_in(decoded("q4", body_of("q4", raw, groups), groups))


def scales_of(values: Tensor) -> Tensor:
    """The scale of each value."""
    scales, _ = packed(values)
    return scales.view(torch.bfloat16).double().repeat_interleave(BLOCK_VALUES)[: len(values)]


def gaussian(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def statistics(count: int, seed: int = 0) -> Tensor:
    """Squares over many decades."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=noise).square() * torch.exp(4 * torch.randn(count, generator=noise))


def mixed(seed: int = 0) -> tuple[Tensor, list[DtypeGroup]]:
    """A vector with a group of every kind that the stage treats in its own way."""
    groups, raw_bytes = laid_out(
        (TRAINED, torch.float32, 1001),
        (TRAINED, torch.float64, 130),
        (TRAINED, torch.bfloat16, 77),
        (TRAINED, torch.float16, 5),
        (CARRIED, torch.float32, 1001),
        (CARRIED, torch.float64, 3),
        (MOVING, torch.float32, 65),
        (MOVING, torch.float64, 3),
        (MOVING, torch.int64, 7),
        (MOVING, torch.bool, 9),
    )
    raw = torch.zeros(raw_bytes, dtype=torch.uint8)
    for group in groups:
        group.values_in(raw).copy_(statistics(group.count, seed) * (1 if group.role == CARRIED else 1e-4))
    return raw, groups


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


# --- differences ----------------------------------------------------------------------------------


def test_a_block_has_the_bytes_that_the_protocol_describes():
    values = torch.zeros(67)
    values[:3] = torch.tensor([1.0, -0.5, 0.25])
    values[64:] = torch.tensor([-7.0, 7.0, 1.5])
    scales, codes = packed(values)
    # 1/7 is between 0.125 and 0.15625; half of a scale goes to the even code.
    assert scales.view(torch.bfloat16).tolist() == [0.15625, 1.0]
    assert bytes(codes.numpy()) == bytes([0x5E, 0x8A]) + b"\x88" * 30 + bytes([0xF1, 0x8A])
    found = there_and_back(values)
    assert found[:4].tolist() == [0.9375, -0.46875, 0.3125, 0.0]
    assert found[64:].tolist() == [-7.0, 7.0, 2.0]


@settings(max_examples=300, deadline=None)
@given(values=vectors)
def test_a_value_arrives_as_a_few_bits_within_half_a_scale(values):
    before = torch.tensor(values, dtype=torch.float32)
    after, scale = there_and_back(before).double(), scales_of(before)
    assert after.isfinite().all()
    whole = torch.where(scale > 0, after / torch.where(scale > 0, scale, 1), 0)
    assert torch.equal(whole, whole.round()), "an exact multiple"
    assert (whole.abs() <= 7).all()
    assert ((before.double() - after).abs() <= scale / 2 * DIVIDED)[scale > 0].all()
    assert (before.double().abs() < 7 * TINY)[scale == 0].all(), "too small for any scale"
    assert not after[scale == 0].any()


@settings(max_examples=300, deadline=None)
@given(values=vectors)
def test_a_scale_is_the_smallest_with_two_bits_of_mantissa_that_reaches_the_largest_value(values):
    before = torch.tensor(values, dtype=torch.float32)
    scales = packed(before)[0].view(torch.bfloat16)
    assert not (scales.view(torch.int16) & 0x1F).any()
    for scale, rows in zip(scales, before.split(BLOCK_VALUES), strict=True):
        largest = float(rows.abs().max())
        if scale > 0:
            less = scale.view(torch.int16).sub(1 << 5).view(torch.bfloat16)
            assert float(less) * 7 < largest <= float(scale) * 7 * DIVIDED


@settings(max_examples=100, deadline=None)
@given(values=vectors)
def test_what_arrived_travels_again_unchanged_if_its_largest_value_fills_the_scale(values):
    once = there_and_back(torch.tensor(values, dtype=torch.float32))
    twice = there_and_back(once)
    for first, second, scale in zip(
        once.split(BLOCK_VALUES),
        twice.split(BLOCK_VALUES),
        scales_of(torch.tensor(values, dtype=torch.float32)).split(BLOCK_VALUES),
        strict=True,
    ):
        if first.double().abs().max() == 7 * scale[0]:
            assert same_bits(first, second)


def test_the_largest_value_of_a_block_is_off_by_a_twelfth_at_most():
    before = gaussian(64 * 1000).view(-1, 64)
    after = there_and_back(before.flatten()).view(-1, 64)
    at = before.abs().argmax(1, keepdim=True)
    largest, arrived = before.gather(1, at), after.gather(1, at)
    assert ((largest - arrived).abs() <= largest.abs() / 11.2 * DIVIDED).all()


def test_neither_sign_is_preferred():
    before = gaussian(1 << 12)
    assert torch.equal(there_and_back(-before), -there_and_back(before))


def test_the_largest_and_the_smallest_numbers_stay_finite():
    before = torch.cat(
        [torch.full((64,), value) for value in (LARGEST, -LARGEST, TINY, 7 * TINY, 0.5 * TINY)]
    )
    before[1] = 1.0
    after = there_and_back(before)
    assert after.isfinite().all()
    assert after[0] == -after[64] == 7.5 * 2.0**125
    assert after[1] == 0
    assert not after[128:192].any(), "the scale of the smallest normal number would be subnormal"
    assert (after[192:256] == 7 * TINY).all()
    assert not after[256:].any()


def test_zeros_arrive_as_zeros_of_no_sign():
    for zero in (0.0, -0.0, 1e-45, -1e-45):
        assert same_bits(there_and_back(torch.full((100,), zero)), torch.zeros(100))


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_spoils_its_own_block_alone(bad, dtype):
    before = gaussian(300).to(dtype)
    expected = there_and_back(before)
    before[130] = bad
    after = there_and_back(before)
    assert after[128:192].isnan().all()
    assert torch.equal(after[:128], expected[:128])
    assert torch.equal(after[192:], expected[192:])
    assert bytes(packed(before)[1][64:96].numpy()) == b"\x88" * 32, "the codes of zero, on every machine"


def test_a_nan_of_any_bits_is_one():
    before = torch.full((64,), 0x7FFF_FFFF, dtype=torch.int32).view(torch.float32)
    assert there_and_back(before).isnan().all()
    assert packed(before)[0].view(torch.int16).item() == 0x7FC0


def test_a_float64_beyond_the_range_of_float32_is_not_finite():
    before = torch.ones(200, dtype=torch.float64)
    before[70] = 1e39
    after = there_and_back(before)
    assert after.isfinite().tolist() == [True] * 64 + [False] * 64 + [True] * 72
    assert not there_and_back(torch.full((3,), 1e-60, dtype=torch.float64)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("role", [TRAINED, CARRIED])
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 1 << 18, (1 << 18) + 1])
def test_any_count_travels_block_by_block(count, role, dtype):
    before = statistics(count).to(dtype)
    after = there_and_back(before, role)
    at = (count - 1) // BLOCK_VALUES * BLOCK_VALUES
    assert torch.equal(after[at:], there_and_back(before[at:], role))
    assert torch.equal(after[:at], there_and_back(before[:at], role))


# --- statistics -----------------------------------------------------------------------------------

positive = st.floats(0, LARGEST, width=32)


def test_a_block_of_statistics_has_the_bytes_that_the_protocol_describes():
    values = torch.zeros(66)
    values[:4] = torch.tensor([1.0, 0.0, 2.0**-31, 2.0**-31 * 1.125])
    values[4:7] = torch.tensor([0.3, 1e-30, 1.99])
    values[64] = NAN
    exponents, codes = packed(values, CARRIED)
    # 1.99 rounds up to 2, and so to the next exponent.
    assert exponents.tolist() == [128, 255]
    assert codes.tolist()[:8] == [240, 0, 1, 1, 226, 1, 248, 0]
    found = there_and_back(values, CARRIED)
    assert found[:8].tolist() == [
        1.0,
        0.0,
        2.0**-30 * 1.125,
        2.0**-30 * 1.125,
        0.3125,
        2.0**-30 * 1.125,
        2,
        0,
    ]
    assert found[64:].isnan().all()


@settings(max_examples=300, deadline=None)
@given(values=st.lists(positive, min_size=1, max_size=200))
def test_a_statistic_is_off_by_a_sixteenth_at_most(values):
    before = torch.tensor(values, dtype=torch.float32)
    after = there_and_back(before, CARRIED)
    assert after.isfinite().all()
    assert torch.equal(before == 0, after == 0)
    for rows, found in zip(before.double().split(64), after.double().split(64), strict=True):
        smallest = max(float(rows.max()) * 2.0**-30, TINY)
        assert ((rows - found).abs() <= rows / 16)[rows >= smallest].all()
        assert (found <= smallest * 1.125)[rows < smallest].all()
        order = rows.argsort()
        assert (found[order].diff() >= 0).all(), "what is larger arrives no smaller"
    assert same_bits(after, there_and_back(after, CARRIED)), "what arrived travels again unchanged"


def test_statistics_round_to_the_nearest_and_halves_to_the_even_one():
    before = torch.tensor([1.0, 1.0625, 1.0626, 1.1875, 1.1874, 1.3125, 1.9374, 1.9375])
    assert there_and_back(before, CARRIED).tolist() == [1.0, 1.0, 1.125, 1.25, 1.125, 1.25, 1.875, 2.0]


def test_statistics_span_thirty_powers_of_two_in_a_block():
    before = torch.tensor([2.0**-power for power in range(64)])
    after = there_and_back(before, CARRIED)
    assert torch.equal(after[:31], before[:31])
    assert (after[31:] == 1.125 * 2.0**-31).all()


def test_the_largest_and_the_smallest_statistics_stay_finite_and_are_not_zero():
    before = torch.cat([torch.full((64,), value) for value in (LARGEST, TINY, 1e-45, -0.0, 2.0**-100)])
    before[-1] = 1e-45
    after = there_and_back(before, CARRIED)
    assert (after[:64] == 1.875 * 2.0**127).all()
    assert (after[64:192] == TINY).all()
    assert same_bits(after[192:256], torch.zeros(64))
    assert (after[256:-1] == 2.0**-100).all()
    assert after[-1] == TINY


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF, -1.0, -1e-45])
def test_a_statistic_that_cannot_be_spoils_its_own_block_alone(bad):
    before = statistics(300)
    before[::7] = 0
    expected = there_and_back(before, CARRIED)
    before[130] = bad
    after = there_and_back(before, CARRIED)
    assert after[128:192].isnan().all()
    assert torch.equal(after[:128], expected[:128])
    assert torch.equal(after[192:], expected[192:])


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_every_group_travels_in_its_own_form(spec):
    raw, groups = mixed()
    body = body_of(spec, raw, groups)
    assert len(body) <= parse(spec).encoded_bytes_max(raw.numel(), groups)
    found = decoded(spec, body, groups)
    for group in groups:
        before, after = group.values_in(raw), group.values_in(found)
        is_trained = group.role == TRAINED and group.dtype in (torch.float32, torch.float64)
        is_carried = group.role == CARRIED and group.dtype is torch.float32
        if is_trained or is_carried:
            assert same_bits(after, there_and_back(before, group.role))
            assert not same_bits(after, before)
        else:
            assert same_bits(after, before), (group.role, group.dtype)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_buffer_of_any_dtype_is_exact(dtype):
    groups, raw_bytes = laid_out((TRAINED, torch.float32, 3), (MOVING, DTYPES[dtype], 100))
    noise = np.random.default_rng(0).integers(0, 256, raw_bytes, dtype=np.uint8)
    raw = torch.from_numpy(noise)
    found = decoded("q4", body_of("q4", raw, groups), groups)
    assert torch.equal(groups[1].bytes_in(found), groups[1].bytes_in(raw))


def test_the_size_is_known_beforehand():
    for count, scales, codes in [(0, 0, 0), (1, 2, 1), (64, 2, 32), (65, 4, 33), (1 << 20, 1 << 15, 1 << 19)]:
        groups, raw_bytes = laid_out((TRAINED, torch.float32, count))
        size = parse("q4").encoded_bytes_max(raw_bytes, groups)
        assert size == aligned(scales) + codes
        assert len(body_of("q4", torch.zeros(raw_bytes, dtype=torch.uint8), groups)) == size
    groups, raw_bytes = laid_out((CARRIED, torch.float32, 65))
    assert parse("q4").encoded_bytes_max(raw_bytes, groups) == 64 + 65


def test_nothing_but_the_values_travels():
    raw, groups = mixed()
    other = raw.clone()
    for group, following in pairwise(groups):
        other[group.end : following.start] = 77
    # Memory that held something else before must not travel either: large pieces are used again.
    assert body_of("q4", raw, groups) == body_of("q4", other, groups)
    runs = FourBits().runs(groups)
    whole = FourBits().pack(raw, groups)
    assert not any(whole[run.end : following.start].any() for run, following in pairwise(runs))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("role", [TRAINED, CARRIED])
@pytest.mark.usefixtures("threads")
def test_the_bits_depend_on_no_number_of_threads(role):
    # Longer than the share of one core.
    values = statistics((1 << 22) + 12_345)
    groups, raw_bytes = laid_out((role, torch.float32, len(values)))
    raw = torch.zeros(raw_bytes, dtype=torch.uint8)
    groups[0].values_in(raw).copy_(values)
    bodies, results = [], []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        bodies.append(body_of("q4", raw, groups))
        results.append(decoded("q4", bodies[-1], groups))
    assert bodies[0] == bodies[1] == bodies[2]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    middle = slice(1 << 20, (1 << 20) + 640)
    assert torch.equal(groups[0].values_in(results[0])[middle], there_and_back(values[middle], role))


def test_gaussian_differences_take_less_than_half_a_byte_with_zstd():
    values = gaussian(1 << 18)
    groups, raw_bytes = laid_out((TRAINED, torch.float32, len(values)))
    raw = torch.zeros(raw_bytes, dtype=torch.uint8)
    groups[0].values_in(raw).copy_(values)
    assert len(body_of("q4", raw, groups)) == 0.53125 * len(values)
    assert len(body_of("q4 | zstd:1", raw, groups)) < 0.45 * len(values)


# --- error feedback -------------------------------------------------------------------------------


def test_what_rounding_took_is_sent_later_and_buffers_owe_nothing():
    groups, raw_bytes = laid_out((TRAINED, torch.float32, 700), (MOVING, torch.float32, 30))
    feedback = ErrorFeedback(groups)
    sent, true = torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    for step in range(40):
        raw = torch.zeros(raw_bytes, dtype=torch.uint8)
        groups[0].values_in(raw).copy_(gaussian(700, step))
        buffers = gaussian(30, step)
        groups[1].values_in(raw).copy_(buffers)
        true += groups[0].values_in(raw)
        body = bytearray().join(feedback.encode(parse("q4"), raw))
        found = decoded("q4", body, groups)
        sent += groups[0].values_in(found)
        assert torch.equal(groups[1].values_in(found), buffers)
    scale = scales_of(groups[0].values_in(raw))
    assert ((sent - true).abs() <= scale / 2 + 1e-5).all()


def test_a_buffer_that_is_not_finite_owes_nothing_either():
    groups, raw_bytes = laid_out((MOVING, torch.float32, 3))
    feedback = ErrorFeedback(groups)
    for values in ([NAN, INF, 1.0], [1.0, 2.0, 3.0]):
        raw = torch.zeros(raw_bytes, dtype=torch.uint8)
        groups[0].values_in(raw).copy_(torch.tensor(values))
        feedback.encode(parse("q4"), raw)
    assert groups[0].values_in(raw).tolist() == [1.0, 2.0, 3.0]


def test_carried_statistics_replace_the_older_ones_and_owe_nothing():
    groups, raw_bytes = laid_out((TRAINED, torch.float32, 3), (CARRIED, torch.float32, 3))
    feedback = ErrorFeedback(groups)
    for value in (1.03, 0.0):
        raw = torch.zeros(raw_bytes, dtype=torch.uint8)
        groups[1].values_in(raw).fill_(value)
        body = bytearray().join(feedback.encode(parse("q4"), raw))
    assert not decoded("q4", body, groups).any()


# --- hostile --------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(spec=st.sampled_from(["q4", "q4 | shuffle"]), seed=st.integers(0, 2**32 - 1))
def test_any_bytes_of_the_right_length_are_read(spec, seed):
    raw, groups = mixed()
    count = parse(spec).encoded_bytes_max(raw.numel(), groups)
    body = bytearray(np.random.default_rng(seed).bytes(count))
    one = decoded(spec, body, groups)
    assert torch.equal(one, decoded(spec, body, groups))


@pytest.mark.parametrize("spec", SPECS)
def test_any_other_bytes_are_refused(spec):
    raw, groups = mixed()
    body = body_of(spec, raw, groups)
    for wrong in (body[:-1], body + b"\0", bytearray(), bytearray(raw.numpy().tobytes())):
        with pytest.raises(RemoteProtocolError, match=r"expected|compressed"):
            decoded(spec, wrong, groups)


def test_every_pair_of_exponent_and_code_is_zero_or_normal_or_spoils_its_block():
    groups, _ = laid_out((CARRIED, torch.float32, 256 * 256))
    body = bytearray(np.repeat(np.arange(256, dtype=np.uint8), 4).tobytes())
    body += bytearray(np.tile(np.arange(256, dtype=np.uint8), 256).tobytes())
    found = groups[0].values_in(decoded("q4", body, groups)).view(256, 256)
    assert found[255].isnan().all()
    assert not found[:255, 0].any()
    assert found[:255, 1:].isfinite().all()
    assert (found[:255, 1:] >= TINY).all()
    assert (found[:255].diff(dim=1) >= 0).all()


def test_a_receiver_accepts_it_only_where_it_was_agreed_on():
    raw, groups = mixed()
    body = body_of("q4", raw, groups)
    receiver = CodecReceiver("q4", groups, raw.numel())
    assert torch.equal(receiver.decode("q4", memoryview(body)), decoded("q4", body, groups))
    assert receiver.element_layout("q4", len(body)) is None
    with pytest.raises(RemoteProtocolError, match="not agreed on"):
        CodecReceiver("auto:lossy", groups, raw.numel()).check("q4", len(body))


# --- the setting ----------------------------------------------------------------------------------


def test_four_bits_go_down_only_if_differences_do():
    assert parse_compress("up: q4 | zstd") == Directions("q4 | zstd:1", "auto")
    for setting in ("q4", "down: q4", "up: lz4, down: q4 | zstd"):
        with pytest.raises(ValueError, match="q4 is for gradients only, say  up: q4"):
            parse_compress(setting)
    assert parse_compress("q4|zstd", both_ways=True) == Directions("q4 | zstd:1", "q4 | zstd:1")
    assert parse_compress("down: q4", both_ways=True) == Directions("auto", "q4")
    with pytest.raises(ValueError, match="int8 is for gradients only"):
        parse_compress("down: int8", both_ways=True)
