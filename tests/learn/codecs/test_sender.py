"""The sender applies a fixed spec, never encodes small payloads, and measures codecs on the real payload."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from tests.learn.codecs.test_codecs import bits, gaussian
from w5xde.compression import Directions, parse_compress
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.codecs.sender import LOSSLESS, LOSSY, CodecSender, sample


class FakeChoice:
    """A choice that returns a given spec and records its calls."""

    def __init__(self, spec: str = "none", *, due: bool = False) -> None:
        self.spec = spec
        self.due = due
        self.heard = []

    def is_due(self, now):
        return self.due

    def measuring_begun(self, now):
        self.due = False

    def measured(self, spec, raw_bytes, encoded_bytes, encode_seconds, decode_seconds):
        assert encode_seconds > 0
        assert decode_seconds > 0
        self.heard.append((spec, raw_bytes, encoded_bytes))

    def pick(self, raw_bytes):
        return self.spec


class Forbidden(FakeChoice):
    def is_due(self, now):
        raise AssertionError("nobody should ask")

    pick = is_due


def sender(setting, groups, choice=None, direction="up") -> CodecSender:
    ticks = itertools.count()
    return CodecSender(setting, direction, groups, choice or Forbidden(), lambda: next(ticks) * 0.001)


def test_what_is_small_goes_raw_at_once():
    raw, groups = gaussian(("float32", 430))
    encoded = sender("auto", groups).encode(raw, 0.0)
    assert (encoded.spec, encoded.encoded_bytes) == ("none", 1728)
    [piece] = encoded.pieces
    assert bytes(piece) == bytes(raw.numpy())


def test_what_is_small_costs_next_to_nothing():
    raw, groups = gaussian(("float32", 430))
    encode = sender("auto", groups).encode

    def took() -> float:
        begun = time.perf_counter()
        for _ in range(1000):
            encode(raw, 0.0)
        return (time.perf_counter() - begun) / 1000

    # 1 µs on an idle core; the best of many, because others may be busy on it.
    assert min(took() for _ in range(20)) < 5e-6


@pytest.mark.parametrize("spec", ["none", "zstd:1", "bf16 | shuffle | lz4", "int8"])
def test_a_fixed_spec_is_what_is_done_whatever_the_size(spec):
    for count in (10, 5000):
        raw, groups = gaussian(("float32", count))
        encoded = sender(spec, groups).encode(raw.clone(), 0.0)
        assert encoded.spec == spec
        body = bytearray().join(encoded.pieces)
        assert len(body) == encoded.encoded_bytes
        assert body == bytearray().join(parse(spec).encode(raw, groups))
        assert encoded.seconds == pytest.approx(0.001)


def test_with_auto_the_choice_chooses():
    raw, groups = gaussian(("float32", 5000))
    choice = FakeChoice("shuffle | zstd:1")
    encoded = sender("auto", groups, choice).encode(raw, 0.0)
    assert encoded.spec == "shuffle | zstd:1"
    assert encoded.encoded_bytes < raw.numel()
    assert choice.heard == []


@pytest.mark.parametrize(
    ("setting", "direction", "specs"),
    [
        ("auto", "up", LOSSLESS),
        ("auto", "down", LOSSLESS),
        ("auto:lossy", "up", (*LOSSLESS, *LOSSY)),
        ("auto:lossy", "down", (*LOSSLESS, *LOSSY[:2])),
    ],
)
def test_every_candidate_is_measured_on_two_sizes_when_that_is_due(setting, direction, specs):
    raw, groups = gaussian(("float32", 300_000), ("int64", 9))
    before = raw.clone()
    choice = FakeChoice(due=True)
    one = sender(setting, groups, choice, direction)
    encoded = one.encode(raw, 0.0)
    assert [(spec, size) for spec, size, _ in choice.heard] == [
        (spec, size) for spec in specs for size in (4096, 524_288)
    ]
    assert encoded.spec == "none"
    assert encoded.seconds == pytest.approx(0.001), "measuring is not encoding"
    assert torch.equal(raw, before)
    one.encode(raw, 0.0)
    assert len(choice.heard) == 2 * len(specs)


def test_what_a_chosen_codec_really_took_is_told_too():
    raw, groups = gaussian(("float32", 300_000))
    choice = FakeChoice("zstd:1", due=True)
    one = sender("auto", groups, choice)
    encoded = one.encode(raw, 0.0)
    assert choice.heard[-1] == ("zstd:1", raw.numel(), encoded.encoded_bytes)
    assert len(choice.heard) == 2 * len(LOSSLESS) + 1
    choice.spec = "none"
    one.encode(raw, 0.0)
    assert len(choice.heard) == 2 * len(LOSSLESS) + 1, "nothing is learned from doing nothing"


def test_a_payload_smaller_than_the_sample_is_measured_whole():
    raw, groups = gaussian(("float32", 5000))
    choice = FakeChoice(due=True)
    sender("auto", groups, choice).encode(raw, 0.0)
    assert {size for _, size, _ in choice.heard} == {4096, raw.numel()}


def test_a_sample_has_values_of_all_groups_in_their_places():
    raw, groups = gaussian(("float64", 20_000), ("bfloat16", 50_000), ("int32", 30_000))
    for group, value in zip(groups, (1.25, 2.5, 7), strict=True):
        group.values_in(raw).fill_(value)
    part, found = sample(raw, groups, 8, 4096)
    assert part.numel() == 8 * 4096
    # Stripes of one kind are one group again, and what lies between kinds is in none.
    assert [group.dtype for group in found] == [torch.float64, torch.bfloat16, torch.int32]
    for group, value in zip(found, (1.25, 2.5, 7), strict=True):
        assert (group.values_in(part) == value).all()
    assert sum(group.count * group.dtype.itemsize for group in found) > part.numel() - 2 * 64


def test_what_int8_owed_goes_with_the_next_update_whatever_its_codec():
    raw, groups = gaussian(("float32", 5000))
    true = groups[0].values_in(raw).clone()
    choice = FakeChoice("int8")
    one = sender("auto:lossy", groups, choice)
    found = torch.zeros_like(raw)
    parse("int8").decode(bytearray().join(one.encode(raw, 0.0).pieces), found, groups)
    sent = groups[0].values_in(found).clone()
    assert not torch.allclose(sent, true, atol=1e-4)
    choice.spec = "lz4"
    nothing = torch.zeros_like(raw)
    parse("lz4").decode(bytearray().join(one.encode(nothing, 0.0).pieces), found, groups)
    assert torch.allclose(sent + groups[0].values_in(found), true, atol=1e-6)


def test_int8_is_refused_for_parameters_by_name():
    _, groups = gaussian(("float32", 10))
    with pytest.raises(ValueError, match="int8 is for gradients only"):
        sender("int8 | zstd", groups, direction="down")


def test_what_is_lossless_leaves_the_payload_as_it_was():
    raw, groups = gaussian(("float32", 5000))
    before = raw.clone()
    for spec in LOSSLESS:
        sender(spec, groups).encode(raw, 0.0)
        assert bits(raw, groups) == bits(before, groups)


# --- the setting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "up", "down"),
    [
        ("auto", "auto", "auto"),
        ("auto:lossy", "auto:lossy", "auto:lossy"),
        ("none", "none", "none"),
        ("bf16|zstd", "bf16 | zstd:1", "bf16 | zstd:1"),
        ("zstd:-3", "zstd:-3", "zstd:-3"),
        ("up: bf16 | zstd:1, down: lz4", "bf16 | zstd:1", "lz4"),
        ("down:lz4:8,up:int8", "int8", "lz4:8"),
        ("up: int8", "int8", "auto"),
        ("down: auto:lossy", "auto", "auto:lossy"),
    ],
)
def test_the_setting_says_something_for_each_direction(setting, up, down):
    assert parse_compress(setting) == Directions(up, down)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("", "names no codec ''"),
        ("ztsd", "did you mean 'zstd'?"),
        ("ztsd:1", "did you mean 'zstd'?"),
        ("fp61", "did you mean 'fp16'?"),
        ("atuo", "did you mean 'auto'?"),
        ("auto:lossles", "did you mean 'auto'?"),
        ("lz4 | bf16", "bf16 after lz4: a spec is none, or at most one of"),
        ("lz4 | lz4", "lz4 after lz4"),
        ("shuffle | shuffle", "shuffle after shuffle"),
        ("fp16 | bf16", "bf16 after fp16"),
        ("none | lz4", "none stands alone"),
        ("bf16 |", "names no codec ''"),
        ("zlib:10", "takes a number from 0 to 9"),
        ("zstd:x", "names no codec 'zstd:x'"),
        ("bf16:3", "bf16 in 'bf16:3' takes no number"),
        ("int8", "int8 is for gradients only, say  up: int8"),
        ("down: int8 | zstd", "int8 is for gradients only"),
        ("left: lz4", "no direction 'left', only up and down"),
        ("upp: lz4", "did you mean 'up'?"),
        ("up: lz4, up: zstd", "names up twice"),
        ("lz4, zstd", "must name its directions"),
        ("up: lz4, zstd", "must name its directions"),
    ],
)
def test_a_setting_that_makes_no_sense_is_told_why(setting, says):
    with pytest.raises(ValueError, match="compress") as caught:
        parse_compress(setting)
    assert says in str(caught.value)
