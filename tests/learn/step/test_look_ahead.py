"""Weights that look ahead: the last movement goes on, and everything else is the version as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, RMSprop

from tests.learn import jobs
from tests.learn.jobs import make, mlp, settings
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.look_ahead import momentum_of
from w5xde.learn.step.sums import Contribution, StepNotFinite, Total

MOMENTUM = 0.9
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda params: SGD(params, lr=0.1, momentum=MOMENTUM),
    "adam": lambda params: Adam(params, lr=0.01, betas=(MOMENTUM, 0.99)),
    "fused adam": lambda params: Adam(params, lr=0.01, betas=(MOMENTUM, 0.99), fused=True),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "small, with buffers": mlp(lambda: nn.BatchNorm1d(16)),
    # More than 1 MiB: it is neither copied nor rolled back.
    "large": lambda: nn.Sequential(nn.Linear(6, 40_000), nn.Linear(40_000, 3)),
}


def learner_of(
    model: Callable[[], nn.Module] = MODELS["small, with buffers"],
    optimizer: Callable[[Any], Optimizer] = OPTIMIZERS["momentum"],
    **more: Any,
) -> Learner:
    return prepare(make(model, optimizer=optimizer, **more), settings(mode="async")).learner


def total(learner: Learner, seed: int, *, is_stretch: bool = False, scale: float = 1.0) -> Total:
    vector = learner.flat.blueprint.new_vector()
    vector.raw.zero_()
    generator = torch.Generator().manual_seed(seed)
    for part, group in zip(vector.parts, learner.flat.blueprint.moving_groups, strict=True):
        if part.dtype.is_floating_point and group.role == "trained":
            part.copy_(scale * torch.randn(part.shape, generator=generator))
    return Total(1, Contribution(vector, frozenset(), 1.0, learner.gauge.norm(vector)), is_stretch=is_stretch)


def step(learner: Learner, *seeds: int) -> None:
    with torch.no_grad():
        learner.apply([total(learner, seed) for seed in seeds])


def parts_of(learner: Learner, ahead: float, *, whole: bool = False) -> list[Tensor]:
    raw = torch.frombuffer(bytearray(learner.snapshot(whole=whole, ahead=ahead)), dtype=torch.uint8)
    groups = learner.flat.blueprint.groups if whole else learner.flat.blueprint.moving_groups
    return [group.values_in(raw) for group in groups]


def is_as_it_is(learner: Learner, ahead: float = 1.0) -> bool:
    return bytes(learner.snapshot(whole=True, ahead=ahead)) == bytes(learner.flat.snapshot(whole=True))


def wanted(learner: Learner) -> Learner:
    """Ask once, as the first lease of a run does: movements are kept from then on."""
    assert is_as_it_is(learner)
    return learner


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("ahead", "movements"), [(0.3, 0.6), (1.0, 2.0), (2.5, 3.5)])
@pytest.mark.parametrize("whole", [True, False])
def test_the_last_movement_goes_on_for_the_delay_and_one_update_times_the_momentum(
    model: Any, optimizer: Any, ahead: float, movements: float, whole: bool
) -> None:
    learner = wanted(learner_of(model, optimizer))
    for seed in range(3):
        before = [part.clone() for part in learner.flat.moving.parts]
        step(learner, seed)
    found = parts_of(learner, ahead, whole=whole)
    moving = learner.flat.blueprint.moving_groups
    for group, was, now, then in zip(moving, before, learner.flat.moving.parts, found, strict=False):
        if group.role == "trained":
            expected = now + MOMENTUM * movements * (now - was)
            torch.testing.assert_close(then, expected, rtol=1e-5, atol=1e-7)
            assert not torch.equal(then, now)
        else:
            assert torch.equal(then, now)
    for then, now in zip(
        found[len(moving) :], parts_of(learner, 0.0, whole=True)[len(moving) :], strict=True
    ):
        assert torch.equal(then, now)


def test_the_learner_itself_does_not_move() -> None:
    learner = wanted(learner_of())
    step(learner, 0)
    before = learner.weights_sha256()
    learner.snapshot(whole=True, ahead=3.0)
    assert learner.weights_sha256() == before
    assert is_as_it_is(learner, 0.0)


def test_steps_that_were_made_together_moved_by_their_mean() -> None:
    learner = wanted(learner_of())
    before = learner.flat.moving.parts[0].clone()
    step(learner, 0, 1)
    now = learner.flat.moving.parts[0]
    expected = now + MOMENTUM * 2 * (now - before) / 2
    torch.testing.assert_close(parts_of(learner, 1.0)[0], expected, rtol=1e-5, atol=1e-7)


def test_a_model_of_which_nobody_looks_ahead_keeps_no_copy_and_the_first_one_who_does_gets_it_as_it_is() -> (
    None
):
    learner = learner_of()
    step(learner, 0)
    step(learner, 1)
    assert is_as_it_is(learner)
    step(learner, 2)
    assert not is_as_it_is(learner)


@pytest.mark.parametrize(
    "optimizer", [lambda params: SGD(params, lr=0.1), lambda params: Adam(params, betas=(0.0, 0.99))]
)
def test_without_momentum_nothing_looks_ahead(optimizer: Any) -> None:
    learner = wanted(learner_of(optimizer=optimizer))
    for seed in range(3):
        step(learner, seed)
        assert is_as_it_is(learner)


def test_a_version_to_which_the_learner_was_rolled_back_looks_ahead_as_before() -> None:
    """A node may have been sent it, and what it computes is verified with these very bits."""
    learner, untroubled = wanted(learner_of()), wanted(learner_of())
    for seed in range(2):
        step(learner, seed)
        step(untroubled, seed)
    bad = total(learner, 2)
    bad.contribution.vector.parts[0].fill_(math.nan)
    broken = bad._replace(contribution=bad.contribution._replace(norm=math.inf))
    with torch.no_grad():
        _, error = learner.apply_all([broken, total(learner, 3)])
    assert isinstance(error, StepNotFinite)
    assert bytes(learner.snapshot(whole=True, ahead=1.0)) == bytes(untroubled.snapshot(whole=True, ahead=1.0))
    assert not is_as_it_is(learner)


def test_a_large_model_whose_buffers_refuse_a_step_looks_ahead_as_before() -> None:
    """The step failed before anything moved, so the version is the same: its weights ahead are too."""
    learner = wanted(learner_of(lambda: nn.Sequential(nn.Linear(6, 300_000), nn.BatchNorm1d(300_000))))
    step(learner, 1)
    before = bytes(learner.snapshot(whole=True, ahead=1.0))
    broken = total(learner, 2)
    for part, group in zip(
        broken.contribution.vector.parts, learner.flat.blueprint.moving_groups, strict=True
    ):
        if group.role == "moving" and part.dtype.is_floating_point:
            part.fill_(math.inf)
    with pytest.raises(StepNotFinite), torch.no_grad():
        learner.apply([broken])
    assert learner.is_whole
    assert bytes(learner.snapshot(whole=True, ahead=1.0)) == before


def test_nothing_looks_ahead_by_the_movement_of_a_stretch() -> None:
    learner = wanted(learner_of(mlp()))
    step(learner, 0)
    with torch.no_grad():
        learner.apply([total(learner, 1, is_stretch=True, scale=0.01)])
    assert is_as_it_is(learner)
    step(learner, 2)
    assert not is_as_it_is(learner)


@pytest.mark.parametrize("ahead", [1.0, 8.0])
def test_weights_that_would_be_infinite_are_not_sent(ahead: float) -> None:
    learner = wanted(learner_of())
    step(learner, 0)
    with torch.no_grad():
        learner.flat.moving.parts[0][0] = -3e38
    step(learner, 1)
    with torch.no_grad():
        learner.flat.moving.parts[0][0] = 3e38
    assert is_as_it_is(learner, ahead)


def test_parameters_of_every_dtype_look_ahead() -> None:
    class Every(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = jobs.Tied()
            self.low = nn.Parameter(torch.randn(3, 2).bfloat16())
            self.wave = nn.Parameter(torch.randn(2, dtype=torch.complex64))
            self.high = nn.Parameter(torch.randn(2, dtype=torch.float64))

        def forward(self, text: Tensor) -> Tensor:
            out: Tensor = self.tied(text) + self.low.sum() + self.wave.abs().sum() + self.high.sum()
            return out

    learner = wanted(learner_of(Every, data=jobs.tokens, loss=jobs.foretell))
    vector = learner.flat.blueprint.new_vector()
    vector.raw.zero_()
    for part in vector.parts:
        part.fill_(1)
    with torch.no_grad():
        learner.apply([Total(1, Contribution(vector, frozenset(), 1.0))])
    before = parts_of(learner, 0.0)
    assert [part.dtype for part in before] == [part.dtype for part in learner.flat.moving.parts]
    for now, then in zip(before, parts_of(learner, 1.0), strict=True):
        # They moved by -0.1.
        torch.testing.assert_close(then, now - torch.full_like(now, 0.18), rtol=0.02, atol=0.02)


def test_a_large_models_weights_stay_as_they_are_while_they_are_read_and_their_memory_is_used_again() -> None:
    learner = wanted(learner_of(MODELS["large"]))
    for seed in range(6):
        step(learner, seed)
        found = learner.read_state(whole=False, ahead=1.0)
        assert found is not None
        memory, done = found
        kept = bytes(memory)
        assert kept == bytes(learner.snapshot(whole=False, ahead=1.0))
        other = learner.read_state(whole=False, ahead=2.0)
        assert other is not None
        step(learner, 100 + seed)
        assert bytes(memory) == kept != bytes(other[0])
        done()
        other[1]()
    assert memory_places(learner) == 1


def memory_places(learner: Learner) -> int:
    """How many places in memory the weights of some versions are read from, if each is read at once."""
    places = set()
    for seed in range(6):
        step(learner, seed)
        found = learner.read_state(whole=False, ahead=1.0)
        assert found is not None
        places.add(torch.frombuffer(found[0], dtype=torch.uint8).data_ptr())
        found[1]()
    return len(places)


def test_the_momentum_of_an_optimizer_is_the_least_of_its_groups() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def of(optimizer: Optimizer) -> float:
        return momentum_of(optimizer)

    assert of(SGD([first], lr=0.1, momentum=0.8)) == 0.8
    assert of(SGD([first], lr=0.1)) == 0.0
    assert of(Adam([first], betas=(0.95, 0.999))) == 0.95
    assert of(RMSprop([first], momentum=0.5)) == 0.5
    assert of(Adagrad([first])) == 0.0
    both = [{"params": [first], "momentum": 0.9}, {"params": [second], "momentum": 0.5}]
    assert of(SGD(both, lr=0.1)) == 0.5
