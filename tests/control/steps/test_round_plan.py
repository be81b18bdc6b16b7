"""Rounds in the plan: every batch once, in columns; lengths by the step number alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w5xde.control.steps.plan import Plan, StepPlan
from w5xde.specs.round_lengths import RoundLengths
from w5xde.tree import Span


def plan(samples: int | None, lengths: str, *, columns: int = 2, **more: Any) -> Plan:
    limits = {"epoch_limit": 2, "step_limit": None} | more
    return Plan(
        step_batches=columns, samples=samples, batch_size=2, rounds=RoundLengths.parse(lengths), **limits
    )


def all_rounds(of: Plan) -> list[StepPlan]:
    found = []
    while (step := of.next_step()) is not None:
        found.append(step)
    return found


def test_a_column_has_one_batch_of_every_step() -> None:
    [first] = all_rounds(plan(12, "3", epoch_limit=1))
    assert first == StepPlan(0, 0, 0, (2,) * 6, ends_epoch=True, columns=2)
    assert (first.steps, first.count, first.leaf_batches, first.samples) == (3, 2, 3, 12)
    assert first.keys_of(Span(0, 1)) == [(0, 0), (0, 2), (0, 4)]
    assert first.keys_of(Span(1, 2)) == [(0, 1), (0, 3), (0, 5)]
    assert first.samples_of(Span(0, 2)) == 12


def test_a_short_last_step_is_a_round_of_its_own_with_fewer_columns() -> None:
    rounds = all_rounds(plan(27, "2", columns=3, epoch_limit=1))
    # 14 batches in steps of 3, the last of which has 2, and its last batch one sample.
    assert [(each.steps, each.columns, each.ends_epoch) for each in rounds] == [
        (2, 3, False),
        (2, 3, False),
        (1, 2, True),
    ]
    assert rounds[-1].sizes == (2, 1)


@given(
    samples=st.integers(1, 200),
    columns=st.integers(1, 7),
    lengths=st.sampled_from(["1", "3", "7", "grow:1:5", "grow:3:20", "grow:50:50"]),
    steps=st.none() | st.integers(1, 40),
)
def test_every_batch_is_in_one_column_and_versions_count_steps(
    samples: int, columns: int, lengths: str, steps: int | None
) -> None:
    rounds = all_rounds(plan(samples, lengths, columns=columns, step_limit=steps))
    version = 0
    for each in rounds:
        assert each.index == version
        assert each.steps <= RoundLengths.parse(lengths).at(version)
        version += each.steps
        in_columns = Counter(key for k in range(each.count) for key in each.keys_of(Span(k, k + 1)))
        assert in_columns == Counter(each.keys)
    applied = Counter(key for each in rounds for key in each.keys)
    assert max(applied.values()) == 1
    batches = -(-samples // 2)
    whole = 2 * -(-batches // columns)
    assert version == (whole if steps is None else min(steps, whole))
    if version == whole:
        assert len(applied) == 2 * batches


def test_a_round_of_a_stream_waits_for_all_its_batches() -> None:
    stream = plan(None, "2", epoch_limit=1)
    for _ in range(4):
        stream.discovered(0, 2)
        assert stream.next_step() is None
    stream.discovered(0, 2)
    first = stream.next_step()
    assert first is not None
    assert (first.steps, first.columns) == (2, 2)
    stream.discovered(0, 0)
    last = stream.next_step()
    assert last is not None
    assert (last.steps, last.columns, last.ends_epoch) == (1, 1, True)
    assert stream.is_over


def test_a_resumed_plan_repeats_the_rounds_that_were_open_as_they_were() -> None:
    first = plan(24, "grow:2:4")
    rounds = all_rounds(first)
    again = plan(24, "grow:2:4")
    taken = [again.next_step() for _ in range(2)]
    resumed = plan(24, "grow:2:4")
    resumed.resume(again.cursor, [each for each in taken[1:] if each is not None])
    assert all_rounds(resumed) == rounds[1:]


def test_a_batch_that_is_tried_again_is_a_round_of_one_column() -> None:
    retried = plan(12, "3")
    retried.retry_batch(0, 4, 2)
    step = retried.next_step()
    assert step is not None
    assert (step.index, step.columns, step.steps, step.keys) == (-1, 1, 1, [(0, 4)])


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("12", [12, 12, 12]), ("grow:50:20", [2, 2, 20]), ("grow:1:3", [2, 3, 3]), ("grow:50:1", [1, 1, 1])],
)
def test_lengths_depend_on_the_step_alone(text: str, lengths: list[int]) -> None:
    found = RoundLengths.parse(text)
    assert [found.at(step) for step in (0, 100, 5000)] == lengths
    assert RoundLengths.parse(str(found)) == found


@pytest.mark.parametrize("text", ["", "0", "-1", "grow", "grow:0:5", "grow:5:0", "grow:5", "5000000", "1e3"])
def test_other_texts_are_no_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="no lengths of rounds"):
        RoundLengths.parse(text)
