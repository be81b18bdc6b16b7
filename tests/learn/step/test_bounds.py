"""What is proved about a step before it is made is true after it, and costs no copy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from tests.learn.jobs import make, mlp, settings
from tests.learn.step.test_finite import are_same, state_of, total
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.bounds import LARGEST, StateBounds
from w5xde.learn.step.rollback import Undo
from w5xde.learn.step.sums import StepNotFinite
from w5xde.messages import MOVING

MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p, r, lr: SGD(p, lr=lr, weight_decay=r.choice([0.0, 0.1, 2.0])),
    "momentum": lambda p, r, lr: SGD(
        p, lr=lr, momentum=r.choice([0.5, 0.99, 1.5]), dampening=r.choice([0.0, 0.5])
    ),
    "nesterov": lambda p, r, lr: SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p, r, lr: Adam(p, lr=lr, betas=(r.choice([0.0, 0.9, 0.999]), r.choice([0.5, 0.999]))),
    "adam with decay": lambda p, r, lr: Adam(p, lr=lr, weight_decay=r.choice([1e-4, 1.0]), amsgrad=True),
    "adamw": lambda p, r, lr: AdamW(p, lr=lr, eps=r.choice([1e-8, 1e-20]), weight_decay=r.choice([0.0, 3.0])),
    "fused adamw": lambda p, r, lr: AdamW(p, lr=lr, fused=True),
}


def largest_of(optimizer: Optimizer) -> float:
    tensors = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    tensors += [v for kept in optimizer.state.values() for v in kept.values() if isinstance(v, Tensor)]
    largest = max(float(tensor.abs().max()) for tensor in tensors)
    return largest if all(bool(tensor.isfinite().all()) for tensor in tensors) else math.nan


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("seed", range(40))
def test_steps_that_are_allowed_leave_finite_numbers(name: str, seed: int) -> None:
    chance = random.Random(f"{name} {seed}")
    weights = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(seed)))
    weights.data *= 10.0 ** chance.uniform(-3, 30)
    optimizer = MAKERS[name]([weights], chance, 10.0 ** chance.uniform(-6, 6))
    bounds = StateBounds(optimizer, [weights.detach()])
    size = chance.uniform(-10, 16)
    version = 0
    for allowed in range(30):
        count = chance.choice([1, 1, 3])
        gradients = [torch.randn(50) * 10.0 ** (size + chance.uniform(-2, 2)) for _ in range(count)]
        norms = [float(gradient.double().norm()) for gradient in gradients]
        if not bounds.allow(version, norms, [weights.detach()]):
            return
        for gradient in gradients:
            weights.grad = gradient
            optimizer.step()
        version += count
        assert largest_of(optimizer) < LARGEST, (allowed, norms)


@pytest.mark.parametrize("name", MAKERS)
def test_usual_steps_are_allowed_for_ever_and_measured_seldom(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = nn.Parameter(torch.randn(50))
    chance = random.Random(0)
    chance.choice = lambda options: options[0]  # type: ignore[method-assign, assignment]
    optimizer = MAKERS[name]([weights], chance, 0.01)
    measured = []
    look = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda tensor: (measured.append(1), look(tensor))[1])
    bounds = StateBounds(optimizer, [weights.detach()])
    for step in range(1000):
        weights.grad = torch.randn(50)
        assert bounds.allow(step, [float(weights.grad.norm())], [weights.detach()])
        optimizer.step()
    # With decay in the gradient of Adam the bound grows fast: three tensors every few steps.
    assert len(measured) <= (1 if name != "adam with decay" else 4 * 1000 / 5)


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_what_is_not_a_number_is_never_allowed(wrong: float) -> None:
    weights = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weights])
    assert not StateBounds(optimizer, [weights.detach()]).allow(0, [wrong], [weights.detach()])
    optimizer.param_groups[0]["lr"] = wrong
    assert not StateBounds(optimizer, [weights.detach()]).allow(0, [1.0], [weights.detach()])
    optimizer.param_groups[0]["lr"] = 0.1
    weights.data[1] = wrong
    assert not StateBounds(optimizer, [weights.detach()]).allow(0, [1.0], [weights.detach()])


@pytest.mark.parametrize("name", ["an eps of zero", "rmsprop", "a hook", "half precision"])
def test_what_is_not_known_is_not_allowed(name: str) -> None:
    dtype = torch.float16 if name == "half precision" else torch.float32
    weights = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer: Optimizer = Adam([weights], eps=0.0 if name == "an eps of zero" else 1e-8)
    if name == "rmsprop":
        optimizer = RMSprop([weights])
    if name == "a hook":
        optimizer.register_step_post_hook(lambda *_: None)
    assert not StateBounds(optimizer, [weights.detach()]).allow(0, [1.0], [weights.detach()])


def test_a_step_that_is_allowed_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = prepare(make(mlp(), optimizer=AdamW), settings()).learner

    def refuse(*given: Any) -> None:
        raise AssertionError("the state was copied")

    monkeypatch.setattr(Undo, "save", refuse)
    for step in range(5):
        learner.apply([total(learner, seed=step)])
    assert learner.version == 5


def test_buffers_that_overflow_change_nothing_at_all() -> None:
    learner = prepare(make(mlp(lambda: nn.BatchNorm1d(16)), optimizer=AdamW), settings()).learner
    learner.apply([total(learner)])
    wild = total(learner, 1e-3)
    for part, group in zip(wild.contribution.vector.parts, learner.flat.blueprint.moving_groups, strict=True):
        if group.role == MOVING and group.dtype.is_floating_point:
            part.fill_(3e38)
    learner.apply([wild])  # the most that a float32 holds
    before = state_of(learner)
    with pytest.raises(StepNotFinite, match="buffer"):
        learner.apply([wild])
    assert learner.is_whole
    assert are_same(state_of(learner), before)
