"""Another learning rate in the middle of a run: the next step has it, and the schedule keeps its form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer, lr_scheduler

from w5xde.errors import UsageError
from w5xde.learn.rate.override import override_rates
from w5xde.learn.rate.rates import learning_rates
from w5xde.specs.rate_override import RateOverride

STEPS, CHANGED = 12, 5

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda opt: None,
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "step": lambda opt: lr_scheduler.StepLR(opt, 3, gamma=0.5),
    "multistep": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 7]),
    "exponential": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "polynomial": lambda opt: lr_scheduler.PolynomialLR(opt, 20),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 20),
    "restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 7),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, [0.5, 0.05], total_steps=STEPS + 1),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, [0.1, 0.01], [0.5, 0.05], step_size_up=4),
    "linear": lambda opt: lr_scheduler.LinearLR(opt, 0.1, total_iters=8),
    "warm-up": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(opt, 20)],
        [4],
    ),
    "chained": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, 3), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
}


def rates(schedule: Callable[[Optimizer], Any], override: RateOverride | None = None) -> list[list[float]]:
    """The rates of each step; the override comes after five of them."""
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.01}], lr=1.0)
    scheduler = schedule(optimizer)
    found = []
    for step in range(STEPS):
        if step == CHANGED and override is not None:
            override_rates(optimizer, scheduler, override)
        found.append(learning_rates(optimizer))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_scaled_from_the_changed_step_on(name: str) -> None:
    plain, changed = rates(SCHEDULES[name]), rates(SCHEDULES[name], RateOverride.parse("lr=x0.5"))
    assert changed[:CHANGED] == plain[:CHANGED]
    for before, after in zip(plain[CHANGED:], changed[CHANGED:], strict=True):
        assert after == pytest.approx([0.5 * rate for rate in before], rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_number_is_the_rate_of_the_next_step_in_every_group(name: str) -> None:
    plain, changed = rates(SCHEDULES[name]), rates(SCHEDULES[name], RateOverride.parse("lr=0.03"))
    assert changed[CHANGED] == [0.03, 0.03]
    for before, after in zip(plain[CHANGED:], changed[CHANGED:], strict=True):
        for group in (0, 1):
            expected = 0.03 * before[group] / plain[CHANGED][group]
            assert after[group] == pytest.approx(expected, rel=1e-9)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    override_rates(optimizer, None, RateOverride.parse("lr=0.25"))
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_a_schedule_that_has_come_to_zero_cannot_be_scaled() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    with pytest.raises(UsageError) as caught:
        override_rates(optimizer, scheduler, RateOverride.parse("lr=0.1"))
    assert caught.value.code == "W5-265"


def test_an_optimizer_without_a_rate_is_refused() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(UsageError) as caught:
        override_rates(optimizer, None, RateOverride.parse("lr=0.1"))
    assert caught.value.code == "W5-265"


@pytest.mark.parametrize("text", ["lr=0.001", "lr=x0.1", "lr=1e-05", "lr=x3.0"])
def test_what_is_written_down_is_read_again(text: str) -> None:
    override = RateOverride.parse(text)
    assert RateOverride.parse(str(override)) == override
