"""Models under torch.compile: recording steps aside by itself, and batches are computed as always.

Torch's compiler changes its process for good, so each test runs in a fork.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.learn import jobs
from tests.learn.jobs import CLASSES, FEATURES, make, mlp, settings
from tests.learn.pool import CPU, welcome_of
from tests.processes import forked
from w5xde import Job
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.torch_private import has_compiled
from w5xde.learn.train.trainer import Task, Trainer
from w5xde.tree import Span


def in_a_fork(story: Callable[[], None]) -> None:
    def tell() -> None:
        # As the command does: the compiler itself causes some.
        warnings.simplefilter("ignore")
        story()

    with forked(tell) as process:
        assert process.wait() == 0, process.text


def trainer_of(job: Job, **given: Any) -> Trainer:
    prepared = prepare(job, settings(**given))
    trainer = prepare_node(job, welcome_of(prepared), CPU).trainer
    trainer.load(bytearray(prepared.learner.snapshot(whole=True)), whole=True)
    return trainer


def task_of(number: int, rows: int = 4) -> Task:
    generator = torch.Generator().manual_seed(number)
    batch = torch.randn(rows, FEATURES, generator=generator), torch.zeros(rows, dtype=torch.int64)
    return Task(0, Span(0, 1), 1, rows, [(number, rows, batch)])


def compiled(backend: str) -> Job:
    return make(lambda: torch.compile(mlp()(), backend=backend))  # type: ignore[return-value]


class PartlyCompiled(nn.Module):
    """Only a function that it calls is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self._hidden = torch.compile(lambda hidden: hidden.tanh() * 2, backend="eager")

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.second(self._hidden(self.first(numbers)))
        return found


JOBS = {
    "eager": lambda: compiled("eager"),
    "aot_eager": lambda: compiled("aot_eager"),
    "a part": lambda: make(PartlyCompiled),
    "the loss": lambda: make(mlp(), loss=torch.compile(jobs.classify, backend="eager")),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_compiled_model_trains_by_default(name: str) -> None:
    def story() -> None:
        job = JOBS[name]()
        quick, plain = trainer_of(job), trainer_of(job, recording="off")
        for number in range(20):
            # A short last batch is compiled anew.
            task = task_of(number, rows=2 if number == 12 else 4)
            ours, theirs = quick.compute(task), plain.compute(task)
            assert ours.vector.is_same(theirs.vector), number
            assert ours.loss_sum == theirs.loss_sum

    in_a_fork(story)


def test_a_model_is_recorded_as_long_as_nothing_is_compiled() -> None:
    def story() -> None:
        calls: list[None] = []

        def loss(model: nn.Module, batch: Any) -> Tensor:
            calls.append(None)
            return jobs.classify(model, batch)

        trainer = trainer_of(make(mlp(), loss=loss))
        for number in range(50):
            trainer.compute(task_of(number))
        assert not has_compiled()
        assert len(calls) < 30

    in_a_fork(story)


def test_an_error_that_hides_a_refusal_is_seen_through() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        try:
            factor = batch[0].numpy().sum() * 0 + 1
        except Exception as error:
            raise RuntimeError("it does not compile") from error
        return float(factor) * jobs.classify(model, batch)

    trainer = trainer_of(make(mlp(), loss=loss))
    for number in range(10):
        trainer.compute(task_of(number))
