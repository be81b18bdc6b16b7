"""A learner that was kept goes on as if nothing had happened, bit by bit; what does not fit is named."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, lr_scheduler

from tests.learn import jobs
from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import Node
from tests.learn.states import content_of
from tests.learn.step.test_checkpoint_values import same
from tests.learn.summing import Complete, Lent
from w5xde import Job
from w5xde.config import Settings
from w5xde.control.steps.plan import Plan
from w5xde.errors import JobError, StorageError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.checkpoint import capture, refuse_unkeepable, restore
from w5xde.learn.step.learner import Learner
from w5xde.tree import Span

STEPS_AFTER = 100
STOPS = 20


class Training:
    """One learner and one node, from a version on."""

    def __init__(self, job: Job, settings: Settings, files: dict[str, bytes] | None = None) -> None:
        prepared = prepare(job, settings)
        self.learner: Learner = prepared.learner
        self._sums = prepared.sums
        self._source = prepared.source
        # Really the node is another process: what it draws is not the learner's chance.
        self._node = Node(job, prepared)
        if files is not None:
            restore(self.learner, files)
        plan = Plan(
            step_batches=settings.step_batches,
            epoch_limit=None,
            step_limit=None,
            samples=prepared.source.samples,
            batch_size=settings.batch_size,
        )
        for _ in range(self.learner.version):
            plan.next_step()
        self._plan = plan

    def step(self) -> str:
        """One more step; returns the weights' hash after it."""
        plan = self._plan.next_step()
        assert plan is not None
        whole = Span(0, plan.count)
        with torch.random.fork_rng():
            given = self._node.compute(self.learner, self._source, plan, whole)
        self._sums.add(Lent(0, plan, whole), given, 0)
        self.learner.apply([self._sums.total(Complete(plan))])
        return self.learner.weights_sha256()

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]


SMALL = settings(batches_per_step=2, clip_norm=1.0)


def noisy_mlp() -> nn.Module:
    return mlp(lambda: nn.BatchNorm1d(16), lambda: nn.Dropout(0.2))()


def test_from_any_of_twenty_steps_the_next_hundred_are_the_same_bit_by_bit() -> None:
    job = make(
        noisy_mlp,
        optimizer=lambda params: Adam(params, lr=0.01),
        scheduler=lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 150),
    )
    stops = sorted(random.Random(5).sample(range(STEPS_AFTER), STOPS))
    whole = Training(job, SMALL)
    kept, hashes = {}, []
    for version in range(2 * STEPS_AFTER):
        if version in stops:
            kept[version] = content_of(capture(whole.learner))
        hashes.append(whole.step())
    for version, files in kept.items():
        resumed = Training(job, SMALL, files)
        assert resumed.learner.version == version
        assert resumed.steps(STEPS_AFTER) == hashes[version : version + STEPS_AFTER], version


def goes_on_alike(job: Job, settings: Settings = SMALL, *, before: int = 7, after: int = 12) -> Learner:
    """What is restored goes on like what it was taken from, and is then the same in everything."""
    first = Training(job, settings)
    first.steps(before)
    state = capture(first.learner)
    files = content_of(state)
    assert state.weights_sha256() == first.learner.weights_sha256()
    expected = first.steps(after)
    assert len(set(expected)) > 1, "nothing was trained, so nothing is shown"
    second = Training(job, settings, files)
    assert second.steps(after) == expected
    assert same(second.learner.optimizer.state_dict(), first.learner.optimizer.state_dict())
    if first.learner.scheduler is not None:
        assert same(second.learner.scheduler.state_dict(), first.learner.scheduler.state_dict())
    assert bytes(second.learner.snapshot(whole=True)) == bytes(first.learner.snapshot(whole=True))
    return second.learner


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda params: Adam(params, lr=0.01),
    "AdamW amsgrad": lambda params: AdamW(params, lr=0.01, amsgrad=True),
    "AdamW with a tensor for a rate": lambda params: AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "RMSprop": lambda params: RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda params: Adagrad(params, lr=0.05),
    "Adafactor": lambda params: Adafactor(params, lr=0.05),
    "NAdam": lambda params: NAdam(params, lr=0.01),
    "groups": lambda params: SGD(
        [
            {"params": [p], "lr": 0.05 / (i + 1), "momentum": 0.9, "weight_decay": 0.1 * i}
            for i, p in enumerate(params)
        ]
    ),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 5, 9], 0.7),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 15),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=30),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[5],
    ),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.001, 0.01, step_size_up=4, cycle_momentum=False
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_alike(name: str) -> None:
    goes_on_alike(make(noisy_mlp, optimizer=OPTIMIZERS[name]))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_alike(name: str) -> None:
    goes_on_alike(make(mlp(), optimizer=OPTIMIZERS["Adam"], scheduler=SCHEDULERS[name]))


# --- unusual states and models --------------------------------------------------------------------


class Thrifty(Optimizer):
    """Keeps its state in other types than its parameters', and draws from three generators."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["exact"] = torch.zeros_like(parameter, dtype=torch.float64)
                    state["seen"] = torch.zeros((), dtype=torch.int64)
                    state["flags"] = torch.zeros(3, dtype=torch.bool)
                    state["nothing"] = torch.empty(0, 2)
                    state["notes"] = {"history": [], "best": (math.inf, -0.0), 3: None}
                noise = torch.randn(()) + random.gauss(0, 1) + np.random.normal()  # noqa: NPY002
                state["momentum"].mul_(0.9).add_(parameter.grad.bfloat16())
                state["exact"].add_(parameter.grad.double())
                state["seen"] += 1
                state["flags"][int(state["seen"]) % 3] ^= True
                state["notes"]["history"].append(2**70 + int(state["seen"]))
                total = state["momentum"].float() + state["exact"].float() * 0.1 + noise * 0.01
                parameter.data.sub_(group["lr"] * total)


def test_an_optimizers_state_keeps_its_types_and_its_chance() -> None:
    learner = goes_on_alike(make(mlp(), optimizer=Thrifty))
    for state in learner.optimizer.state.values():
        dtypes = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
        assert dtypes == {
            "momentum": torch.bfloat16,
            "exact": torch.float64,
            "seen": torch.int64,
            "flags": torch.bool,
            "nothing": torch.float32,
        }
        assert state["notes"]["history"][-1] == 2**70 + 19


class Every(nn.Module):
    """Every dtype a state dict may hold, tied and frozen weights, scalars and an empty tensor."""

    seen: Tensor
    flag: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tied = jobs.Tied()
        self.low = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.wave = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("exact", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("table", torch.linspace(0, 1, 5000))

    def forward(self, text: Tensor) -> Tensor:
        self.seen += 1
        self.mean = self.mean * 0.9 + text.float().mean().bfloat16()
        whole = self.low.float().sum() + self.wave.abs().sum() + self.scalar.float()
        return self.tied(text) * (whole + self.mean.float().sum() + self.frozen.sum())


def every_job() -> Job:
    return make(Every, data=jobs.tokens, loss=jobs.foretell, optimizer=OPTIMIZERS["SGD"])


def test_every_type_of_weight_and_buffer_comes_back_as_it_was() -> None:
    learner = goes_on_alike(every_job())
    assert learner.flat.module.get_parameter("tied.decoder.weight") is learner.flat.module.get_parameter(
        "tied.embedding.weight"
    )


def test_every_bit_of_the_model_comes_back_even_those_that_are_no_numbers() -> None:
    learner = prepare(every_job(), SMALL).learner
    learner.flat.state.random_(generator=torch.Generator().manual_seed(3))
    learner.flat.module.get_buffer("flag").copy_(torch.tensor([False, True]))
    other = prepare(every_job(), SMALL).learner
    restore(other, content_of(capture(learner)))
    for (name, tensor), found in zip(
        learner.flat.module.state_dict().items(), other.flat.module.state_dict().values(), strict=True
    ):
        assert same(tensor, found), name


def test_a_capture_stays_as_it_is_while_the_learner_goes_on() -> None:
    training = Training(make(noisy_mlp, optimizer=OPTIMIZERS["Adam"]), SMALL)
    training.steps(3)
    state = capture(training.learner)
    before = content_of(state)
    training.steps(3)
    assert content_of(state) == before


# --- what does not fit ----------------------------------------------------------------------------


def plain(**changes: Any) -> Job:
    parts = {"optimizer": OPTIMIZERS["Adam"], "scheduler": SCHEDULERS["StepLR"]} | changes
    return make(parts.pop("model", mlp()), **parts)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(jobs.FEATURES, 17), nn.ReLU(), nn.Linear(17, jobs.CLASSES))


def grouped(params: Any) -> Optimizer:
    first, *rest = params
    return Adam([{"params": [first]}, {"params": rest}], lr=0.01)


OTHERS = {
    r"parameter 0\.weight \(17, 6\) float32, expected \(16, 6\) float32": plain(model=wide),
    r"parameter missing 0\.weight": plain(model=lambda: nn.Sequential(nn.Flatten(), *mlp()())),
    "the optimizer is SGD, expected Adam": plain(optimizer=OPTIMIZERS["SGD"]),
    r"the optimizer's lr is 0\.02, expected 0\.01": plain(optimizer=lambda params: Adam(params, lr=0.02)),
    r"the optimizer's amsgrad is True, expected False": plain(
        optimizer=lambda params: Adam(params, lr=0.01, amsgrad=True)
    ),
    "the scheduler is CosineAnnealingLR, expected StepLR": plain(scheduler=SCHEDULERS["CosineAnnealingLR"]),
    "the scheduler is none, expected StepLR": plain(scheduler=None),
    r"the optimizer's groups have \[1, 3\] parameters, expected \[4\]": plain(optimizer=grouped),
}


@pytest.mark.parametrize("words", OTHERS)
def test_a_job_that_does_not_fit_is_refused_by_the_first_difference(words: str) -> None:
    files = content_of(capture(prepare(plain(), SMALL).learner))
    learner = prepare(OTHERS[words], SMALL).learner
    before = learner.weights_sha256()
    with pytest.raises(StorageError, match=words) as refused:
        restore(learner, files)
    assert refused.value.code == "W5-405"
    assert refused.value.fix
    assert (learner.weights_sha256(), learner.version) == (before, 0)


def test_many_differences_are_counted_not_listed() -> None:
    files = content_of(capture(prepare(plain(), SMALL).learner))
    other = prepare(plain(model=wide, optimizer=grouped), SMALL).learner
    with pytest.raises(StorageError, match=r"(?m)and 1 more$"):
        restore(other, files)


class Secretive(SGD):
    """Keeps something that nobody can write down."""

    def __init__(self, params: Any, secret: Any) -> None:
        super().__init__(params, lr=0.1)
        self.secret = secret

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"secret": self.secret}


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        (object(), "optimizer.secret is a object"),
        ([1, {"deep": ({1, 2},)}], r"optimizer\.secret\.1\.deep\.0 is a set"),
        ({(1, 2): 3}, r"optimizer\.secret has a key \(1, 2\)"),
        (lambda: 0, "optimizer.secret is a function"),
        (b"bytes", "optimizer.secret is a bytes"),
        (1j, "optimizer.secret is a complex"),
    ],
)
def test_what_no_checkpoint_can_keep_is_named_before_training(secret: Any, words: str) -> None:
    learner = prepare(make(mlp(), optimizer=lambda params: Secretive(params, secret)), SMALL).learner
    for tell in (refuse_unkeepable, capture):
        with pytest.raises(JobError, match=words) as refused:
            tell(learner)
        assert refused.value.code == "W5-232"
