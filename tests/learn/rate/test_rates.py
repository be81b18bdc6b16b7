"""A step with a smaller rate is the optimizer's own step with that rate, and leaves the rate as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.learn.jobs import make, mlp, settings
from w5xde.errors import JobError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.sums import Contribution, Total

RATES = [1.0, 0.5, 1.0, 1 / 1.5, 0.25, 1.0]


class Drifting(Optimizer):
    """An optimizer that is not torch's: `p.data = p.data - lr * p.grad`, with a rate for each group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


class RateOfItsOwn(Optimizer):
    """As Adafactor in some libraries: the group has a rate of None, and the optimizer makes one itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - 0.01 * parameter.grad


class NoRate(RateOfItsOwn):
    """Its groups have no learning rate at all."""

    def __init__(self, params: Any) -> None:
        Optimizer.__init__(self, params, {})


def one_rate_of_two(params: Any) -> Optimizer:
    first, *others = params
    return RateOfItsOwn([{"params": [first], "lr": 0.3}, {"params": others}])


def two_groups(params: Any) -> Optimizer:
    first, *others = params
    return SGD([{"params": [first], "lr": 0.3}, {"params": others}], lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "two groups": two_groups,
    "adam": lambda params: Adam(params, lr=0.01),
    "fused": lambda params: Adam(params, lr=0.01, betas=(0.0, 0.99), fused=True),
    "adamw, a tensor for a rate": lambda params: AdamW(params, lr=torch.tensor(0.01)),
    "not torch's": lambda params: Drifting(params, lr=0.1),
}


def gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(each.shape, generator=generator) for each in model.parameters()]


def total(learner: Learner, step: int, rate: float) -> Total:
    vector = learner.flat.blueprint.new_vector()
    joined = torch.cat([each.reshape(-1) for each in gradients(learner.flat.module, step)])
    vector.parts[0].copy_(joined)
    return Total(1, Contribution(vector, frozenset(), 1.0, float(joined.norm())), rate)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("together", [True, False])
def test_each_step_has_its_own_rate(optimizer: Callable[[Any], Optimizer], together: bool) -> None:
    learner = prepare(make(mlp(), optimizer=optimizer), settings(mode="async")).learner
    plain = prepare(make(mlp(), optimizer=optimizer), settings()).learner.flat.module
    by_hand = optimizer(list(plain.parameters()))
    usual = [group["lr"] for group in by_hand.param_groups]
    for step, rate in enumerate(RATES):
        for parameter, gradient in zip(plain.parameters(), gradients(plain, step), strict=True):
            parameter.grad = gradient
        for group, lr in zip(by_hand.param_groups, usual, strict=True):
            group["lr"] = lr * rate
        by_hand.step()
    with torch.no_grad():
        totals = [total(learner, step, rate) for step, rate in enumerate(RATES)]
        for some in [totals] if together else [[each] for each in totals]:
            learner.apply(some)
    for ours, theirs in zip(learner.flat.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert [float(group["lr"]) for group in learner.optimizer.param_groups] == list(map(float, usual))
    assert learner.version == len(RATES)


def test_the_rate_is_restored_if_the_step_breaks() -> None:
    learner = prepare(make(mlp(), optimizer=OPTIMIZERS["adam"]), settings(mode="async")).learner
    with torch.no_grad():
        learner.apply([total(learner, 0, 0.5)])
        before = learner.weights_sha256()
        vector = total(learner, 1, 0.5).contribution.vector
        vector.parts[0].fill_(float("nan"))
        bad = Total(1, Contribution(vector, frozenset(), 1.0), 0.5)
        with pytest.raises(ArithmeticError):
            learner.apply([bad])
    assert learner.weights_sha256() == before
    assert [group["lr"] for group in learner.optimizer.param_groups] == [0.01]


def test_a_difference_is_added_times_its_rate_and_makes_a_version_for_each_batch() -> None:
    learner = prepare(make(mlp(), optimizer=OPTIMIZERS["adam"]), settings(mode="async")).learner
    before = [parameter.detach().clone() for parameter in learner.flat.module.parameters()]
    with torch.no_grad():
        given = total(learner, 3, 0.5)
        learner.apply([Total(8, given.contribution, 0.5, is_stretch=True)])
    for now, old, moved in zip(
        learner.flat.module.parameters(), before, gradients(learner.flat.module, 3), strict=True
    ):
        torch.testing.assert_close(now.detach(), old + 0.5 * moved)
    assert learner.version == 8


@pytest.mark.parametrize("optimizer", [RateOfItsOwn, NoRate, one_rate_of_two])
def test_late_updates_are_not_corrected_for_some_groups_alone(optimizer: Callable[[Any], Optimizer]) -> None:
    job = make(mlp(), optimizer=optimizer)
    with pytest.raises(JobError, match="learning rate") as found:
        prepare(job, settings(mode="async"))
    assert found.value.code == "W5-234"
    assert "--no-delay-correction" in str(found.value.fix)
    prepare(job, settings(mode="async", delay_correction=False))
    prepare(job, settings())


@pytest.mark.parametrize("optimizer", [RateOfItsOwn, NoRate])
def test_a_step_whose_rate_cannot_be_scaled_is_made_with_the_optimizers_own(
    optimizer: Callable[[Any], Optimizer],
) -> None:
    learner, other = (
        prepare(make(mlp(), optimizer=optimizer), settings(mode="async", delay_correction=False)).learner
        for _ in range(2)
    )
    with torch.no_grad():
        learner.apply([total(learner, 0, 0.5)])
        other.apply([total(other, 0, 1.0)])
    assert learner.weights_sha256() == other.weights_sha256()
