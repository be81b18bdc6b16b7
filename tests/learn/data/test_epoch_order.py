"""The order of an epoch: a function of epoch and seed alone, whatever the sampler is made of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.learn.data.test_sources import Listed, Streamed
from w5xde.errors import JobError
from w5xde.learn.data.recipe import Recipe
from w5xde.learn.data.sources import MapSource, WorkerEpochs, open_source

SAMPLES = 10
DATA = list(range(SAMPLES))


def source_of(sampler: Any, *, batch_size: int = 4, seed: int = 7, drops_last: bool = False) -> MapSource:
    recipe = Recipe(sampler=sampler, drops_last=drops_last)
    return MapSource(Listed(DATA), batch_size=batch_size, seed=seed, shuffle=True, recipe=recipe)


def read(source: MapSource, epoch: int) -> list[list[int]]:
    return [source.read(epoch, batch).tolist() for batch in range(source.epoch(epoch).batches)]


def refused(sampler: Any, **how: Any) -> JobError:
    with pytest.raises(JobError) as caught:
        source_of(sampler, **how).try_order()
    return caught.value


class Global(Sampler[int]):
    """Draws from every global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        shift = random.randrange(SAMPLES) + int(np.random.randint(SAMPLES))  # noqa: NPY002 - what users write
        return iter([(i + shift) % SAMPLES for i in torch.randperm(SAMPLES).tolist()])


class ByEpoch(Sampler[int]):
    """Uses the epoch that it is told, and no chance."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % SAMPLES for i in range(6)])


def drawn(dataset: Any, epoch: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(len(dataset), generator=generator)[: 5 + epoch]


WEIGHTS = torch.arange(SAMPLES, dtype=torch.float64)
SAMPLERS: dict[str, Any] = {
    "random": lambda: RandomSampler(DATA),
    "random, with a generator of its own": lambda: RandomSampler(
        DATA, generator=torch.Generator().manual_seed(5)
    ),
    "random, with replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=25),
    "random, fewer": lambda: RandomSampler(DATA, num_samples=3),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 30),
    "weighted, without replacement": lambda: WeightedRandomSampler(WEIGHTS, 5, replacement=False),
    "a subset": lambda: SubsetRandomSampler([1, 3, 5]),
    "sequential": lambda: SequentialSampler(DATA),
    "the global generators": Global,
    "by epoch": ByEpoch,
    "distributed, in one part": lambda: DistributedSampler(Listed(DATA), num_replicas=1, rank=0),
    "batches": lambda: BatchSampler(RandomSampler(DATA), 3, drop_last=False),
    "a function": lambda: drawn,
    "a list": lambda: [3, 1, 2],
    "batches of a function": lambda: lambda dataset, epoch, seed: [[1, 2], [3], [4, 5, 6]],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_depends_on_epoch_and_seed_and_on_nothing_else(name):
    one, other = source_of(SAMPLERS[name]()), source_of(SAMPLERS[name]())
    one.try_order()
    torch.manual_seed(1)
    random.seed(1)
    first = [read(one, epoch) for epoch in (0, 1, 2)]
    torch.manual_seed(2)
    random.seed(2)
    assert [read(other, epoch) for epoch in (2, 0, 1)] == [first[2], first[0], first[1]]
    # Also in the process that draws them ahead.
    ahead = iter(WorkerEpochs(source_of(SAMPLERS[name]()), 1))
    assert torch.equal(next(ahead)[1].indices, one.epoch(1).indices)


@pytest.mark.parametrize("name", ["random", "weighted", "the global generators", "batches", "a function"])
def test_every_epoch_and_every_seed_draws_anew(name):
    orders = [read(source_of(SAMPLERS[name](), seed=seed), epoch) for seed in (7, 8) for epoch in (0, 1)]
    assert all(one != other for i, one in enumerate(orders) for other in orders[:i])


def test_drawing_leaves_the_global_generators_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate()
    source = source_of(Global())
    source.try_order()
    read(source, 1)
    # Reading itself is seeded; drawing is not to be seen.
    source = source_of(Global())
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    source.epoch(1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("the global generators", True),
        ("random", False),
        ("weighted", False),
        ("batches", False),
        ("a function", False),
    ],
)
def test_it_is_known_which_samplers_draw_from_the_global_generators(name, draws):
    source = source_of(SAMPLERS[name]())
    source.try_order()
    assert source.order_draws is draws


# --- what counts --------------------------------------------------------------------------------------


def test_places_count_not_samples():
    """A sample that is drawn twice counts twice, one that is not drawn never, and every place once."""
    source = source_of(WeightedRandomSampler([0.0] * 9 + [1.0], 7))
    assert source.epoch_samples == 7
    assert read(source, 0) == [[9, 9, 9, 9], [9, 9, 9]]
    assert source.samples == SAMPLES


@pytest.mark.parametrize(
    ("samples", "batches"), [(10, [4, 4]), (8, [4, 4]), (4, [4]), (11, [4, 4])], ids=["10", "8", "4", "11"]
)
def test_a_last_batch_that_is_not_full_is_left_out(samples, batches):
    source = source_of([0] * samples, drops_last=True)
    assert [len(batch) for batch in read(source, 0)] == batches
    assert source.epoch_samples == sum(batches)
    plain = MapSource(
        Listed(list(range(samples))), batch_size=4, seed=1, shuffle=True, recipe=Recipe(drops_last=True)
    )
    assert [len(batch) for batch in read(plain, 3)] == batches
    assert plain.epoch_samples == sum(batches)


def test_nothing_left_is_refused():
    error = refused([0, 1, 2], drops_last=True)
    assert error.code == "W5-204"
    assert "3 samples, fewer than a batch of 4" in error.what


def test_epochs_of_a_function_may_differ_in_length():
    source = source_of(drawn)
    assert source.epoch_samples is None
    assert [len(source.epoch(epoch).indices) for epoch in range(3)] == [5, 6, 7]
    assert [source.epoch(epoch).batches for epoch in range(3)] == [2, 2, 2]


def test_batches_of_a_sampler_are_used_as_they_are():
    source = source_of([[5], [1, 2, 3, 4, 5, 6], [0, 0]], drops_last=False)
    assert source.makes_batches
    assert source.epoch_samples is None
    assert read(source, 0) == [[5], [1, 2, 3, 4, 5, 6], [0, 0]]
    assert not source_of([1, 2]).makes_batches


def test_numbers_may_be_of_any_whole_kind():
    for kind in (
        torch.tensor([1, 2]),
        np.array([1, 2]),
        [np.int32(1), torch.tensor(2)],
        (1, 2),
        iter((1, 2)),
    ):
        source = source_of(lambda dataset, epoch, seed, kind=kind: kind)
        assert source.epoch(0).indices.tolist() == [1, 2]
    for kind in (torch.tensor([[1], [2]]), [torch.tensor([1]), torch.tensor([2])], [(1,), (2,)]):
        assert read(source_of(lambda dataset, epoch, seed, kind=kind: kind), 0) == [[1], [2]]


# --- what is refused ----------------------------------------------------------------------------------


class Stateful(Sampler[int]):
    def __init__(self) -> None:
        self._chance = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._chance.sample(DATA, SAMPLES))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def failing(dataset: Any, epoch: int, seed: int) -> Any:
    raise LookupError("lost")


WRONG: list[tuple[Any, str]] = [
    (Stateful(), "another order each time"),
    (lambda dataset, epoch, seed: random.SystemRandom().sample(DATA, 9), "another order each time"),
    (failing, "the sampler failed in epoch 1: LookupError: lost"),
    ([SAMPLES], "gave 10, which is no sample of the 10"),
    ([-1], "gave -1, which is no sample"),
    ([0.5], "failed in epoch 1: TypeError"),
    (["a"], "failed in epoch 1"),
    (lambda dataset, epoch, seed: None, "failed in epoch 1: TypeError"),
    ([], "gave no sample in epoch 1"),
    ([[1], []], "gave an empty batch"),
    (
        DistributedSampler(Listed(DATA), num_replicas=2, rank=0),
        "a DistributedSampler gives each process a part",
    ),
    (
        BatchSampler(DistributedSampler(Listed(DATA), num_replicas=2, rank=0), 2, drop_last=False),
        "a DistributedSampler",
    ),
]


@pytest.mark.parametrize(("sampler", "what"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_sampler_that_cannot_be_used_is_refused_with_the_reason(sampler, what):
    error = refused(sampler)
    assert error.code == "W5-254"
    assert what in error.what
    assert error.fix


def test_a_sampler_without_an_end_is_noticed(monkeypatch):
    monkeypatch.setattr("w5xde.learn.data.epoch_order.DRAWN_MAX", 1000)
    assert "seems to have no end" in refused(Endless()).what


def test_a_sampler_that_breaks_its_word_about_its_length_is_told():
    class Grows(ByEpoch):
        def __iter__(self) -> Iterator[int]:
            return iter(range(6 + self.epoch))

    source = source_of(Grows())
    source.try_order()
    assert source.epoch_samples == 6
    with pytest.raises(JobError, match="gave 8 samples in epoch 3, and 6 in the first") as caught:
        source.epoch(2)
    assert caught.value.code == "W5-254"


def test_a_stream_has_nothing_to_draw_from():
    with pytest.raises(JobError, match="the data set is iterable") as caught:
        open_source(Streamed(DATA), batch_size=2, seed=0, shuffle=True, recipe=Recipe(sampler=[1]))
    assert caught.value.code == "W5-254"


# --- data sets that know the epoch ----------------------------------------------------------------------


class Growing(Dataset[Any]):
    """Samples that depend on the epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


@pytest.mark.parametrize(
    "wrap",
    [lambda data: data, lambda data: Subset(data, [0, 1, 2]), lambda data: ConcatDataset([data, data])],
)
def test_a_data_set_is_told_the_epoch_of_each_batch_that_is_read(wrap):
    source = MapSource(wrap(Growing()), batch_size=2, seed=0, shuffle=False)
    # Batches of two epochs mix: one is read ahead, another is late.
    assert [source.read(epoch, 0).tolist() for epoch in (0, 1, 0, 5)] == [
        [0, 1],
        [100, 101],
        [0, 1],
        [500, 501],
    ]
    # A node that reads its own copy knows the numbers alone.
    assert source.read_indices(torch.tensor([2, 0]), 3, 9).tolist() == [302, 300]


def test_a_stream_is_told_the_epoch_before_it_begins():
    class GrowingStream(Streamed):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([10 * self.epoch, 10 * self.epoch + 1])

    source = open_source(GrowingStream([]), batch_size=2, seed=0, shuffle=True)
    assert [next(source.epoch(epoch))[1].tolist() for epoch in (0, 2)] == [[0, 1], [20, 21]]


def test_the_last_batch_of_a_stream_is_left_out_if_it_is_not_full():
    source = open_source(Streamed(DATA), batch_size=4, seed=0, shuffle=True, recipe=Recipe(drops_last=True))
    assert [samples for samples, _ in source.epoch(0)] == [4, 4]
    assert len(source.first(3)) == 3
