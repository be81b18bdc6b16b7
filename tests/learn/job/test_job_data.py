"""What a DataLoader says is taken over; what the user typed wins and is said; contradictions are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from tests.learn.jobs import make, mlp, points
from w5xde import Job
from w5xde.config import Settings
from w5xde.errors import JobError, UsageError, W5xdeError
from w5xde.learn.job.job_data import JobData, SettledData, settle

POINTS = points()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (POINTS[i] for i in range(10))


def job_of(returned: Any, **more: Any) -> Job:
    return make(mlp(), data=lambda: returned, **more)


def settled(returned: Any, job: Job | None = None, **typed: Any) -> SettledData:
    return settle(JobData.of(job or job_of(returned), 0), Settings(**typed))


def used(found: SettledData) -> tuple[Any, ...]:
    settings = found.settings
    return settings.batch_size, settings.shuffle, settings.drop_last, settings.loader_workers


def refused(returned: Any, more: dict[str, Any] | None = None, **typed: Any) -> W5xdeError:
    with pytest.raises((JobError, UsageError)) as caught:
        settled(returned, job_of(returned, **(more or {})), **typed)
    return caught.value


def own_collate(rows: list[Any]) -> Any:
    return default_collate(rows)


# --- taken over -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (POINTS, (32, True, False, 0)),
        (DataLoader(POINTS), (1, False, False, 0)),
        (DataLoader(POINTS, batch_size=8, shuffle=True), (8, True, False, 0)),
        (DataLoader(POINTS, 8, drop_last=True, num_workers=1), (8, False, True, 1)),
        (DataLoader(POINTS, 8, sampler=SequentialSampler(POINTS)), (8, False, False, 0)),
        (DataLoader(POINTS, 8, sampler=RandomSampler(POINTS)), (8, True, False, 0)),
        (DataLoader(POINTS, 8, sampler=RandomSampler(POINTS, num_samples=9)), (8, None, False, 0)),
        (DataLoader(POINTS, 8, sampler=RandomSampler(POINTS, replacement=True)), (8, None, False, 0)),
        (DataLoader(POINTS, 8, sampler=SubsetRandomSampler([1, 2, 3])), (8, None, False, 0)),
        (DataLoader(POINTS, batch_sampler=BatchSampler(range(9), 2, False)), (None, None, None, 0)),
        (DataLoader(POINTS, batch_size=None), (1, False, False, 0)),
        (DataLoader(Stream(), batch_size=3, drop_last=True), (3, True, True, 0)),
    ],
    ids=range(12),
)
def test_a_run_uses_what_the_loader_says(loader, expected):
    found = settled(loader)
    assert used(found) == expected
    # Resumed with the settings of its manifest, it is the same run, and nothing contradicts anything.
    again = settled(
        loader, **dict(zip(("batch_size", "shuffle", "drop_last", "loader_workers"), expected, strict=True))
    )
    assert again.settings == found.settings
    assert [note for note in again.notes if "is used" in note] == []


def test_what_was_taken_over_is_said():
    loader = DataLoader(
        POINTS,
        8,
        sampler=WeightedRandomSampler([1.0] * 50, 20),
        drop_last=True,
        num_workers=1,
        collate_fn=own_collate,
    )
    (note,) = settled(loader).notes
    assert note == (
        "taken over from the DataLoader: batches of 8, WeightedRandomSampler, the last one dropped if it is"
        " not full, its collate_fn, 1 worker"
    )
    assert settled(POINTS).notes == []


def test_a_loader_without_a_sampler_leaves_the_order_to_that_of_the_job():
    loader = DataLoader(POINTS, 8)
    (note,) = settled(loader, job_of(loader, sampler=lambda dataset, epoch, seed: [3, 1, 2])).notes
    assert note == "taken over from the DataLoader: batches of 8"


def test_a_worker_is_prepared_as_the_loader_says():
    begun: list[int] = []
    found = settled(DataLoader(POINTS, worker_init_fn=begun.append))
    prepare = found.source.recipe.prepare_worker
    assert prepare is not None
    prepare(7)
    assert begun == [7]


def test_a_stream_is_read_by_one_process():
    loader = DataLoader(Stream(), batch_size=2)
    loader.num_workers = 4  # in this way torch does not compare it with the cores of this machine
    found = settled(loader)
    assert "one process reads it" in found.notes[-1]


def test_the_collate_function_of_the_job_or_of_the_loader_makes_batches():
    def negative(rows: list[Any]) -> Any:
        return -default_collate(rows)[0]

    for job in (job_of(POINTS, collate=negative), job_of(DataLoader(POINTS, 4, collate_fn=negative))):
        source = settled(None, job, batch_size=4, shuffle=False).source
        assert torch.equal(source.first(4), -POINTS.tensors[0][:4])


# --- typed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "expected", "said"),
    [
        ({"batch_size": 16}, (16, True, True, 1), "--batch-size 16 is used, not the DataLoader's 8"),
        ({"shuffle": False}, (8, False, True, 1), "--no-shuffle is used, not the DataLoader's True"),
        ({"drop_last": False}, (8, True, False, 1), "--no-drop-last is used, not the DataLoader's True"),
        ({"loader_workers": 0}, (8, True, True, 0), "--loader-workers 0 is used, not the DataLoader's 1"),
        ({"batch_size": 8}, (8, True, True, 1), ""),
    ],
)
def test_what_the_user_typed_wins_and_is_said(typed, expected, said):
    found = settled(DataLoader(POINTS, 8, shuffle=True, drop_last=True, num_workers=1), **typed)
    assert used(found) == expected
    assert [note for note in found.notes if "is used" in note] == [said] * bool(said)


# --- refused ----------------------------------------------------------------------------------------

WEIGHTED = WeightedRandomSampler([1.0] * 50, 20)
BATCHES = [[1, 2], [3]]


def order(dataset: Any, epoch: int, seed: int) -> list[int]:
    return [1, 2, 3]


CONTRADICTIONS: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (DataLoader(POINTS, sampler=WEIGHTED), {}, {"shuffle": True}, "--shuffle contradicts the job"),
    (DataLoader(POINTS, sampler=WEIGHTED), {}, {"shuffle": False}, "--no-shuffle contradicts the job"),
    (POINTS, {"sampler": order}, {"shuffle": False}, "the order is drawn by a sampler"),
    (DataLoader(POINTS, sampler=WEIGHTED), {"sampler": order}, {}, "the job has a sampler, and so has"),
    (DataLoader(POINTS, shuffle=True), {"sampler": order}, {}, "the job has a sampler, and so has"),
    (DataLoader(POINTS, collate_fn=own_collate), {"collate": own_collate}, {}, "the job has a collate"),
    (DataLoader(POINTS, batch_sampler=BATCHES), {}, {"batch_size": 4}, "--batch-size 4 contradicts the job"),
    (DataLoader(POINTS, batch_sampler=BATCHES), {}, {"drop_last": True}, "the sampler makes the batches"),
    (POINTS, {"sampler": BATCHES}, {"batch_size": 4}, "the sampler makes the batches"),
    (DataLoader(POINTS, batch_size=None), {}, {"batch_size": 4}, "the DataLoader gets whole batches"),
]


@pytest.mark.parametrize(("loader", "more", "typed", "what"), CONTRADICTIONS, ids=range(len(CONTRADICTIONS)))
def test_a_contradiction_is_refused_by_name(loader, more, typed, what):
    error = refused(loader, more, **typed)
    assert error.code == "W5-253"
    assert what in error.what
    assert error.fix


def test_a_loader_that_reads_in_a_way_of_its_own_is_refused():
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    class Named(DataLoader[Any]):
        """Adds nothing to reading."""

    error = refused(Doubling(POINTS))
    assert error.code == "W5-253"
    assert "Doubling, which reads in a way of its own" in error.what
    assert used(settled(Named(POINTS, 8))) == (8, False, False, 0)


def test_a_collate_function_that_fails_is_told_with_the_line():
    def broken(rows: list[Any]) -> Any:
        raise IndexError("no rows")

    source = settled(POINTS, job_of(POINTS, collate=broken)).source
    with pytest.raises(
        JobError, match=r"collate\(\) failed: IndexError: no rows \(test_job_data.py"
    ) as caught:
        source.first(4)
    assert caught.value.code == "W5-252"


@pytest.mark.parametrize("sampler", [3, object()])
def test_a_job_with_something_else_for_a_sampler_is_refused(sampler):
    with pytest.raises(JobError, match="Job\\(sampler=…\\)") as caught:
        job_of(POINTS, sampler=sampler)
    assert caught.value.code == "W5-202"


def test_a_data_set_inside_is_what_counts():
    class Nothing(Dataset[Any]):
        def __len__(self) -> int:
            return 0

    assert refused(DataLoader(Nothing(), batch_size=2)).code == "W5-204"
    assert isinstance(settled(DataLoader(POINTS)).source.dataset, TensorDataset)
