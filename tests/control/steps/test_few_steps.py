"""A run that makes few steps for its epochs is told, with the setting that makes more."""

from __future__ import annotations

import pytest

from w5xde.control.steps.few_steps import few_steps_text


def test_a_loop_that_was_brought_over_learns_that_its_steps_are_larger_here() -> None:
    assert few_steps_text(2000, 32, 8, 5) == (
        "5 epochs of 2,000 samples are only 40 steps (32 × 8 = 256 samples a step). A plain loop with batches"
        " of 32 makes 315: so does --batches-per-step 1, and a smaller --batch-size makes more"
    )


def test_many_epochs_of_few_steps_are_told_too() -> None:
    assert "60 epochs of 70 samples are only 120 steps" in few_steps_text(70, 32, 2, 60)


def test_a_batch_that_has_all_samples_is_told() -> None:
    assert few_steps_text(30, 32, 2, 1) == (
        "1 epoch of 30 samples are only 1 step, because one batch has them all: a smaller --batch-size makes"
        " more"
    )


@pytest.mark.parametrize(
    "numbers",
    [
        (1437, 32, 4, 20),
        (60_000, 32, 2, 1),
        (1437, 32, 2, 10),
        (300, 32, 1, 9),
        (1, 32, 2, 3),
        (200, 32, 2, 999),
    ],
    ids=[
        "the demo",
        "an epoch of many",
        "a usual run",
        "as in a plain loop",
        "a single sample",
        "many epochs",
    ],
)
def test_enough_steps_and_steps_of_one_batch_are_not_told(numbers: tuple[int, int, int, int]) -> None:
    assert few_steps_text(*numbers) == ""


def test_a_user_who_says_how_many_batches_a_step_has_is_told_without_a_lesson() -> None:
    assert few_steps_text(300, 32, 8, 60, is_default=False) == (
        "60 epochs of 300 samples are only 120 steps (32 × 8 = 256 samples a step): fewer --batches-per-step"
        " make more"
    )
