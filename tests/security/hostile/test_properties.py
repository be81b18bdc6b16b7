"""Any bytes at all give a value or the documented error, from every decoder that reads a peer or a file."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.security.measure import Broken
from tests.security.properties import PROPERTIES

EXAMPLES_MIN = 20_000


@pytest.mark.parametrize("name", PROPERTIES)
def test_it_holds_of_any_bytes(name):
    found = PROPERTIES[name]
    assert found.run() >= found.examples


def test_there_are_enough_examples():
    assert sum(each.examples for each in PROPERTIES.values()) >= EXAMPLES_MIN


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_fuzzer_that_has_bytes_tries_the_same(name):
    """What it draws is enough to reach the decoder, and what is wrong there comes out."""
    found, reached = PROPERTIES[name], []

    def broken(**drawn):
        reached.append(drawn)
        raise Broken("on purpose")

    draws = random.Random(0)
    inputs = [draws.randbytes(4096) for _ in range(20)]
    with pytest.raises(Broken):
        each(replace(found, check=broken).on_bytes(), inputs)
    assert set(reached[0]) == set(found.on)
    each(found.on_bytes(), inputs)


def each(check, inputs):
    for data in inputs:
        check(data)
