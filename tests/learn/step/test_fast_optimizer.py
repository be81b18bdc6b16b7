"""Quick steps: the very bits of `optimizer.step()`, and always the optimizer's own state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

from w5xde.learn.model import parallel
from w5xde.learn.model.layout import FlatModel, describe
from w5xde.learn.step import flat_steps
from w5xde.learn.step.fast_optimizer import ELEMENT_WISE, Stepper

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "fused adam": lambda m: Adam(m.parameters(), lr=0.01, fused=True),
    "fused adam with decay": lambda m: Adam(m.parameters(), lr=0.01, weight_decay=0.1, fused=True),
    "fused adamw": lambda m: AdamW(m.parameters(), lr=0.01, fused=True, maximize=True),
    "fused adam, decoupled": lambda m: Adam(
        m.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, fused=True
    ),
    "fused amsgrad": lambda m: Adam(m.parameters(), lr=0.01, fused=True, amsgrad=True),
    "fused sgd": lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9, fused=True),
    "adam": lambda m: Adam(m.parameters(), lr=0.01),
    "adam for each": lambda m: Adam(m.parameters(), lr=0.01, foreach=True),
    "amsgrad with decay": lambda m: Adam(m.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.01),
    "sgd": lambda m: SGD(m.parameters(), lr=0.01),
    "sgd with momentum": lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9),
    "sgd with everything": lambda m: SGD(
        m.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True
    ),
    "sgd with decay": lambda m: SGD(m.parameters(), lr=0.01, weight_decay=0.1),
    "rmsprop": lambda m: RMSprop(m.parameters(), lr=0.01, momentum=0.9, centered=True),
    "two groups, fused": lambda m: Adam(
        [{"params": [m[0].weight], "lr": 0.1}, {"params": [m[0].bias, *m[2].parameters()]}], fused=True
    ),
    "two groups": lambda m: AdamW(
        [{"params": [m[0].weight, m[2].weight], "lr": 0.1}, {"params": [m[2].bias, m[0].bias]}]
    ),
    "a group without one": lambda m: AdamW([m[0].bias, m[2].weight, m[2].bias], lr=0.01),
} | {
    f"plain {kind.__name__}": lambda m, kind=kind: kind(m.parameters(), lr=0.01)  # type: ignore[misc]
    for kind in ELEMENT_WISE
}
# Of these we do not know the kernels.
AS_USUAL = ("fused amsgrad", "fused sgd")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


class Race:
    """Two like models: one steps as a plain loop does, the other in flat memory."""

    def __init__(self, make: Callable[[nn.Module], Optimizer], of: Callable[[], nn.Module] = model) -> None:
        self.plain, self.quick = of(), of()
        self.flat = FlatModel(self.quick, describe(self.quick, set()))
        self.optimizers = make(self.plain), make(self.quick)
        self.stepper = Stepper(self.optimizers[1], self.flat)
        self.quick_steps = 0

    def step(self, seed: int, *, skipped: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        gradients = self.flat.blueprint.new_vector()
        for number, (parameter, offset) in enumerate(
            zip(self.plain.parameters(), self.flat.blueprint.offsets, strict=True)
        ):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = gradient if number != skipped else None
            gradients.raw[offset : offset + gradient.nbytes] = gradient.view(-1).view(torch.uint8)
        absent = frozenset() if skipped is None else frozenset([skipped])
        with torch.no_grad():
            self.quick_steps += self.stepper.step(gradients.parts, absent)
        self.optimizers[0].step()

    @property
    def is_level(self) -> bool:
        pairs = zip(self.plain.parameters(), self.quick.parameters(), strict=True)
        states = [str(optimizer.state_dict()) for optimizer in self.optimizers]
        return all(torch.equal(a, b) for a, b in pairs) and states[0] == states[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedules", [False, True])
def test_quick_steps_give_the_same_bits_and_state(name: str, schedules: bool) -> None:
    race = Race(OPTIMIZERS[name])
    schedulers = [StepLR(each, 3, 0.5) for each in race.optimizers] if schedules else []
    for step in range(12):
        # In the middle one parameter has no gradient for once.
        race.step(step, skipped=1 if step == 6 else None)
        for scheduler in schedulers:
            scheduler.step()
        assert race.is_level, step
    # The first step, the one with a gap, and the two after it are made as usual.
    assert race.quick_steps == (0 if name in AS_USUAL else 8)


@pytest.mark.parametrize("kind", ELEMENT_WISE)
@pytest.mark.parametrize("numbers", [1, 5, 16, 33, 100])
def test_pieces_may_end_anywhere(
    kind: type[Optimizer], numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_steps, "PIECE_NUMBERS", numbers)
    race = Race(lambda m: kind(m.parameters(), lr=0.01))  # type: ignore[call-arg]
    for step in range(8):
        race.step(step)
    assert race.is_level
    assert race.quick_steps == 7


def odd_model() -> nn.Sequential:
    """Tensors of every length up to two vector registers, and two dtypes."""
    torch.manual_seed(1)
    layers = [nn.Linear(1, length) for length in range(1, 36)]
    return nn.Sequential(*layers, nn.Linear(9, 7).double(), nn.PReLU())


@pytest.mark.parametrize("name", ["adam", "adamw", "adam for each", "sgd with everything", "plain NAdam"])
def test_many_tensors_of_every_length_have_the_same_bits(name: str) -> None:
    race = Race(OPTIMIZERS[name], odd_model)
    for step in range(6):
        race.step(step)
    assert race.is_level
    assert race.quick_steps == 5


def test_parameters_that_never_have_a_gradient_do_not_make_steps_slow() -> None:
    race = Race(OPTIMIZERS["adamw"])
    for step in range(6):
        race.step(step, skipped=1)
    assert race.is_level
    assert race.quick_steps == 5


def test_a_hook_that_is_added_later_is_called() -> None:
    race = Race(OPTIMIZERS["adamw"])
    called = []
    for step in range(3):
        race.step(step)
    race.optimizers[1].register_step_post_hook(lambda *args: called.append(1))
    race.step(3)
    assert called == [1]
    assert race.is_level


@pytest.mark.parametrize("skipped", [None, 3])
@pytest.mark.parametrize("name", ["fused adam", "adamw"])
def test_a_state_that_is_loaded_later_is_the_one_that_counts(name: str, skipped: int | None) -> None:
    race = Race(OPTIMIZERS[name])
    kept: dict[str, Any] = {}
    for step in range(4):
        race.step(step, skipped=skipped)
        if step == 1:
            kept = copy.deepcopy(race.optimizers[0].state_dict())
    for optimizer in race.optimizers:
        optimizer.load_state_dict(copy.deepcopy(kept))
    for step in range(9, 12):
        race.step(step, skipped=skipped)
        assert race.is_level


def test_parameters_keep_their_own_counters_if_another_group_has_no_gradient() -> None:
    race = Race(
        lambda m: Adam([{"params": [*m[0].parameters(), m[2].weight]}, {"params": [m[2].bias]}], fused=True)
    )
    for step in range(4):
        race.step(step, skipped=3)
        assert race.is_level, step


@pytest.mark.parametrize("option", ["weight_decay", "momentum", "nesterov"])
def test_what_is_set_later_counts_from_then_on(option: str) -> None:
    race = Race(lambda m: SGD(m.parameters(), lr=0.01, momentum=0.5 if option == "nesterov" else 0.0))
    for step in range(6):
        if step == 3:
            for optimizer in race.optimizers:
                optimizer.param_groups[0][option] = 0.9
        race.step(step)
    assert race.is_level


@pytest.mark.parametrize("name", ["fused adam", "adamw"])
def test_a_model_that_moved_in_memory_is_stepped_where_it_is(name: str) -> None:
    race = Race(OPTIMIZERS[name])
    for step in range(2):
        race.step(step)
    before = race.flat.state
    kept = before.clone()
    race.flat.move()
    race.step(2)
    assert race.is_level
    assert race.quick_steps == 2
    assert torch.equal(before, kept)


def test_a_parameter_that_left_the_flat_memory_is_stepped_as_usual() -> None:
    race = Race(OPTIMIZERS["fused adam"])
    race.step(0)
    race.quick[0].weight.data = race.quick[0].weight.data.clone()
    race.step(1)
    assert race.quick_steps == 0
    assert race.is_level


@pytest.mark.parametrize("name", ["fused adam", "fused adamw", "fused adam, decoupled", "two groups, fused"])
def test_fused_steps_of_shares_on_all_cores_have_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long parameter is cut where the kernel begins anew in any case, and ends where it always does."""
    for module in (parallel, flat_steps):
        monkeypatch.setattr(module, "SHARE_NUMBERS", 64)

    def long_model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(61, 13), nn.Tanh(), nn.Linear(13, 5))

    race = Race(OPTIMIZERS[name], long_model)
    for step in range(6):
        race.step(step)
    assert race.is_level
    assert race.quick_steps == 5
