"""Quick steps: the very bits of `optimizer.step()`, and always the optimizer's own state."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

from w5xde.learn.step.fast_optimizer import Stepper

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "fused adam": lambda m: Adam(m.parameters(), lr=0.01, fused=True),
    "fused adam with decay": lambda m: Adam(m.parameters(), lr=0.01, weight_decay=0.1, fused=True),
    "fused adamw": lambda m: AdamW(m.parameters(), lr=0.01, fused=True, maximize=True),
    "fused adam, decoupled": lambda m: Adam(
        m.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, fused=True
    ),
    "fused amsgrad": lambda m: Adam(m.parameters(), lr=0.01, fused=True, amsgrad=True),
    "adam": lambda m: Adam(m.parameters(), lr=0.01),
    "sgd": lambda m: SGD(m.parameters(), lr=0.01),
    "sgd with momentum": lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9),
    "sgd with decay": lambda m: SGD(m.parameters(), lr=0.01, weight_decay=0.1),
    "rmsprop": lambda m: RMSprop(m.parameters(), lr=0.01),
    "two groups": lambda m: Adam(
        [{"params": [m[0].weight], "lr": 0.1}, {"params": [m[0].bias, *m[2].parameters()]}], fused=True
    ),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


def set_gradients(module: nn.Module, step: int, *, skipped: int | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(module.parameters()):
        gradient = torch.randn(parameter.shape, generator=generator)
        if number == skipped:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


def same(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedules", [False, True])
def test_quick_steps_give_the_same_bits(name: str, schedules: bool) -> None:
    plain, quick = model(), model()
    optimizers = OPTIMIZERS[name](plain), OPTIMIZERS[name](quick)
    schedulers = [StepLR(each, 3, 0.5) for each in optimizers] if schedules else []
    stepper = Stepper(optimizers[1], list(quick.parameters()))
    for step in range(12):
        for module in (plain, quick):
            # In the middle one parameter has no gradient for once.
            set_gradients(module, step, skipped=1 if step == 6 else None)
        optimizers[0].step()
        stepper.step()
        for scheduler in schedulers:
            scheduler.step()
        assert same(plain, quick), step
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert str(states[0]) == str(states[1])


def test_a_hook_that_is_added_later_is_called() -> None:
    module = model()
    optimizer = Adam(module.parameters(), fused=True)
    stepper = Stepper(optimizer, list(module.parameters()))
    called = []
    for step in range(3):
        set_gradients(module, step)
        stepper.step()
    optimizer.register_step_post_hook(lambda *args: called.append(1))
    set_gradients(module, 3)
    stepper.step()
    assert called == [1]


def test_a_state_that_is_loaded_later_is_the_one_that_counts() -> None:
    plain, quick = model(), model()
    optimizers = [Adam(module.parameters(), fused=True) for module in (plain, quick)]
    stepper = Stepper(optimizers[1], list(quick.parameters()))
    for step in range(4):
        for module in (plain, quick):
            set_gradients(module, step)
        optimizers[0].step()
        stepper.step()
        if step == 1:
            kept = copy.deepcopy(optimizers[0].state_dict())
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(kept))
    for module in (plain, quick):
        set_gradients(module, 9)
    optimizers[0].step()
    stepper.step()
    assert same(plain, quick)


def test_what_is_set_later_counts_from_then_on() -> None:
    plain, quick = model(), model()
    optimizers = [SGD(module.parameters(), lr=0.01) for module in (plain, quick)]
    stepper = Stepper(optimizers[1], list(quick.parameters()))
    for step in range(6):
        for module, optimizer in zip((plain, quick), optimizers, strict=True):
            set_gradients(module, step)
            if step == 3:
                optimizer.param_groups[0]["weight_decay"] = 1.0
        optimizers[0].step()
        stepper.step()
    assert same(plain, quick)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_with_rows_that_lie_elsewhere_have_the_same_bits(name: str) -> None:
    plain, quick = model(), model()
    optimizers = OPTIMIZERS[name](plain), OPTIMIZERS[name](quick)
    stepper = Stepper(optimizers[1], list(quick.parameters()))
    quickly = 0
    for step in range(12):
        set_gradients(plain, step)
        optimizers[0].step()
        if stepper.is_known():
            quickly += 1
            # Anywhere in memory, as they come.
            rows = [torch.cat([torch.zeros(step), p.grad.reshape(-1)])[step:] for p in plain.parameters()]
            with torch.no_grad():
                stepper.step_with(rows)
        else:
            set_gradients(quick, step)
            stepper.step()
        assert same(plain, quick), step
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert str(states[0]) == str(states[1])
    is_quick = "fused" in name and "amsgrad" not in name
    assert quickly == (11 if is_quick or name in ("sgd", "two groups") else 0)


def test_parameters_that_moved_in_memory_are_not_stepped_where_they_were() -> None:
    module = model()
    stepper = Stepper(Adam(module.parameters(), fused=True), list(module.parameters()))
    set_gradients(module, 0)
    stepper.step()
    assert stepper.is_known()
    module[0].weight.data = module[0].weight.data.clone()
    assert not stepper.is_known()
