"""Validation sets: what is a batch of one, what is measured in it, and what is refused before it trains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from tests.learn.pool import CPU, welcome_of
from w5xde import Job
from w5xde.config import Settings
from w5xde.errors import JobError, JoinError
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.train.measuring import weighted_means
from w5xde.learn.train.validation_set import ValidationSet, read_batch

NUMBERS = torch.arange(10.0)


def job(validation: Any = lambda: TensorDataset(NUMBERS), **more: Any) -> Job:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "data": lambda: TensorDataset(torch.ones(8, 1)),
        "loss": lambda net, batch: net(batch[0]).square().mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "validation": validation,
        "measure": lambda net, batch: {"mean": batch[0].mean(), "largest": batch[0].max()},
    }
    return Job(**given | more)


def prepared(given: Job, **settings: Any) -> Prepared:
    return prepare(given, Settings(**{"batch_size": 4, "canary": False} | settings))


def opened(given: Job, **settings: Any) -> ValidationSet:
    found = prepared(given, **settings).validation
    assert found is not None
    return found


def test_the_mean_of_the_set_weighs_batches_by_their_samples() -> None:
    found = opened(job())
    assert found.sizes == (4, 4, 2)
    assert found.names == ["largest", "mean"]
    here = found.evaluate(nn.Linear(1, 1))
    assert here["mean"] == pytest.approx(4.5, abs=1e-6)
    assert here["largest"] == pytest.approx((4 * 3 + 4 * 7 + 2 * 9) / 10)


def test_sums_are_made_in_the_tree_whatever_comes_first() -> None:
    rows = [[math.sin(number)] for number in range(37)]
    sizes = [1 + number % 3 for number in range(37)]
    plain = sum(size * row[0] for size, row in zip(sizes, rows, strict=True)) / sum(sizes)
    assert weighted_means(sizes, rows) == pytest.approx([plain], abs=1e-12)


def test_a_data_loader_gives_its_batch_size_collate_function_sampler_and_drop_last() -> None:
    def doubled(rows: list[Any]) -> Any:
        return [2 * torch.stack([row[0] for row in rows])]

    loader = DataLoader(
        TensorDataset(NUMBERS), batch_size=3, shuffle=True, collate_fn=doubled, drop_last=True
    )
    found = opened(job(lambda: loader))
    assert found.sizes == (3, 3, 3)
    assert found.read(1)[0].tolist() == [6.0, 8.0, 10.0]
    chosen = DataLoader(TensorDataset(NUMBERS), batch_size=2, sampler=SubsetRandomSampler([1, 5, 7]))
    found = opened(job(lambda: chosen))
    assert found.sizes == (2, 1)
    assert sorted(found.read(0)[0].tolist() + found.read(1)[0].tolist()) == [1.0, 5.0, 7.0]


def test_samples_are_put_together_as_those_of_the_training() -> None:
    found = opened(job(collate=lambda rows: [torch.stack([row[0].reshape(1) for row in rows])]))
    assert found.read(0)[0].shape == (4, 1)


class Noisy(Dataset[Any]):
    """Draws while it is read, and wants to know the epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        return [torch.rand(())]


def test_a_set_that_draws_is_the_same_each_time_and_takes_no_random_number_from_the_training() -> None:
    noisy = Noisy()
    found = opened(job(lambda: noisy))
    assert found.source.draws
    state = torch.get_rng_state()
    first = found.read(1)[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(found.read(1)[0], first)
    # A data set that the training uses too must not hear of another epoch.
    assert noisy.epochs == []


def test_a_node_with_its_own_data_reads_the_same_batches(tmp_path: Any) -> None:
    given = job(Noisy)
    here = prepared(given, data="local")
    assert here.validation is not None
    parts = prepare_node(given, welcome_of(here), CPU)
    assert parts.validation is not None
    for number in range(len(here.validation.sizes)):
        there = read_batch(parts.validation, here.validation.indices(number), number)
        assert torch.equal(there[0], here.validation.read(number)[0])


def test_a_node_with_another_validation_set_cannot_join() -> None:
    here = prepared(job(), data="local")
    with pytest.raises(JoinError, match="your validation set has 9 samples, the run's has 10") as caught:
        prepare_node(job(lambda: TensorDataset(NUMBERS[:9])), welcome_of(here), CPU)
    assert caught.value.code == "W5-209"
    with pytest.raises(JoinError, match="has as many samples as the run's, but other ones"):
        prepare_node(job(lambda: TensorDataset(-NUMBERS)), welcome_of(here), CPU)
    with pytest.raises(JoinError, match="your job has no measure"):
        prepare_node(job(None, measure=None), welcome_of(here), CPU)


def test_measuring_changes_nothing_in_the_model() -> None:
    def drop_in(net: nn.Module, batch: Any) -> float:
        net[0](batch[0].reshape(-1, 1))  # type: ignore[index]
        assert not net.training
        assert not torch.is_grad_enabled()
        return float(torch.rand(()))

    given = job(model=lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)), measure=drop_in)
    here = prepared(given)
    assert here.validation is not None
    trainer = prepare_node(given, welcome_of(here), CPU).trainer
    before = [tensor.clone() for tensor in trainer.module.state_dict().values()]
    first = trainer.measure(here.validation.read(0), 0)
    assert trainer.measure(here.validation.read(0), 0) == first
    assert trainer.measure(here.validation.read(1), 1) != first
    assert trainer.module.training
    for was, now in zip(before, trainer.module.state_dict().values(), strict=True):
        assert torch.equal(was, now)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(NUMBERS)


@pytest.mark.parametrize(
    ("validation", "sentence"),
    [
        (Endless, "iterable data set, whose batches cannot be lent twice"),
        (lambda: TensorDataset(NUMBERS[:0]), "the data set is empty"),
        (lambda: 7, "which is not a data set"),
        (lambda: DataLoader(Endless()), "iterable data set, whose batches cannot be lent twice"),
    ],
)
def test_what_is_no_validation_set_is_refused(validation: Any, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence) as caught:
        prepared(job(validation))
    assert caught.value.code == "W5-267"


@pytest.mark.parametrize(
    ("measure", "sentence"),
    [
        (lambda net, batch: {}, "measure.. returned 0 numbers"),
        (lambda net, batch: {"loss": "small"}, "measure.. failed on the untrained model"),
        (lambda net, batch: 1 / 0, "measure.. failed on the untrained model: ZeroDivisionError"),
        (lambda net, batch: {str(number): 1.0 for number in range(65)}, "and 1 to 64 can be sent"),
    ],
)
def test_what_measures_nothing_is_refused(measure: Any, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence) as caught:
        prepared(job(measure=measure))
    assert caught.value.code == "W5-267"


@pytest.mark.parametrize(
    "parts",
    [
        {"validation": None},
        {"measure": None},
        {"evaluate": lambda net: 1.0},
    ],
)
def test_half_a_validation_or_two_ways_to_evaluate_are_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(JobError) as caught:
        job(**parts)
    assert caught.value.code == "W5-266"


def test_jobs_without_a_validation_set_are_told_nothing_of_it() -> None:
    assert prepared(job(None, measure=None)).rules.metrics == []
