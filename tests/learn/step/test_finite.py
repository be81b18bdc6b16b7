"""How large updates are, and that a step which would leave infinities leaves nothing at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

from tests.learn.jobs import CLASSES, make, mlp, settings
from tests.learn.summing import fold
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.finite import Gauge, is_finite
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.sums import Contribution, StepNotFinite, Total, TreeSums
from w5xde.tree import Span


def learner_of(optimizer: Callable[[Any], Optimizer], **more: Any) -> Learner:
    layers = more.pop("layers", ())
    return prepare(make(mlp(*layers), optimizer=optimizer, **more), settings()).learner


def total(learner: Learner, size: float = 1.0, seed: int = 0) -> Total:
    vector = learner.flat.blueprint.new_vector()
    vector.raw.zero_()
    generator = torch.Generator().manual_seed(seed)
    for part, group in zip(vector.parts, learner.flat.blueprint.moving_groups, strict=True):
        if group.dtype.is_floating_point:
            part.copy_(torch.randn(part.shape, generator=generator) * size)
    return Total(1, Contribution(vector, frozenset(), 1.0, learner.gauge.norm(vector)))


def state_of(learner: Learner) -> list[Tensor]:
    kept = [value for each in learner.optimizer.state.values() for value in each.values()]
    tensors = [*learner.flat.moving.parts, *(v if isinstance(v, Tensor) else torch.tensor(v) for v in kept)]
    return [tensor.detach().clone() for tensor in tensors]


def are_same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# --- how large ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 14])
def test_a_norm_is_what_torch_says_alone_or_among_others(count: int) -> None:
    learner = learner_of(SGD_)
    wholes = [total(learner, 10.0**i, seed=i) for i in range(count)]
    body = bytearray(b"".join(bytes(w.contribution.vector.raw.numpy()) for w in wholes))
    found = learner.gauge.norms(body, learner.flat.blueprint.vectors(body, count))
    expected = [float(torch.linalg.vector_norm(w.contribution.vector.parts[0])) for w in wholes]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_whatever_is_not_finite_has_no_norm(bad: float, place: int) -> None:
    learner = learner_of(SGD_)
    wholes = [total(learner, seed=i) for i in range(5)]
    wholes[3].contribution.vector.parts[0][place] = bad
    body = bytearray(b"".join(bytes(w.contribution.vector.raw.numpy()) for w in wholes))
    found = learner.gauge.norms(body, learner.flat.blueprint.vectors(body, 5))
    assert [norm == math.inf for norm in found] == [False, False, False, True, False]


def test_a_buffer_that_is_not_finite_counts_too() -> None:
    learner = learner_of(SGD_, layers=[lambda: nn.BatchNorm1d(16)])
    whole = total(learner)
    assert learner.gauge.norm(whole.contribution.vector) < math.inf
    whole.contribution.vector.parts[1][0] = math.nan
    assert learner.gauge.norm(whole.contribution.vector) == math.inf


def test_what_is_finite_but_overflows_when_squared_has_a_norm() -> None:
    learner = learner_of(SGD_)
    whole = total(learner)
    whole.contribution.vector.parts[0][2] = 3e38
    body = bytearray(bytes(whole.contribution.vector.raw.numpy())) * 2
    assert learner.gauge.norms(body, learner.flat.blueprint.vectors(body, 2)) == pytest.approx(
        [3e38, 3e38], rel=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [5, 20_000])
def test_every_kind_of_number_is_looked_at(dtype: torch.dtype, count: int) -> None:
    numbers = torch.ones(count, dtype=dtype)
    assert is_finite(numbers)
    for bad in (math.nan, math.inf, -math.inf):
        numbers[count // 2] = bad
        assert not is_finite(numbers)


def test_a_gauge_knows_complex_numbers_and_those_of_few_bits() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.ones(3).bfloat16())
            self.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return self.low.float().sum() + self.wave.abs().sum() + 0 * x.sum()

    learner = prepare(make(Odd, loss=lambda model, batch: model(batch[0])), settings()).learner
    vector = learner.flat.blueprint.new_vector()
    vector.raw.zero_()
    gauge = Gauge(learner.flat.blueprint)
    for part in vector.parts:
        part.fill_(2)
    assert gauge.norm(vector) == pytest.approx(math.sqrt(4 * 5))
    vector.parts[1][0] = complex(math.nan, 0)
    assert gauge.norm(vector) == math.inf


# --- undone ---------------------------------------------------------------------------------------


def SGD_(params: Any) -> Optimizer:  # noqa: N802  (it is SGD, with a rate)
    return SGD(params, lr=0.1)


class Own(Optimizer):
    """Replaces its tensors, counts in plain numbers, and gives parameters other memory."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                state["count"] = state.get("count", 0) + 1
                p.data = p.data - group["lr"] * state["mean"] * 1e10


OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], float]] = {
    "sgd": (lambda params: SGD(params, lr=1e20), 1e30),
    "momentum": (lambda params: SGD(params, lr=1e-30, momentum=2.0), 3e38),
    "adam": (Adam, 1e30),
    "fused adam": (lambda params: Adam(params, fused=True), 1e30),
    "adamw": (lambda params: AdamW(params, fused=True), 1e30),
    "rmsprop": (lambda params: RMSprop(params, momentum=0.5), 1e30),
    "its own": (Own, 1e38),
}


@pytest.mark.parametrize("sound", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_spoils_the_state_is_rolled_back_to_the_bit(name: str, sound: int) -> None:
    make_optimizer, wild = OPTIMIZERS[name]
    learner, other = learner_of(make_optimizer), learner_of(make_optimizer)
    for each in (learner, other):
        for i in range(sound):
            each.apply([total(each, 1e-10, seed=i)])
    before = state_of(learner)
    _, spoiled = learner.apply_all([total(learner, wild, seed=9)])
    if spoiled is None:
        # Large enough to be the last that it bears.
        other.apply([total(other, wild, seed=9)])
        before = state_of(learner)
        _, spoiled = learner.apply_all([total(learner, wild, seed=9)])
    assert spoiled is not None
    assert learner.is_whole
    assert are_same(state_of(learner), before)
    # And it goes on as if nothing had been tried.
    for each in (learner, other):
        for i in range(3):
            each.apply([total(each, 1e-10, seed=20 + i)])
    assert learner.version == other.version
    assert are_same(state_of(learner), state_of(other))


@pytest.mark.parametrize("at", [0, 2, 4])
def test_of_many_steps_only_those_before_the_spoiled_one_are_made(at: int) -> None:
    learner, other = learner_of(OPTIMIZERS["fused adam"][0]), learner_of(OPTIMIZERS["fused adam"][0])
    sizes = [1.0] * 5
    sizes[at] = 1e30
    losses, spoiled = learner.apply_all([total(learner, size, seed=i) for i, size in enumerate(sizes)])
    assert len(losses) == at
    assert spoiled is not None
    assert f"step {at + 1} " in str(spoiled)
    for i in range(at):
        other.apply([total(other, seed=i)])
    assert are_same(state_of(learner), state_of(other))
    assert learner.version == at


def test_many_sound_steps_are_those_made_one_by_one() -> None:
    learner, other = learner_of(OPTIMIZERS["adam"][0]), learner_of(OPTIMIZERS["adam"][0])
    losses, spoiled = learner.apply_all([total(learner, seed=i) for i in range(6)])
    assert (losses, spoiled) == ([1.0] * 6, None)
    for i in range(6):
        other.apply([total(other, seed=i)])
    assert are_same(state_of(learner), state_of(other))


class Raising(SGD):
    """Raises in the middle of a step, when it has moved the first parameter, given it other memory."""

    is_broken = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.is_broken:
            first = self.param_groups[0]["params"][0]
            first.data = first.data + 1
            raise ValueError("broken")
        super().step(closure)


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_whose_optimizer_raises_is_undone_to_the_bit(count: int) -> None:
    learner = learner_of(lambda params: Raising(params, lr=0.1, momentum=0.5))
    learner.apply([total(learner)])
    before = state_of(learner)
    learner.optimizer.is_broken = True  # type: ignore[attr-defined]
    losses, error = learner.apply_all([total(learner, seed=i) for i in range(count)])
    assert (losses, str(error), learner.is_whole, learner.version) == ([], "broken", True, 1)
    assert are_same(state_of(learner), before)


def test_a_schedule_does_not_count_a_step_that_was_undone() -> None:
    learner = learner_of(lambda params: SGD(params, lr=1e20), scheduler=lambda o: StepLR(o, 1, gamma=0.5))
    learner.apply([total(learner, 1e-30)])
    with pytest.raises(StepNotFinite):
        learner.apply([total(learner, 1e30)])
    assert learner.optimizer.param_groups[0]["lr"] == 0.5e20


def test_a_mask_of_minus_infinity_is_no_reason_to_undo() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = mlp()()
            self.register_buffer("mask", torch.full((4,), -math.inf))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)  # type: ignore[no-any-return]

    learner = prepare(make(Masked), settings()).learner
    vector = learner.flat.blueprint.new_vector()
    vector.raw.zero_()
    learner.apply([Total(1, Contribution(vector, frozenset(), 1.0, 0.0))])
    assert learner.version == 1


def test_a_large_model_is_not_copied_and_says_that_it_could_not_be_undone() -> None:
    learner = prepare(
        make(
            lambda: nn.Sequential(mlp()(), nn.Linear(CLASSES, 70_000), nn.Linear(70_000, CLASSES)),
            optimizer=lambda p: SGD(p, lr=10),
        ),
        settings(),
    ).learner
    assert not learner.can_roll_back
    learner.apply([total(learner, 1e-3)])
    with pytest.raises(StepNotFinite):
        learner.apply([total(learner, 3e38, seed=2)])
    assert not learner.is_whole


def test_a_sum_of_tame_parts_is_finite_without_a_look() -> None:
    learner = learner_of(SGD_)
    sums = TreeSums(learner.flat.blueprint, learner.gauge)
    for place in range(2):
        step = fold(sums, 0, 2, Span(place, place + 1), total(learner, seed=place).contribution)
    whole = sums.total(step)
    real = float(torch.linalg.vector_norm(whole.contribution.vector.parts[0]))
    assert real <= whole.contribution.norm
