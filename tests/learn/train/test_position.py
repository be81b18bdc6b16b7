"""A loss may ask where it is: the answer is the plan's, the same on every node and in every computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import w5xde
from tests.learn import jobs
from tests.learn.jobs import CLASSES, FEATURES, make, mlp, settings
from tests.learn.pool import CPU, check_equivalence, train_in_pool, welcome_of
from tests.learn.rounds.pool import check_rounds
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.train.trainer import Task, Trainer, alone_tasks
from w5xde.tree import Span


def annealed(model: nn.Module, batch: Any) -> Tensor:
    """A second term whose weight grows with the step, as in many autoencoders."""
    numbers, labels = batch
    found = model(numbers)
    weight = min(1.0, w5xde.current().step / 10)
    return cross_entropy(found, labels) + weight * found.square().mean()


def by_everything(model: nn.Module, batch: Any) -> Tensor:
    """Depends on every number that there is."""
    here = w5xde.current()
    assert here.steps is not None
    factor = 1 + here.step / here.steps + 0.1 * here.epoch + 0.01 * here.batch
    return factor * jobs.classify(model, batch)


@pytest.mark.parametrize("loss", [annealed, by_everything])
@pytest.mark.parametrize("batches", [1, 5])
def test_a_loss_that_follows_the_step_is_the_plain_loops_whoever_helps(loss: Any, batches: int) -> None:
    check_equivalence(make(mlp(), loss=loss), settings(epochs=3, batches_per_step=batches))


@pytest.mark.parametrize("loss", [annealed, by_everything])
def test_in_rounds_each_step_of_a_column_has_its_own_number(loss: Any) -> None:
    exact = settings(mode="rounds", compress="none", epochs=4, local_steps=3, batches_per_step=4)
    check_rounds(make(mlp(), loss=loss), exact)


def test_the_tests_above_would_notice_another_step() -> None:
    late = make(mlp(), loss=lambda model, batch: annealed(model, batch) + 0 * w5xde.current().step)
    never = make(mlp(), loss=jobs.classify)
    first, second = (train_in_pool(job, settings(), nodes=2, seed=0).sha256 for job in (late, never))
    assert first != second


def test_outside_of_a_loss_it_is_nowhere() -> None:
    with pytest.raises(w5xde.JobError, match="outside of a loss") as caught:
        w5xde.current()
    assert caught.value.code == "W5-244"
    prepare(make(mlp(), loss=annealed), settings())
    with pytest.raises(w5xde.JobError, match="outside of a loss"):
        w5xde.current()


def test_an_evaluation_is_outside_of_a_loss() -> None:
    job = make(mlp(), loss=annealed, evaluate=lambda model: {"step": w5xde.current().step})
    with pytest.raises(w5xde.JobError, match="outside of a loss") as caught:
        prepare(job, settings())
    assert caught.value.code == "W5-229"


def test_a_position_cannot_be_changed() -> None:
    here = w5xde.Position(1, 2, 3, None)
    with pytest.raises(AttributeError):
        here.step = 4  # type: ignore[misc]


def trainer_of(loss: Any, model: Any = None, **given: Any) -> Trainer:
    job = make(model or mlp(), loss=loss)
    prepared = prepare(job, settings(**given))
    trainer = prepare_node(job, welcome_of(prepared), CPU).trainer
    trainer.load(bytearray(prepared.learner.snapshot(whole=True)), whole=True)
    return trainer


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    numbers = torch.randn(4, FEATURES, generator=generator)
    return numbers, torch.randint(CLASSES, (4,), generator=generator)


def sometimes(model: nn.Module, batch: Any) -> Tensor:
    """Reads the step, and uses it late: a recording of the first batches would look right."""
    factor = 2.0 if w5xde.current().step >= 30 else 1.0
    return factor * jobs.classify(model, batch)


@pytest.mark.parametrize("loss", [annealed, by_everything, sometimes])
def test_a_loss_that_asks_is_not_recorded(loss: Any) -> None:
    quick, plain = trainer_of(loss), trainer_of(loss, recording="off")
    for number in range(60):
        task = Task(1, Span(0, 1), 1, 4, [(number, 4, batch_of(number))], step=number)
        ours, theirs = quick.compute(task), plain.compute(task)
        assert ours.vector.is_same(theirs.vector), number
        assert ours.loss_sum == theirs.loss_sum


def test_the_position_is_that_of_the_task_and_of_the_run() -> None:
    seen: list[w5xde.Position] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(w5xde.current())
        return jobs.classify(model, batch)

    trainer = trainer_of(loss, epochs=2, batches_per_step=5, recording="off")
    # The trial twice, the canary's computations on both sides: all of the first batch.
    assert {*seen} == {w5xde.Position(0, 0, 0, 6)}
    seen.clear()
    trainer.compute(Task(1, Span(2, 4), 5, 20, [(7, 4, batch_of(0)), (8, 4, batch_of(1))], step=4))
    assert seen == [w5xde.Position(4, 1, 7, 6), w5xde.Position(4, 1, 8, 6)]
    seen.clear()
    for task in alone_tasks(1, 10, [(3, 4, batch_of(0)), (4, 4, batch_of(1))]):
        trainer.compute(task)
    assert seen == [w5xde.Position(10, 1, 3, 6), w5xde.Position(11, 1, 4, 6)]


@pytest.mark.parametrize(
    ("given", "steps"),
    [({"epochs": 2}, 6), ({"epochs": None, "steps": 5}, 5), ({"epochs": None, "seconds": 9.0}, None)],
)
def test_the_number_of_steps_is_none_if_nothing_limits_it(given: Any, steps: int | None) -> None:
    seen: list[int | None] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(w5xde.current().steps)
        return jobs.classify(model, batch)

    prepare(make(mlp(), loss=loss), settings(**given))
    assert {*seen} == {steps}


class Checkpointed(nn.Module):
    """A part is computed again in backward, where it asks again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def _inner(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.first(numbers) * (1 + w5xde.current().step)
        return found.tanh()

    def forward(self, numbers: Tensor) -> Tensor:
        hidden = checkpoint(self._inner, numbers, use_reentrant=False)
        found: Tensor = self.second(hidden)
        return found


def test_what_backward_computes_again_is_at_the_same_place() -> None:
    check_equivalence(make(Checkpointed), settings())
