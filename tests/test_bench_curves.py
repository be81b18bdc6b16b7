"""Learning curves: the target, when it is reached, and what is said of runs that never reach it."""

from __future__ import annotations

import pytest

from w5xde.bench.measure.curves import (
    AVERAGED_MARKS,
    CurveMark,
    effective_rate,
    median,
    range_of,
    reached,
    seems_reached,
    smoothed,
    speed_ups,
    target_of,
    training_loss_at_target,
)


def line(first: float, last: float, *, marks: int = 61, seconds: float = 1.0) -> list[CurveMark]:
    """A loss that falls in a straight line; a mark takes `seconds` and ten samples."""
    step = (last - first) / (marks - 1)
    return [
        CurveMark(at * seconds, 10 * at, first + at * step, None if at == 0 else first + at * step)
        for at in range(marks)
    ]


def test_the_target_is_the_loss_after_seventy_percent_of_the_samples():
    assert target_of(line(6.0, 0.0)) == pytest.approx(1.8)


def test_the_plain_loop_reaches_its_own_target_at_seventy_percent():
    marks = line(6.0, 0.0)
    found = reached(marks, target_of(marks))
    assert found is not None
    assert (found.seconds, found.samples) == (pytest.approx(42), pytest.approx(420))


def test_a_run_reaches_the_target_between_two_marks_in_proportion():
    found = reached(line(6.0, 0.0, marks=31, seconds=3.0), 1.9)
    assert found is not None
    assert found.seconds == pytest.approx(3 * 20.5)
    assert found.samples == pytest.approx(10 * 20.5)


def test_one_lucky_mark_is_not_enough():
    marks = line(6.0, 3.0)
    marks[20].loss = 1.9
    assert reached(marks, 2.0) is None
    assert smoothed([mark.loss for mark in marks])[20] > 2.0


def test_a_run_that_never_gets_there_has_not_reached_the_target():
    assert reached(line(6.0, 2.0), 1.8) is None


def test_a_run_that_starts_below_the_target_reached_it_at_once():
    found = reached(line(1.0, 0.5), 1.8)
    assert found is not None
    assert found.seconds == 0.0


def test_the_training_loss_says_when_a_run_may_end_only_after_several_marks():
    marks = line(6.0, 0.0)
    hint = 0.97 * training_loss_at_target(marks)
    assert hint == pytest.approx(0.97 * 1.8)
    ends = next(at for at in range(1, 62) if seems_reached(marks[:at], hint))
    # The mean of the last five marks is the loss two marks before.
    assert marks[ends - 1 - AVERAGED_MARKS // 2].loss < hint <= marks[ends - 2 - AVERAGED_MARKS // 2].loss
    assert not seems_reached(marks, None)
    assert not seems_reached(marks[-2:], hint)


def test_a_run_that_did_not_reach_the_target_counts_as_the_longest():
    assert median([1.0, None, 3.0]) == 3.0
    assert median([1.0, None, None]) is None
    assert median([2.0, 1.0, 3.0]) == 2.0


def test_speed_ups_compare_runs_of_the_same_seed():
    assert speed_ups([10.0, 20.0, 30.0], [5.0, 5.0, None]) == [2.0, 4.0, 0.0]
    # Without the other contestant there is nothing to compare with.
    assert speed_ups([None], [5.0]) == [None]
    assert range_of([2.0, 4.0, 0.0]) == {"median": 2.0, "low": 0.0, "high": 4.0}
    assert range_of([None]) == {"median": None, "low": None, "high": None}


def test_the_effective_rate_is_in_batches_of_the_plain_loop():
    assert effective_rate(630.0, 7.0) == pytest.approx(90.0)
    assert effective_rate(630.0, None) is None
