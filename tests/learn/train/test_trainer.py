"""What a node does: who may be one, what it gives back, and what it leaves as it was when a batch fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.learn import jobs
from tests.learn.jobs import CLASSES, FEATURES, make, mlp, settings
from tests.learn.pool import CPU, welcome_of
from w5xde import Job
from w5xde.errors import JoinError
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.job.job import BatchFailed
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.step.learner import Learner
from w5xde.learn.train.trainer import Task, Trainer
from w5xde.tree import Span


def ready(job: Job) -> tuple[Trainer, Prepared]:
    """A trainer that holds the first version."""
    prepared = prepare(job, settings())
    trainer = prepare_node(job, welcome_of(prepared), CPU).trainer
    trainer.load(bytearray(prepared.learner.snapshot(whole=True)), whole=True)
    return trainer, prepared


def task(prepared: Prepared, first: int = 0, count: int = 2, **changes: Any) -> Task:
    """The batches `first…` of the epoch, as a step of their own."""
    batches = [(first + i, 4, prepared.source.read(0, first + i)) for i in range(count)]  # type: ignore[union-attr]
    return Task(0, Span(0, count), count, 4 * count, changes.get("batches", batches))


def raw(trainer: Trainer, given: Task) -> Tensor:
    """The update a task gives, without what may lie between its parts."""
    return torch.cat([part.view(torch.uint8) for part in trainer.compute(given).vector.parts])


class Table(nn.Module):
    """A large buffer with nothing that moves beside it, so nobody expects it to change."""

    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(5000))


class Touchy(nn.Module):
    """Changes its buffers in every way, and then stumbles over a bad batch."""

    ema: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
        self.register_buffer("ema", torch.zeros(FEATURES))
        self.register_buffer("seen", torch.tensor(0))
        self.table = Table()

    def forward(self, numbers: Tensor) -> Tensor:
        found = self.inner(numbers + self.ema + self.table.values[0])
        self.ema = 0.5 * self.ema + numbers.mean(0)
        self.seen += 1
        if numbers.max() > 1e6:
            raise ValueError("numbers beyond all bounds")
        if numbers.max() > 1e5:
            self.table.values = self.table.values + 1
        elif numbers.max() > 1e4:
            self.table.values += 1
        elif numbers.max() > 1e3:
            found = found * torch.inf
        return found


def spoiled(prepared: Prepared, size: float) -> Task:
    """Two batches, the second with numbers of this size."""
    good = task(prepared)
    index, samples, (numbers, labels) = good.batches[1]
    return task(
        prepared,
        batches=[good.batches[0], (index, samples, [numbers.abs().clamp(max=1) * size + size, labels])],
    )


@pytest.mark.parametrize(
    ("size", "what"),
    [
        (2e6, "ValueError: numbers beyond all bounds (test_trainer.py, line "),
        (1e5, "buffer table.values changed, which it did not do in the first batch"),
        (1e3, "the loss of batch 1 is nan"),
    ],
    ids=["raises", "changes another buffer", "is not finite"],
)
def test_a_batch_that_fails_says_why_and_leaves_the_buffers_of_the_version(size: float, what: str) -> None:
    trainer, prepared = ready(make(Touchy))
    fresh = raw(trainer, task(prepared, first=2))
    with pytest.raises(BatchFailed) as caught:
        trainer.compute(spoiled(prepared, size))
    assert what in str(caught.value)
    assert torch.equal(raw(trainer, task(prepared, first=2)), fresh)


def test_the_line_that_is_named_is_the_users_own() -> None:
    trainer, prepared = ready(make(Touchy))
    line = Touchy.forward.__code__.co_firstlineno + 5
    with pytest.raises(BatchFailed, match=rf"test_trainer\.py, line {line}\)"):
        trainer.compute(spoiled(prepared, 2e6))


def test_a_buffer_overwritten_against_all_expectation_is_not_forgiven_by_the_next_version() -> None:
    trainer, prepared = ready(make(Touchy))
    with pytest.raises(BatchFailed, match=r"buffer table\.values changed"):
        trainer.compute(spoiled(prepared, 1e4))
    trainer.load(bytearray(prepared.learner.snapshot(whole=False)), whole=False)
    with pytest.raises(BatchFailed, match=r"buffer table\.values changed"):
        trainer.compute(task(prepared))
    trainer.load(bytearray(prepared.learner.snapshot(whole=True)), whole=True)
    trainer.compute(task(prepared))


def test_a_gradient_that_turns_sparse_later_fails_its_batch_not_the_node() -> None:
    built: list[nn.Embedding] = []

    def model() -> nn.Module:
        built.append(nn.Embedding(11, 11))
        return built[-1]

    trainer, prepared = ready(make(model, data=jobs.tokens, loss=jobs.foretell))
    built[-1].sparse = True
    with pytest.raises(BatchFailed, match=r"[Ss]parse"):
        trainer.compute(task(prepared))


def test_vectors_that_are_given_back_do_not_mix_into_later_results() -> None:
    job = make(mlp(lambda: nn.BatchNorm1d(16), lambda: nn.Dropout(0.3)))
    trainer, prepared = ready(job)
    tasks = [task(prepared, first=first, count=count) for first, count in ((0, 5), (5, 1), (6, 4), (0, 5))]
    for given in tasks:
        outcome = trainer.compute(given)
        found = [part.clone() for part in outcome.vector.parts]
        trainer.recycle(outcome.vector)
        fresh, _ = ready(job)
        again = fresh.compute(given)
        assert all(torch.equal(a, b) for a, b in zip(found, again.vector.parts, strict=True))
        assert again.loss_sum == outcome.loss_sum


def test_a_vector_that_was_not_given_back_is_left_alone() -> None:
    trainer, prepared = ready(make(mlp()))
    outcome = trainer.compute(task(prepared))
    kept = outcome.vector.raw.clone()
    trainer.compute(task(prepared, first=3, count=4))
    assert torch.equal(outcome.vector.raw, kept)


@pytest.mark.parametrize("recording", ["auto", "off"])
def test_the_norm_of_each_batch_is_that_of_its_own_gradient(recording: str) -> None:
    job = make(mlp(lambda: nn.BatchNorm1d(16)) if recording == "off" else mlp())
    trainer, prepared = ready(job)
    given = task(prepared, count=5)
    assert trainer.compute(given).squares == []
    plain = []
    for index, _, batch in given.batches:
        gradients = trainer.gradients(batch, (0, index))
        plain.append(sum(float(each.double().square().sum()) for each in gradients if each is not None))
    before = raw(trainer, given)
    given.measures = True
    assert trainer.compute(given).squares == pytest.approx(plain, rel=1e-5)
    assert torch.equal(raw(trainer, given), before)


def test_parameters_without_a_gradient_in_any_batch_are_named() -> None:
    trainer, prepared = ready(make(jobs.Partly))
    entries = prepared.learner.flat.blueprint.layout.entries
    outcome = trainer.compute(task(prepared, count=4))
    absent = {entries[i].name for i in outcome.absent}
    assert {"never.weight", "never.bias"} <= absent
    assert "always.weight" not in absent


def test_parameters_that_were_given_other_memory_take_over_the_next_version() -> None:
    trainer, prepared = ready(make(mlp()))
    learner: Learner = prepared.learner
    for parameter in trainer.module.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        for parameter in learner.flat.module.parameters():
            parameter.mul_(2)
    learner.version += 1
    trainer.load(bytearray(learner.snapshot(whole=False)), whole=False)
    ours, theirs = trainer.module.parameters(), learner.flat.module.parameters()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_parameters_of_another_size_are_refused() -> None:
    trainer, _ = ready(make(mlp()))
    with pytest.raises(ValueError, match="bytes of parameters"):
        trainer.load(bytearray(4), whole=True)


# --- who may take part --------------------------------------------------------------------------


def refused_node(job: Job, coordinator: Job, **changes: Any) -> JoinError:
    prepared = prepare(coordinator, settings(**changes))
    with pytest.raises(JoinError) as caught:
        prepare_node(job, welcome_of(prepared), CPU)
    return caught.value


def test_a_node_with_another_model_is_told_the_first_differences() -> None:
    def wider() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES), nn.Linear(3, 3))

    error = refused_node(make(wider), make(mlp()))
    assert error.code == "W5-201"
    assert "0.weight (32, 6) float32, expected (16, 6) float32" in error.what
    assert "0.bias (32,) float32, expected (16,) float32" in error.what
    assert "and 2 more" in error.what
    assert "3.bias" not in error.what  # three are enough to see what is wrong
    assert error.fix == "use the coordinator's job file"


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: mlp()().double(), "0.weight (16, 6) float64, expected (16, 6) float32"),
        (lambda: nn.Sequential(nn.Linear(FEATURES, 16)), "missing 2.weight (3, 16) float32"),
        (mlp(nn.Identity, lambda: nn.BatchNorm1d(16)), "extra 4.weight (3, 16) float32"),
        (lambda: _frozen_first(mlp()()), "0.weight (16, 6) float32 frozen, expected (16, 6) float32"),
    ],
)
def test_each_way_in_which_a_model_can_differ_has_its_words(other: Any, what: str) -> None:
    assert what in refused_node(make(other), make(mlp())).what


def _frozen_first(model: nn.Module) -> nn.Module:
    model.get_submodule("0").requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (lambda: jobs.points(samples=7), "your data set has 7 samples, the run's has 50"),
        (lambda: TensorDataset(*(t.flip(0) for t in jobs.points().tensors)), "but other ones"),
    ],
)
def test_a_node_that_would_read_other_data_is_told(data: Any, what: str) -> None:
    error = refused_node(make(mlp(), data=data), make(mlp()), data="local")
    assert error.code == "W5-209"
    assert what in error.what
    assert "--data stream" in error.fix


def test_data_that_is_sent_need_not_be_at_the_node() -> None:
    prepared = prepare(make(mlp()), settings())
    assert prepare_node(make(mlp(), data=list), welcome_of(prepared), CPU).source is None
