"""Which data sets nodes may keep, and when `auto` keeps them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from w5xde.config import Settings
from w5xde.errors import JobError
from w5xde.learn.data.sources import open_source
from w5xde.learn.job.cacheable import AUTO_SAMPLE_BYTES, sample_format

SAMPLES = 40
FLOATS = AUTO_SAMPLE_BYTES // 4


class Made(Dataset[Any]):
    """A data set of what a function makes of a number."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return self._make(number)


class Neighbours(Made):
    """What a sample is depends on those that are read with it."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [torch.tensor([number, sum(numbers)]) for number in numbers]


def row(number: int) -> torch.Tensor:
    return torch.full((FLOATS,), float(number))


OWN = random.Random(0)
PRIVATE = torch.Generator().manual_seed(1)
LARGE = Made(row)


def found(dataset: Any, *, draws: bool = False, **more: Any) -> Any:
    source = open_source(dataset, batch_size=4, seed=0, shuffle=True)
    source.draws = draws
    return sample_format(source, Settings(**{"data": "cached", **more}))


def refused(dataset: Any, **more: Any) -> JobError:
    with pytest.raises(JobError) as caught:
        found(dataset, **more)
    assert found(dataset, **{**more, "data": "auto"}) is None
    return caught.value


def test_samples_of_tensors_and_numbers_can_be_kept() -> None:
    assert found(LARGE).sample_bytes == AUTO_SAMPLE_BYTES
    assert found(TensorDataset(torch.zeros(5, 3), torch.zeros(5))).sample_bytes == 16
    assert found(Made(lambda i: {"x": torch.tensor([i]), "y": [float(i), i]})).sample_bytes == 24
    assert found(TensorDataset(torch.zeros(1, 3))).sample_bytes == 12


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (Made(lambda i: torch.tensor([OWN.random()])), "another sample each time"),
        (Made(lambda i: row(i) + torch.rand(1, generator=PRIVATE)), "another sample each time"),
        (Neighbours(row), "another sample each time"),
        (Made(lambda i: (row(i), "a word")), "more than tensors and numbers"),
        (Made(lambda i: torch.zeros(0)), "have no bytes"),
    ],
)
def test_what_is_never_the_same_or_no_tensor_cannot_be_kept(data: Any, what: str) -> None:
    error = refused(data)
    assert what in error.what
    assert (error.code, "--data stream" in error.fix) == ("W5-250", True)


def test_data_that_draws_from_global_generators_cannot_be_kept() -> None:
    error = refused(LARGE, draws=True)
    assert "draws random numbers" in error.what
    assert error.code == "W5-250"


def test_a_stream_has_no_numbers() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([row(1)])

    assert refused(Stream()).code == "W5-204"


def test_a_cache_that_holds_no_sample_is_refused() -> None:
    assert refused(LARGE, cache_bytes=AUTO_SAMPLE_BYTES).code == "W5-251"
    assert found(LARGE, cache_bytes=AUTO_SAMPLE_BYTES + 16) is not None
    assert refused(LARGE, cache_bytes=0).code == "W5-251"


def test_reading_twice_leaves_the_generators_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    found(LARGE)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("data", "more", "keeps"),
    [
        (LARGE, {}, True),
        (LARGE, {"epochs": 2}, True),
        (LARGE, {"epochs": 1}, False),
        (LARGE, {"steps": 5, "batches_per_step": 2, "batch_size": 4}, False),
        (LARGE, {"steps": 6, "batches_per_step": 2, "batch_size": 4}, True),
        (LARGE, {"seconds": 9}, True),
        (LARGE, {"cache_bytes": SAMPLES * (AUTO_SAMPLE_BYTES + 16)}, True),
        (LARGE, {"cache_bytes": SAMPLES * (AUTO_SAMPLE_BYTES + 16) - 1}, False),
        (Made(lambda i: row(i)[1:]), {}, False),
    ],
)
def test_auto_keeps_samples_only_where_that_saves_traffic(
    data: Any, more: dict[str, Any], keeps: bool
) -> None:
    assert (found(data, data="auto", **more) is not None) == keeps
    assert found(data, **more) is not None
    for other in ("stream", "local"):
        assert found(data, data=other, **more) is None
