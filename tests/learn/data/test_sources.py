"""Whoever reads a batch reads the same one, and data that cannot be right is told in the user's words."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data import default_collate as collated

from tests.processes import run_python
from w5xde.errors import JobError
from w5xde.learn.data.sources import MapSource, Start, StreamSource, WorkerBatches, all_batches, open_source


class Listed(Dataset):
    """A map-style data set of given samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Streamed(IterableDataset):
    """An iterable data set of given samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def opened(dataset: Any, batch_size: int = 4, seed: int = 7, shuffle: bool = True) -> Any:
    return open_source(dataset, batch_size=batch_size, seed=seed, shuffle=shuffle)


def first_batch(dataset: Any, **settings: Any) -> Any:
    source = opened(dataset, **settings)
    return source.read(0, 0) if isinstance(source, MapSource) else next(source.epoch(0))


def refused(dataset: Any, **settings: Any) -> JobError:
    with pytest.raises(JobError) as caught:
        first_batch(dataset, **settings)
    return caught.value


def order_of(source: MapSource, epoch: int, batches: int) -> list[int]:
    return [i for batch in range(batches) for i in source.indices(epoch, batch).tolist()]


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 3, 4, 10, 101])
def test_an_epoch_is_every_sample_once_and_the_last_batch_may_be_short(samples):
    source = opened(list(range(samples)))
    batches = -(-samples // 4)
    sizes = [len(source.indices(0, batch)) for batch in range(batches)]
    assert sizes == [4] * (samples // 4) + [samples % 4] * (samples % 4 > 0)
    assert sorted(order_of(source, 0, batches)) == list(range(samples))
    assert len(source.read(0, batches - 1)) == sizes[-1]


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    one, other = opened(list(range(64))), opened(list(range(64)))
    torch.manual_seed(1)
    first = [order_of(one, epoch, 16) for epoch in (0, 1, 2)]
    torch.manual_seed(2)
    assert [order_of(other, epoch, 16) for epoch in (2, 0, 1)] == [first[2], first[0], first[1]]
    assert first[0] != first[1] != first[2]
    assert order_of(opened(list(range(64)), seed=8), 0, 16) != first[0]
    assert order_of(opened(list(range(64)), batch_size=8), 0, 8) == first[0]


def test_the_order_is_the_same_in_another_process():
    code = (
        "from w5xde.learn.data.sources import open_source\n"
        "source = open_source(list(range(64)), batch_size=64, seed=7, shuffle=True)\n"
        "print(source.indices(0, 0).tolist(), source.indices(5, 0).tolist())"
    )
    done = run_python("-c", code)
    source = opened(list(range(64)), batch_size=64)
    assert done.stdout.strip() == f"{source.indices(0, 0).tolist()} {source.indices(5, 0).tolist()}"


def test_without_shuffling_the_order_is_that_of_the_data():
    assert order_of(opened(list(range(10)), shuffle=False), 3, 3) == list(range(10))


# --- reading --------------------------------------------------------------------------------------

TENSORS = TensorDataset(torch.randn(10, 3), torch.arange(10), torch.arange(10) > 4)


def expected(dataset: Any, source: MapSource, batch: int) -> Any:
    """What a plain loader makes of the same samples."""
    return collated([dataset[i] for i in source.indices(0, batch).tolist()])


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_tensors_read_at_once_are_what_collating_them_one_by_one_gives(batch):
    source = opened(TENSORS)
    assert_same(source.read(0, batch), expected(TENSORS, source, batch))


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(TENSORS, [9, 1, 5]),
        Subset(Subset(TENSORS, [9, 1, 5, 7]), [3, 0]),
        Subset(TENSORS, torch.tensor([4, 2])),
        ConcatDataset([TENSORS, TENSORS]),
        Listed([TENSORS[i] for i in range(10)]),
    ],
    ids=["subset", "subset of a subset", "subset by tensor", "concatenated", "one by one"],
)
def test_parts_of_data_sets_are_read_as_a_plain_loader_reads_them(dataset):
    source = opened(dataset)
    assert_same(source.read(0, 0), expected(dataset, source, 0))


def test_a_data_set_that_gives_many_at_once_is_asked_once():
    asked = []

    class Many(Listed):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return [self.samples[i] for i in indices]

    source = opened(Many(list(range(10))), shuffle=False)
    assert source.read(0, 1).tolist() == [4, 5, 6, 7]
    subset = opened(Subset(Many(list(range(10))), [8, 2, 4]), shuffle=False)
    assert subset.read(0, 0).tolist() == [8, 2, 4]
    assert asked == [[4, 5, 6, 7], [8, 2, 4]]


class Doubled(TensorDataset):
    """Changes its samples on the way, as augmentation does."""

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, ...]:
        return tuple(tensor * 2 for tensor in super().__getitem__(index))


class DoubledPart(Subset):
    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index]] * 2

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


def test_a_data_set_that_builds_on_tensors_is_asked_for_its_own_samples():
    source = opened(Doubled(torch.arange(8)), shuffle=False)
    assert source.read(0, 0)[0].tolist() == [0, 2, 4, 6]


def test_a_data_set_that_builds_on_a_subset_is_asked_for_its_own_samples():
    source = opened(DoubledPart(Listed(list(range(8))), [1, 2, 3]), shuffle=False)
    assert source.read(0, 0).tolist() == [2, 4, 6]


def test_nested_samples_become_nested_batches():
    samples = [{"x": (torch.ones(2), i), "name": f"n{i}", "y": [i * 0.5]} for i in range(3)]
    batch = opened(Listed(samples), shuffle=False).read(0, 0)
    assert batch["x"][0].shape == (3, 2)
    assert batch["name"] == ["n0", "n1", "n2"]
    assert torch.equal(batch["y"][0], torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))


# --- streams --------------------------------------------------------------------------------------


def test_an_iterable_data_set_is_given_in_order_with_a_short_last_batch():
    source = opened(Streamed([torch.tensor(i) for i in range(10)]))
    assert isinstance(source, StreamSource)
    assert [(count, batch.tolist()) for count, batch in source.epoch(0)] == [
        (4, [0, 1, 2, 3]),
        (4, [4, 5, 6, 7]),
        (2, [8, 9]),
    ]
    assert len(list(source.epoch(1))) == 3


def test_any_object_with_iter_alone_is_a_stream():
    class Plain:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert [batch.tolist() for _, batch in opened(Plain()).epoch(0)] == [[0, 1, 2]]


def test_all_batches_come_in_order_epoch_after_epoch():
    source = opened(list(range(6)), shuffle=False)
    read = [give() for give in all_batches(source, 2, Start())]
    assert [(count, batch.tolist()) for count, batch in read] == [(4, [0, 1, 2, 3]), (2, [4, 5])] * 2


def test_reading_may_begin_anywhere_and_fetch_what_was_left_behind():
    source = opened(list(range(6)))
    whole = [give() for give in all_batches(source, 3, Start())]
    start = Start(1, 1, frozenset({(0, 1)}))
    read = [give() for give in all_batches(source, 3, start)]
    assert [batch.tolist() for _, batch in read] == [whole[i][1].tolist() for i in (1, 3, 4, 5)]


def test_a_stream_that_begins_in_its_middle_tells_no_end_of_epochs_before_it():
    stream = opened(Streamed(list(range(6))))
    start = Start(1, 1, frozenset({(0, 1)}))
    read = [give() for give in all_batches(stream, 3, start)]
    assert [(count, None if batch is None else batch.tolist()) for count, batch in read] == [
        (2, [4, 5]),
        (2, [4, 5]),
        (0, None),
        (4, [0, 1, 2, 3]),
        (2, [4, 5]),
        (0, None),
    ]


def test_all_batches_of_a_stream_tell_where_an_epoch_ends():
    read = [give() for give in all_batches(opened(Streamed(list(range(6)))), 2, Start())]
    assert [(count, None if batch is None else batch.tolist()) for count, batch in read] == (
        [(4, [0, 1, 2, 3]), (2, [4, 5]), (0, None)] * 2
    )


def test_without_workers_the_batches_of_a_worker_are_all_of_them():
    source = opened(list(range(6)), shuffle=False)
    assert [count for count, _ in WorkerBatches(source, 2, Start())] == [4, 2, 4, 2]


# --- chance ---------------------------------------------------------------------------------------


class Noisy(Listed):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), random.random(), np.random.rand()  # noqa: NPY002 - what users write


def drawn(source: MapSource, epoch: int, batch: int) -> list[Any]:
    return [part.tolist() for part in source.read(epoch, batch)]


def test_augmentation_gives_the_same_samples_whoever_reads_the_batch_and_when():
    one, other = opened(Noisy([0] * 12)), opened(Noisy([0] * 12))
    first = drawn(one, 0, 0), drawn(one, 0, 1)
    torch.rand(3), random.random()
    assert (drawn(one, 0, 1), drawn(other, 0, 0)) == (first[1], first[0])
    assert first[0] != first[1]
    assert drawn(one, 1, 0) != first[0]
    assert drawn(opened(Noisy([0] * 12), seed=8), 0, 0) != first[0]
    assert len({str(value) for part in first[0] for value in part}) == 12


def test_a_stream_is_read_under_the_seed_of_each_batch():
    class Chancy(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(6):
                yield torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002

    def read() -> str:
        return str([[part.tolist() for part in batch] for _, batch in opened(Chancy()).epoch(0)])

    first = read()
    torch.rand(3), random.random()
    assert read() == first


# --- refused --------------------------------------------------------------------------------------


def test_an_empty_data_set_is_told():
    assert refused([]).what == "the data set is empty"


def test_a_stream_without_samples_is_told():
    with pytest.raises(JobError, match="the data set gave no sample in epoch 1"):
        list(all_batches(opened(Streamed([])), 1, Start()))


def test_a_loader_in_place_of_a_data_set_is_answered_with_what_to_give():
    error = refused(DataLoader(TENSORS))
    assert "the data set is a DataLoader" in error.what
    assert "give the data set of that loader" in error.fix


@pytest.mark.parametrize(
    "once", [iter([1, 2]), (i for i in range(3)), map(abs, [1])], ids=["iter", "gen", "map"]
)
def test_what_can_be_read_only_once_is_told(once):
    assert "can be read only once" in refused(once).what


@pytest.mark.parametrize(
    ("value", "kind"), [(None, "NoneType"), (3, "int"), (len, "builtin_function_or_method")]
)
def test_what_is_no_data_set_is_told(value, kind):
    assert refused(value).what == f"data() returned a {kind}, which is not a data set"


class NoLength(Dataset):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        raise TypeError("nobody counted")


def test_a_length_that_is_not_known_is_told():
    assert "the length of the data set is not known: TypeError: nobody counted" in refused(NoLength()).what


RAGGED: dict[str, list[Any]] = {
    "sample has shape (2,) in one and (3,) in another": [torch.ones(2), torch.ones(3)],
    "sample[0] has shape (2,) in one and (2, 1) in another": [(torch.ones(2), 1), (torch.ones(2, 1), 1)],
    "sample['x'] has shape (4,) in one and (5,) in another": [{"x": np.ones(4)}, {"x": np.ones(5)}],
    "sample has shape 2 in one and 3 in another": [[1, 2], [1, 2, 3]],
}


@pytest.mark.parametrize(("sentence", "samples"), RAGGED.items(), ids=["tensors", "tuples", "dicts", "lists"])
def test_ragged_samples_are_named(sentence, samples):
    error = refused(Listed(samples), shuffle=False)
    assert error.what == f"the samples of a batch do not fit together: {sentence}"
    assert "--batch-size 1" in error.fix


def test_a_sample_that_lacks_a_key_is_told():
    error = refused(Listed([{"x": 1, "y": 2}, {"x": 1}]), shuffle=False)
    assert "do not fit together" in error.what
    assert "'y'" in error.what


class Image:
    """Stands for a picture of some library."""


UNSENDABLE: dict[str, Any] = {
    "a sample of the data set holds a tests.learn.data.test_sources.Image": Image(),
    "a sample of the data set[1] holds a tests.learn.data.test_sources.Image": (1, Image()),
    "a sample of the data set['x'] holds a set": {"x": {1, 2}},
}


@pytest.mark.parametrize(("what", "sample"), UNSENDABLE.items(), ids=["object", "in a tuple", "set"])
def test_an_item_that_cannot_be_sent_is_named(what, sample):
    for dataset in (Listed([sample] * 3), Streamed([sample] * 3)):
        assert refused(dataset).what == f"{what}, which cannot be sent"


def test_nothing_as_a_sample_is_told():
    assert "samples cannot be put together" in refused(Listed([None, None])).what


def test_a_data_set_that_fails_is_told_with_the_users_own_line():
    class Broken(Listed):
        def __getitem__(self, index: int) -> Any:
            raise FileNotFoundError("no such image: 7.png")

    assert f"the data set failed: FileNotFoundError: no such image: 7.png ({Path(__file__).name}, line " in (
        refused(Broken([1])).what
    )


def test_a_stream_that_fails_is_told_with_the_users_own_line():
    class Broken(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise FileNotFoundError("no such shard: 7.tar")

    assert f"the data set failed: FileNotFoundError: no such shard: 7.tar ({Path(__file__).name}, line " in (
        refused(Broken()).what
    )


# --- fingerprints ---------------------------------------------------------------------------------


def fingerprint(dataset: Any, **settings: Any) -> str:
    return opened(dataset, **settings).fingerprint()


def test_copies_of_the_data_have_one_fingerprint_whatever_the_batches():
    data = torch.arange(100.0).view(50, 2)
    first = fingerprint(TensorDataset(data))
    assert fingerprint(TensorDataset(data.clone())) == first
    assert fingerprint(TensorDataset(data), batch_size=1, shuffle=False) == first
    assert fingerprint(TensorDataset(data[:1])) == fingerprint(TensorDataset(data[:1].clone()))


def test_other_data_has_another_fingerprint():
    data = torch.arange(100.0).view(50, 2)
    first = fingerprint(TensorDataset(data))
    others = [data.flip(0), data[:49], data.double(), data.view(50, 1, 2), data + 1]
    assert len({first, *(fingerprint(TensorDataset(other)) for other in others)}) == 6
    assert fingerprint(Listed(list(range(9)))) != fingerprint(Listed([str(i) for i in range(9)]))


def test_a_data_set_with_augmentation_has_one_fingerprint():
    assert fingerprint(Noisy([0] * 20)) == fingerprint(Noisy([0] * 20), batch_size=2)
