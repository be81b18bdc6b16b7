"""Batches that count, as spans: the same as one by one, whatever is claimed and taken back."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from w5xde.control.audit.coverage import Coverage, joined


@pytest.mark.parametrize("seed", range(200))
def test_spans_count_as_batches_do_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    counted, alone = Coverage(), dict[int, int]()
    for step in range(chance.randrange(1, 12)):
        start = chance.randrange(30)
        stop = start + chance.randrange(1, 9)
        before = [(batch, alone[batch]) for batch in range(start, stop) if batch in alone]
        found = counted.add(start, stop, step)
        assert found == (before[0] if before else None)
        for batch in range(start, stop):
            alone.setdefault(batch, step)
        if chance.random() < 0.2:
            since = chance.randrange(step + 1)
            counted.forget_from(since)
            alone = {batch: at for batch, at in alone.items() if at < since}
        aside = {chance.randrange(40) for _ in range(chance.randrange(4))}
        assert list(counted.missing(40, aside)) == [i for i in range(40) if i not in alone and i not in aside]
        whole = {*alone, *aside}
        assert counted.is_whole(aside) == (whole == set(range(len(whole))))


def test_a_claim_costs_nothing_by_its_size() -> None:
    counted = Coverage()
    assert counted.add(5, 10**15, 0) is None
    assert counted.add(10**12, 10**13, 1) == (10**12, 0)
    assert list(islice(counted.missing(10**18), 6)) == [0, 1, 2, 3, 4, 10**15]
    assert not counted.is_whole({0, 1, 2, 3})
    assert counted.is_whole({0, 1, 2, 3, 4, 10**15})


def test_spans_that_touch_are_one_and_those_that_overlap_are_not() -> None:
    assert joined([(4, 6), (0, 2), (2, 4)]) == [(0, 6)]
    assert joined([(0, 3), (2, 4)]) == [(0, 3), (2, 4)]
    assert joined([(0, 2), (3, 4)]) == [(0, 2), (3, 4)]
    assert joined([]) == []
