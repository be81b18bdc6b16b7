"""Updates while they arrive: the same bits and the same verdict as if all of it had been there first."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.model.layout import Blueprint, Vector, describe
from w5xde.learn.step.finite import Gauge
from w5xde.learn.step.incoming import (
    PIECE_BYTES,
    DiscardedVector,
    IncomingVector,
    StoredVector,
    WidenedVector,
)


class Mixed(nn.Module):
    """Parameters of two dtypes that end within a piece, a running mean, a counter and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.floats = nn.Parameter(torch.zeros(700_001))
        self.doubles = nn.Parameter(torch.zeros(70_003, dtype=torch.float64))
        self.mean = nn.Buffer(torch.zeros(13))
        self.seen = nn.Buffer(torch.zeros(3, dtype=torch.int64))
        self.flag = nn.Buffer(torch.zeros(5, dtype=torch.bool))


BLUEPRINT = Blueprint(describe(Mixed(), {"mean", "seen", "flag"}))
GAUGE = Gauge(BLUEPRINT)


def vector(seed: int) -> Vector:
    generator = torch.Generator().manual_seed(seed)
    made = Vector.over(torch.zeros(BLUEPRINT.moving_bytes, dtype=torch.uint8), BLUEPRINT)
    for part in made.parts:
        numbers = torch.randn(part.numel(), generator=generator)
        part.copy_(numbers > 0 if part.dtype is torch.bool else numbers.mul(100).to(part.dtype))
    return made


def send(body: memoryview, arrival: IncomingVector, seed: int = 0) -> None:
    """In pieces such as a socket gives."""
    chance = random.Random(seed)
    at = 0
    while at < len(body):
        room = arrival.get_buffer()
        count = min(len(room), len(body) - at, chance.choice((1, 1000, 65_536, 3 * PIECE_BYTES)))
        room[:count] = body[at : at + count]
        arrival.buffer_updated(count)
        at += count


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_is_all_there(seed: int) -> None:
    comes = vector(seed)
    arrival = StoredVector(bytearray(BLUEPRINT.moving_bytes), BLUEPRINT, GAUGE)
    send(comes.memory, arrival, seed)
    assert arrival.vector is not None
    assert arrival.vector.is_same(comes)
    assert arrival.norm == pytest.approx(GAUGE.norm(comes), rel=1e-4)


@pytest.mark.parametrize("spec", ["bf16", "fp16"])
@pytest.mark.parametrize("seed", range(3))
def test_what_comes_in_fewer_bits_has_the_bits_of_what_is_decoded_first(spec: str, seed: int) -> None:
    groups, pipeline = BLUEPRINT.moving_groups, parse(spec)
    (body,) = pipeline.encode(vector(2 * seed).raw, groups)
    decoded = Vector.over(torch.zeros(BLUEPRINT.moving_bytes, dtype=torch.uint8), BLUEPRINT)
    pipeline.decode(body, decoded.raw, groups)
    wire = pipeline.element_layout(groups)
    assert wire is not None
    kept = vector(99)
    arrival = WidenedVector(kept, BLUEPRINT, GAUGE, len(body), wire)
    send(body, arrival, seed)
    assert kept.is_same(decoded)
    assert arrival.norm == pytest.approx(GAUGE.norm(decoded), rel=1e-4)


@pytest.mark.parametrize("spec", ["bf16 | zstd:1", "shuffle | lz4", "int8", "zlib:1"])
def test_numbers_that_do_not_stand_for_themselves_are_decoded_together(spec: str) -> None:
    assert parse(spec).element_layout(BLUEPRINT.moving_groups) is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("place", [0, -1])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(wrong: float, group: int, place: int) -> None:
    comes = vector(1)
    comes.parts[group][place] = wrong
    arrival = StoredVector(bytearray(BLUEPRINT.moving_bytes), BLUEPRINT, GAUGE)
    send(comes.memory, arrival)
    assert arrival.norm == math.inf


def test_numbers_too_large_to_be_squared_are_finite() -> None:
    comes = vector(1)
    comes.parts[0][0] = 3e38
    arrival = StoredVector(bytearray(BLUEPRINT.moving_bytes), BLUEPRINT, GAUGE)
    send(comes.memory, arrival)
    assert 2e38 < arrival.norm < math.inf


def test_what_nobody_wants_takes_no_more_than_a_piece() -> None:
    arrival = DiscardedVector()
    send(memoryview(bytes(5 * PIECE_BYTES + 1)), arrival)
    assert len(arrival.get_buffer()) == PIECE_BYTES
    assert arrival.vector is None
