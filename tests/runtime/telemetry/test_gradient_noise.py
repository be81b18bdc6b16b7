"""The gradient noise: measured without bias, by the newest windows, and told only when it is known."""

from __future__ import annotations

import math
import random

import pytest

from w5xde.config import Settings
from w5xde.control.steps.plan import StepPlan
from w5xde.runtime.telemetry.gradient_noise import (
    MEASURED_EVERY,
    STEP_BATCHES_MAX,
    WINDOW_STEPS,
    WINDOWS_KEPT,
    WINDOWS_MIN,
    GradientNoise,
    noise_text,
)

NUMBERS = 60


def measure(noise: GradientNoise, steps: int, batches: int, variance: float, chance: random.Random) -> None:
    """Steps whose true gradient has a square of 1, and whose batches differ from it by this variance."""
    true = math.sqrt(1.0 / NUMBERS)
    spread = math.sqrt(variance / NUMBERS)
    for _ in range(steps):
        gradients = [[chance.gauss(true, spread) for _ in range(NUMBERS)] for _ in range(batches)]
        mean = [sum(column) / batches for column in zip(*gradients, strict=True)]
        noise.measured([square(each) for each in gradients], square(mean))


def square(numbers: list[float]) -> float:
    return sum(number * number for number in numbers)


@pytest.mark.parametrize(("batches", "variance"), [(2, 2.0), (4, 0.5), (4, 8.0), (8, 12.0), (16, 40.0)])
def test_the_noise_of_a_known_distribution_is_found(batches: int, variance: float) -> None:
    noise = GradientNoise(batches)
    measure(noise, (1 + WINDOWS_KEPT) * WINDOW_STEPS, batches, variance, random.Random(batches))
    assert noise.batches == pytest.approx(variance, rel=0.25)


def test_nothing_is_said_of_the_first_window_or_after_too_few() -> None:
    noise, chance = GradientNoise(4), random.Random(1)
    measure(noise, (1 + WINDOWS_MIN) * WINDOW_STEPS - 1, 4, 4.0, chance)
    assert noise.batches is None
    assert noise.text(2, 2) == "gradient noise: not known yet, or too large to be measured"
    measure(noise, 1, 4, 4.0, chance)
    assert noise.batches is not None
    assert noise.text(2, 2).startswith("gradient noise, an estimate: up to about ")


def test_huge_first_gradients_are_forgotten() -> None:
    """A mean over all steps said 0.3 for hundreds of steps, where windows said 6."""
    noise, chance = GradientNoise(4), random.Random(2)
    for _ in range(WINDOW_STEPS):
        noise.measured([2500.0] * 4, 2499.0)
    measure(noise, WINDOWS_MIN * WINDOW_STEPS, 4, 6.0, chance)
    assert noise.batches == pytest.approx(6.0, rel=0.25)


def test_the_newest_windows_count() -> None:
    noise, chance = GradientNoise(4), random.Random(3)
    measure(noise, 5 * WINDOW_STEPS, 4, 1.0, chance)
    measure(noise, WINDOWS_KEPT * WINDOW_STEPS, 4, 9.0, chance)
    assert noise.batches == pytest.approx(9.0, rel=0.25)


def test_noise_that_drowns_the_gradient_is_not_known() -> None:
    noise = GradientNoise(2)
    measure(noise, 6 * WINDOW_STEPS, 2, 4000.0, random.Random(4))
    assert noise.batches is None


def test_batches_without_a_difference_have_no_noise() -> None:
    noise = GradientNoise(2)
    for _ in range(4 * WINDOW_STEPS):
        noise.measured([4.0, 4.0], 4.0)
    assert noise.batches == 0.0


@pytest.mark.parametrize(
    ("squares", "mean"),
    [
        ([math.nan, 1.0], 0.5),
        ([math.inf, 1.0], 0.5),
        ([math.inf, -math.inf], 0.5),
        ([1e300, 1e300], 1e299),
        ([1.7e308, 1.7e308], 1e299),
        ([-1.0, 3.0], 0.5),
        ([1.0, 1.0], 1.1),  # longer than the longest of them
        ([1.0, 1.0], math.nan),
        ([0.0, 0.0], 0.0),
        ([1.0], 1.0),
        ([], 1.0),
    ],
)
def test_norms_that_make_no_sense_are_ignored(squares: list[float], mean: float) -> None:
    noise, same = GradientNoise(2), GradientNoise(2)
    for measured in (noise, same):
        chance = random.Random(5)
        for _ in range((1 + WINDOWS_MIN) * WINDOW_STEPS):
            measure(measured, 1, 2, 1.0, chance)
            if measured is noise:
                measured.measured(squares, mean)
    assert noise.batches == same.batches
    assert noise.batches is not None


def test_noise_beyond_all_numbers_is_not_known() -> None:
    noise = GradientNoise(2)
    for _ in range(2 * WINDOW_STEPS):
        noise.measured([1e149, 1e149], 0.5e149)
        noise.measured([1e-170, 1e-170], 1e-170)
    assert noise.batches is None
    assert "not known yet" in noise.text(2, 2)


# --- which steps ----------------------------------------------------------------------------------


def step(index: int, *sizes: int, apart: bool = False) -> StepPlan:
    return StepPlan(index, 0, 0, sizes, ends_epoch=False, apart=apart)


def test_a_few_whole_steps_are_measured() -> None:
    settings = Settings(batches_per_step=4)
    noise = GradientNoise.of(settings, is_large=False)
    chosen = [i for i in range(4 * MEASURED_EVERY) if noise.wants(step(i, 32, 32, 32, 32))]
    assert len(chosen) == 4
    assert not noise.wants(step(chosen[0], 32, 32, 32))
    assert not noise.wants(step(chosen[0], 32, 32, 32, 7))
    assert not noise.wants(step(chosen[0], 32, 32, 32, 32, apart=True))
    of_large = GradientNoise.of(settings, is_large=True)
    assert len([i for i in range(4 * MEASURED_EVERY) if of_large.wants(step(i, 32, 32, 32, 32))]) == 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (Settings(mode="async"), "async mode"),
        (Settings(mode="async", batches_per_step=4), "async mode"),
        (Settings(batches_per_step=1), "one batch a step"),
        (Settings(robust="median"), "--robust"),
        (Settings(batches_per_step=STEP_BATCHES_MAX + 1), "more than 256"),
    ],
    ids=["async", "async with more", "one batch", "robust", "many"],
)
def test_where_it_cannot_be_measured_the_reason_is_told(settings: Settings, why: str) -> None:
    noise = GradientNoise.of(settings, is_large=False)
    assert not noise.wants(step(0, *[32] * settings.step_batches))
    assert noise.batches is None
    assert why in noise.text(2, 2)


# --- the sentence ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "batches", "nodes", "at_once", "told"),
    [
        (11.8, 8, 4, 4, (
            "12 batches a step are useful, if as many nodes share them; for 4 nodes 4 batches a step are"
            " best, and 8 are at 80 % of that; 4 more nodes with cores of their own would gain about 60 %"
        )),
        (3.9, 4, 4, 4, (
            "4 batches a step are useful, if as many nodes share them; for 4 nodes 4 batches a step are"
            " best, as now; 4 more nodes with cores of their own would gain about 33 %"
        )),
        (30.0, 4, 6, 6, (
            "30 batches a step are useful, if as many nodes share them; for 6 nodes 6 batches a step are"
            " best, and 4 are at 71 % of that; 6 more nodes with cores of their own would gain about 71 %"
        )),
        (8.0, 4, 10, 2, (
            "8 batches a step are useful, if as many nodes share them; for 2 nodes at a time 2 batches a"
            " step are best, and 4 are at 83 % of that; 2 more nodes with cores of their own would gain"
            " about 67 %"
        )),
        (0.1, 4, 1, 1, (
            "1 batch a step is useful; for 1 node 1 batch a step is best, and 4 are at 27 % of that;"
            " more nodes would gain little"
        )),
        (33.0, 4, 1, 1, (
            "33 batches a step are useful, if as many nodes share them; for 1 node 1 batch a step is best,"
            " and 4 are at 92 % of that; 1 more node with a core of its own would gain about 94 %"
        )),
        (1234.0, 4, 0, 0, "1,200 batches a step are useful, if as many nodes share them"),
    ],
)  # fmt: skip
def test_the_sentence_says_what_more_batches_and_nodes_would_gain(
    noise: float, batches: int, nodes: int, at_once: int, told: str
) -> None:
    assert noise_text(noise, batches, nodes, at_once) == f"gradient noise, an estimate: up to about {told}"
