"""Reading processes of a node: the batches that the node would read itself, also if a process dies."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.learn.jobs import make, mlp
from tests.processes import forked, wait_for_file, wait_until
from w5xde.errors import JobError
from w5xde.learn.data.batch_types import BatchTypes
from w5xde.learn.data.recipe import Recipe
from w5xde.learn.data.sources import MapSource
from w5xde.runtime.node.readers import BatchReaders

SAMPLES = 12


class Batch(NamedTuple):
    numbers: Tensor
    process: int


class Noisy(Dataset[Any]):
    """Samples with noise; number 7 fails, and number 8 ends its process."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if index == 7:
            raise LookupError("the seventh is lost")
        if index == 8 and os.getpid() != NODE:
            os._exit(3)
        return index + torch.rand(3)


NODE = os.getpid()


def collate(rows: list[Tensor]) -> Batch:
    return Batch(torch.stack(rows), os.getpid())


def classify(model: Any, batch: Batch) -> Tensor:
    return model(batch.numbers).mean()


def source_of(**how: Any) -> MapSource:
    types = BatchTypes.of(make(mlp(), loss=classify))
    recipe = Recipe(collate=collate, types=types, **how)
    return MapSource(Noisy(), batch_size=2, seed=5, shuffle=False, recipe=recipe)


@pytest.fixture
def readers() -> Any:
    found = BatchReaders(source_of(), 2)
    yield found
    found.close()


def test_batches_are_those_that_the_node_would_read(readers: BatchReaders) -> None:
    source = source_of()
    keys = [(epoch, batch) for epoch in (0, 3) for batch in range(3)]
    for key in keys:
        readers.ask(key, torch.tensor([key[1], 1]))
    for key in reversed(keys):
        found = readers.take(key, torch.tensor([key[1], 1]))
        assert type(found) is Batch
        assert torch.equal(found.numbers, source.read_indices(torch.tensor([key[1], 1]), *key).numbers)
        assert found.process != os.getpid()


def test_a_batch_that_nobody_asked_for_ahead_is_read_when_it_is_needed(readers: BatchReaders) -> None:
    assert len(readers.take((0, 0), torch.tensor([1, 2])).numbers) == 2
    readers.ask((0, 1), torch.tensor([3]))
    readers.forget([(0, 1), (0, 2)])


def test_a_sample_that_fails_is_told_and_others_are_read_on(readers: BatchReaders) -> None:
    with pytest.raises(JobError, match="the data set failed: LookupError: the seventh is lost") as caught:
        readers.take((0, 0), torch.tensor([7]))
    assert caught.value.code == "W5-203"
    assert len(readers.take((0, 1), torch.tensor([6])).numbers) == 1


def test_a_process_that_dies_leaves_the_node_to_read_by_itself(readers: BatchReaders) -> None:
    source = source_of()
    readers.ask((0, 1), torch.tensor([3]))
    for key, indices in (((0, 0), [8]), ((0, 1), [3]), ((0, 2), [4])):
        found = readers.take(key, torch.tensor(indices))
        assert torch.equal(found.numbers, source.read_indices(torch.tensor(indices), *key).numbers)
    assert found.process == os.getpid()
    assert "the node reads them itself" in readers.trouble


@pytest.mark.parametrize(
    ("wanted", "workers", "has_any"), [(None, 0, False), (0, 3, False), (1, 0, True), (None, 1, True)]
)
def test_the_setting_wins_over_what_the_loader_says(wanted: Any, workers: int, has_any: bool) -> None:
    found = BatchReaders.start(source_of(workers=workers), wanted)
    assert (found is not None) is has_any
    if found is not None:
        found.close()
    assert BatchReaders.start(None, 2) is None


def test_processes_are_prepared_and_do_not_keep_the_nodes_connection_open(tmp_path: Path) -> None:
    def prepare(number: int) -> None:
        (tmp_path / f"{number}").write_text(str(os.getpid()))

    ours, theirs = socket.socketpair()
    found = BatchReaders(source_of(prepare_worker=prepare), 2, ours.fileno())
    for number in (0, 1):
        wait_for_file(tmp_path / f"{number}")
    found.take((0, 0), torch.tensor([1]))
    ours.close()
    theirs.settimeout(30)
    assert theirs.recv(1) == b""
    theirs.close()
    found.close()


def is_at_work(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_processes_end_with_a_node_that_is_killed(tmp_path: Path) -> None:
    def node() -> None:
        found = BatchReaders(source_of(), 2)
        found.take((0, 0), torch.tensor([1]))
        (tmp_path / "going").write_text("")
        (tmp_path / "going").rename(tmp_path / "gone")
        signal.pause()

    with forked(node) as process:
        wait_for_file(tmp_path / "gone")
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_at_work, children)), lambda: f"{children} go on")
