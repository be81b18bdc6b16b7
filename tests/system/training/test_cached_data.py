"""Kept samples: sent once, trained on in every epoch, and the same bits as if they were sent each time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import w5xde
from tests.processes import JOBS, AtStep, coordinator, events, forked, node, pid_of, wait_until
from tests.system.jobs import IMAGES
from w5xde.callbacks.status import RunStatus
from w5xde.cli.main import main
from w5xde.runtime.node.sample_cache import SUFFIX, SampleCache

EPOCHS = 4
# An epoch has 15 batches in 3 steps.
SETTINGS = {"epochs": EPOCHS, "batch_size": 16, "batches_per_step": 5, "seed": 3}
SAMPLE_BYTES = 3 * 32 * 32 * 4 + 8
# The least that a first epoch takes; batches that are lent twice come on top.
DATA_BYTES = IMAGES * SAMPLE_BYTES
# The part of the first epoch's bytes that a later epoch may have.
LATER_PART = 0.01


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = str(tmp_path_factory.mktemp("runs"))
    return w5xde.train(f"{JOBS}:images", nodes=1, runs=runs, **SETTINGS).summary


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("W5XDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "samples"


def file_of(cache: Path) -> Path:
    [found] = cache.glob(f"*{SUFFIX}")
    return found


def train(tmp_path: Path, nodes: int, actions: dict[int, Callable[[RunStatus], None]], **more: Any) -> Any:
    settings = {**SETTINGS, "data": "cached", "runs": str(tmp_path), **more}
    return w5xde.train(f"{JOBS}:images", nodes=nodes, callbacks=[AtStep(actions)], **settings)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_later_epochs_travel_as_numbers_and_give_the_same_bits(
    nodes: int, streamed: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    summary = train(tmp_path, nodes, {}).summary
    assert summary["weights_sha256"] == streamed["weights_sha256"]
    first, *later = summary["data_bytes_by_epoch"]
    assert first > DATA_BYTES
    assert len(later) == EPOCHS - 1
    assert max(later) <= LATER_PART * DATA_BYTES
    assert summary["data_bytes_sent"] == first + sum(later)
    local = train(tmp_path, nodes, {}, data="local").summary
    assert local["weights_sha256"] == streamed["weights_sha256"]
    # What lies there is for its owner alone.
    for path, mode in ((file_of(cache), 0o600), (cache, 0o700), (cache.parent, 0o700)):
        assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    "more",
    [{"verify": 0.5}, {"loader_workers": 2}, {"cache_bytes": 100 * SAMPLE_BYTES}, {"durability": "step"}],
    ids=str,
)
def test_kept_samples_go_with_other_settings(
    more: dict[str, Any], streamed: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    summary = train(tmp_path, 2, {}, **more).summary
    assert summary["weights_sha256"] == streamed["weights_sha256"]
    first, *later = summary["data_bytes_by_epoch"]
    if "cache_bytes" in more:
        # With too little room the samples that do not fit are sent in each epoch.
        assert min(later) > 0.5 * DATA_BYTES
        assert max(later) < first
    else:
        assert max(later) <= LATER_PART * DATA_BYTES


def test_worker_processes_read_for_nodes_that_keep_samples(tmp_path: Path, cache: Path) -> None:
    """An epoch of more batches than are read ahead: later epochs ask for their first one alone."""
    small = {"batch_size": 4, "batches_per_step": 4}
    kept = train(tmp_path, 2, {}, loader_workers=2, **small).summary
    streamed = train(tmp_path, 2, {}, data="stream", **small).summary
    assert kept["weights_sha256"] == streamed["weights_sha256"]
    assert max(kept["data_bytes_by_epoch"][1:]) <= 2 * LATER_PART * DATA_BYTES


def test_a_killed_node_leaves_no_trace_and_the_next_finds_the_samples(
    streamed: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    def kill(run: RunStatus) -> None:
        os.kill(pid_of(run, "local-1"), signal.SIGKILL)

    summary = train(tmp_path, 2, {4: kill, 8: kill}).summary
    assert summary["weights_sha256"] == streamed["weights_sha256"]
    assert max(summary["data_bytes_by_epoch"][2:]) <= LATER_PART * DATA_BYTES


def test_a_node_whose_cache_was_deleted_is_sent_what_it_misses(
    streamed: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    def delete(run: RunStatus) -> None:
        file_of(cache).unlink()
        # The node that is started instead finds no file.
        os.kill(pid_of(run, "local-1"), signal.SIGKILL)

    summary = train(tmp_path, 1, {4: delete}).summary
    assert summary["weights_sha256"] == streamed["weights_sha256"]
    _, second, third, last = summary["data_bytes_by_epoch"]
    assert second + third > 0.9 * DATA_BYTES
    assert last <= LATER_PART * DATA_BYTES


@pytest.mark.parametrize("part", ["samples", "hashes", "both"])
def test_damaged_samples_are_found_and_sent_again_and_never_trained_on(
    part: str, streamed: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    def damage(run: RunStatus) -> None:
        stored = np.memmap(file_of(cache), np.uint8, "r+")
        samples_at = len(stored) - IMAGES * SAMPLE_BYTES
        if part != "hashes":
            stored[samples_at:] ^= 0xFF
        if part != "samples":
            stored[64 : 64 + IMAGES * 16] ^= 0xFF

    result = train(tmp_path, 2, {4: damage})
    assert result.summary["weights_sha256"] == streamed["weights_sha256"]
    _, second, third, last = result.summary["data_bytes_by_epoch"]
    assert second + third > 0.9 * DATA_BYTES
    assert last <= LATER_PART * DATA_BYTES
    # Neither memory nor the node is blamed.
    kinds = {event["kind"] for event in events(result.folder)}
    assert not kinds & {"little memory", "evicted", "failed", "aside"}


def test_a_file_that_is_cut_costs_at_most_a_node(
    streamed: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    """The system kills a process that reads a map beyond the end of its file; its batches are lent again."""

    def cut(run: RunStatus) -> None:
        os.truncate(file_of(cache), 100)

    assert train(tmp_path, 2, {4: cut}).summary["weights_sha256"] == streamed["weights_sha256"]


def test_a_folder_that_cannot_be_used_is_told_and_batches_are_sent_as_before(
    streamed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("W5XDE_CACHE", str(tmp_path / "file"))
    result = train(tmp_path, 2, {})
    assert result.summary["weights_sha256"] == streamed["weights_sha256"]
    logged = events(result.folder)
    told = [event["text"] for event in logged if event["kind"] == "no cache"]
    why = "keeps no samples (no room, or no cache folder), so every epoch is sent to it"
    # On a busy machine one node may train all of it before the other has joined.
    joined = [event["node"] for event in logged if event["kind"] == "joined"]
    assert joined
    assert sorted(told) == sorted(f"{node} {why}" for node in joined)
    assert min(result.summary["data_bytes_by_epoch"]) > DATA_BYTES


def test_a_resumed_run_finds_its_samples(tmp_path: Path, streamed: dict[str, Any], cache: Path) -> None:
    train(tmp_path, 2, {}, epochs=2, name="mine")
    again = w5xde.train(f"{JOBS}:images", resume="mine", runs=str(tmp_path), epochs=EPOCHS).summary
    assert again["weights_sha256"] == streamed["weights_sha256"]
    _, *later = again["data_bytes_by_epoch"]
    assert len(later) == EPOCHS - 1
    assert max(later) <= LATER_PART * DATA_BYTES


def test_data_that_changes_while_it_is_kept_ends_the_run(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(w5xde.TrainingError) as caught:
        w5xde.train(f"{JOBS}:drifting", nodes=2, data="cached", runs=str(tmp_path), **SETTINGS)
    assert "is another one than when it was first read" in str(caught.value)


def test_auto_keeps_samples_at_nodes_that_join_alone(
    streamed: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    """For a node that the command itself started, sending a sample costs less than looking after it."""
    alone = train(tmp_path, 1, {}, data="auto").summary
    assert min(alone["data_bytes_by_epoch"]) > DATA_BYTES
    assert not cache.exists()
    settings = {**SETTINGS, "data": "auto", "nodes": 0}
    with (
        coordinator(tmp_path, f"{JOBS}:images", **settings) as served,
        node(served.ticket, "images") as guest,
    ):
        assert guest.wait() == 0, guest.text
        assert served.process.wait() == 0, served.process.text
        summary = served.result()
    assert summary["weights_sha256"] == streamed["weights_sha256"]
    _, *later = summary["data_bytes_by_epoch"]
    assert max(later) <= LATER_PART * DATA_BYTES


def test_a_node_whose_disk_is_full_says_so_once_and_is_sent_every_batch(
    tmp_path: Path, streamed: dict[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: SampleCache, *stored: Any) -> bool:
        self.trouble = "No space left on device"
        return False

    settings = {**SETTINGS, "data": "cached", "nodes": 0}
    with coordinator(tmp_path, f"{JOBS}:images", **settings) as served:
        monkeypatch.setattr(SampleCache, "write", write)
        with forked(
            lambda: main(["join", "--nodes", "1", served.ticket.to_text(), f"{JOBS}:images"])
        ) as guest:
            guest.wait()
        assert served.process.wait() == 0, served.process.text
        summary = served.result()
    assert summary["weights_sha256"] == streamed["weights_sha256"]
    assert min(summary["data_bytes_by_epoch"]) > DATA_BYTES
    assert guest.text.count("No space left on device") == 1


def test_a_node_may_refuse_to_keep_anything(tmp_path: Path, streamed: dict[str, Any], cache: Path) -> None:
    settings = {**SETTINGS, "data": "cached", "nodes": 0}
    with (
        coordinator(tmp_path, f"{JOBS}:images", **settings) as served,
        node(served.ticket, "images", cache_bytes=0),
    ):
        wait_until(lambda: served.process.poll() is not None, lambda: served.process.text)
        summary = served.result()
    assert summary["weights_sha256"] == streamed["weights_sha256"]
    assert not cache.exists()
