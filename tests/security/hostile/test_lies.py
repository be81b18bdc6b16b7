"""Every lie is refused with its reason, and costs no more memory than the truth would."""

from __future__ import annotations

import struct

import pytest
import torch

from tests.security import files
from tests.security.lies import LIES, NUMBERS, Lie, check_number
from tests.security.measure import KIB, Broken
from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.codecs.receiver import CodecReceiver
from w5xde.learn.model.layout import Vector


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_and_costs_little(name):
    LIES[name].check()


def test_there_are_enough_of_them():
    assert len(LIES) >= 60


def test_what_is_believed_or_costs_too_much_is_found_out():
    def expensive() -> None:
        bytearray(100 * KIB)
        raise RemoteProtocolError("no")

    with pytest.raises(Broken, match="was believed"):
        Lie(lambda: None, "", KIB).check()
    with pytest.raises(Broken, match="bytes were taken"):
        Lie(expensive, "no", 50 * KIB).check()
    with pytest.raises(Broken, match="refused, but with"):
        Lie(expensive, "yes", 200 * KIB).check()


@pytest.mark.parametrize(("spec", "value"), NUMBERS)
def test_a_number_that_is_none_is_still_seen_when_it_arrives(spec, value):
    check_number(spec, value)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 3e38])
def test_a_scale_that_makes_numbers_endless_never_reaches_the_model(scale):
    learner = files.a_learner()
    before = learner.flat.state.clone()
    groups, vector_bytes = learner.flat.blueprint.moving_groups, learner.vector_bytes
    # One scale, then values of 127: the largest that 8 bits hold.
    body = bytearray(parse("int8").encoded_bytes_max(vector_bytes, groups))
    body[64:] = b"\x7f" * (len(body) - 64)
    body[:4] = struct.pack("<f", scale)
    raw = CodecReceiver("int8", groups, vector_bytes).decode("int8", memoryview(body))
    assert not learner.gauge.is_finite(Vector.over(raw, learner.flat.blueprint))
    assert torch.equal(learner.flat.state, before)
