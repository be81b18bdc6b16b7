"""Any bytes at all give a value or the documented error, from every decoder that reads a peer or a file."""

from __future__ import annotations

import pytest

from tests.security.properties import PROPERTIES

EXAMPLES_MIN = 20_000


@pytest.mark.parametrize("name", PROPERTIES)
def test_it_holds_of_any_bytes(name):
    found = PROPERTIES[name]
    assert found.run() >= found.examples


def test_there_are_enough_examples():
    assert sum(each.examples for each in PROPERTIES.values()) >= EXAMPLES_MIN
