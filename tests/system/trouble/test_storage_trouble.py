"""Disks that are full, slow or broken for a while: training goes on, and what is safe is told."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import w5xde
from tests.processes import JOBS, AtStep, events, forked
from tests.runtime.faults import FaultyDisk
from w5xde.api import Watcher, run_coordinator
from w5xde.callbacks.status import RunStatus
from w5xde.cli.main import main
from w5xde.config import Settings
from w5xde.errors import StorageError
from w5xde.runtime.coordinator.body import Coordinator
from w5xde.runtime.durable import run_folder
from w5xde.runtime.durable.audit import audit_run
from w5xde.runtime.durable.disk import Piece, RealDisk
from w5xde.runtime.durable.ledger_segments import LedgerReader
from w5xde.setting_sources import resolve

SETTINGS: dict[str, Any] = {"batches_per_step": 4, "epochs": 45, "seed": 3}
WRITING = ("write", "append", "append to", "make_folder", "sync")


class Trouble(w5xde.Callback, Watcher):
    """A disk that cannot be written from the fifth step on, until that was told for a while."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.disks: list[FaultyDisk] = []
        self.began_at = self.ended_at = 0.0
        self.durable: list[int] = []
        self.told: list[tuple[float, str]] = []

    def make_disk(self, root: Path) -> FaultyDisk:
        disk = FaultyDisk(root)
        disk.is_torn = True
        disk.wrong = lambda operation, name: (
            self._number if self.began_at and not self.ended_at and operation in WRITING else 0
        )
        self.disks.append(disk)
        return disk

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        self._coordinator = coordinator

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        self.told = [(at, text) for at, kind, text in self._coordinator.recent_events if kind == "storage"]
        if step == 5:
            self.began_at = time.monotonic()
        elif self.told and not self.ended_at:
            self.durable.append(run.durable_steps)
            if len(self.durable) > 10:
                self.ended_at = time.monotonic()


@pytest.mark.parametrize(
    ("number", "durability"), [(errno.ENOSPC, "checkpoint"), (errno.EIO, "step")], ids=["full", "broken"]
)
def test_a_disk_that_cannot_be_written_for_a_while_costs_nothing(
    number: int, durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = w5xde.train(f"{JOBS}:job", nodes=1, runs=str(tmp_path / "plain"), **SETTINGS)
    trouble = Trouble(number)
    monkeypatch.setattr(run_folder, "RealDisk", trouble.make_disk)
    monkeypatch.setenv("TEST_BATCH_SECONDS", "0.01")
    more = {"nodes": 2, "runs": str(tmp_path), "checkpoint_every": "2steps", "durability": durability}
    settings = resolve("train", SETTINGS | more, folder=tmp_path)
    result = run_coordinator(f"{JOBS}:slow", settings, [trouble], trouble)
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert trouble.ended_at, "it never came to trouble"
    # Told within a second, with the reason; meanwhile nothing more was called safe.
    told_at, text = trouble.told[0]
    assert told_at - trouble.began_at < 1.0
    assert os.strerror(number) in text
    assert len(trouble.durable) > 10
    assert len(set(trouble.durable)) == 1
    # It recovers by itself.
    told = [
        each["text"] for each in LedgerReader(RealDisk(result.folder)).records() if each["kind"] == "storage"
    ]
    assert any("again" in text for text in told)
    assert result.summary["durable_steps"] == result.summary["steps"]
    report = audit_run(result.folder)
    assert report.findings.violations == []
    assert report.findings.steps == result.summary["steps"]


def test_a_disk_that_stays_full_is_told_at_the_end_and_the_run_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks: list[FaultyDisk] = []

    def make(root: Path) -> FaultyDisk:
        disks.append(FaultyDisk(root))
        return disks[-1]

    def fill(run: RunStatus) -> None:
        disks[-1].wrong = lambda operation, name: errno.ENOSPC if operation in WRITING else 0

    monkeypatch.setattr(run_folder, "RealDisk", make)
    settings = {"nodes": 2, "steps": 9, "checkpoint_every": "2steps", "name": "mine", "runs": str(tmp_path)}
    with pytest.raises(StorageError, match="the model cannot be saved") as told:
        w5xde.train(f"{JOBS}:job", callbacks=[AtStep({4: fill})], **settings)
    assert told.value.code == "W5-402"
    assert "make room" in told.value.fix
    result = w5xde.train(f"{JOBS}:job", resume="mine", runs=str(tmp_path))
    assert result.summary["steps"] == 9
    assert audit_run(result.folder).findings.violations == []


class SlowDisk(RealDisk):
    """Takes its time for whatever is written beside the training, and notes who writes checkpoints."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.writers: list[str] = []

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            threading.Event().wait(0.05)
        if name.startswith("checkpoints"):
            self.writers.append(thread.name)
        super().write(name, pieces)


def test_the_end_waits_for_a_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks: list[SlowDisk] = []
    monkeypatch.setattr(run_folder, "RealDisk", lambda root: disks.append(SlowDisk(root)) or disks[-1])
    for steps in (1, 2, 3, 8):
        settings = {"nodes": 1, "steps": steps, "checkpoint_every": "1steps", "name": f"{steps}"}
        result = w5xde.train(f"{JOBS}:job", runs=str(tmp_path), **settings)
        for thread in threading.enumerate():
            if "w5xde-writer" in thread.name:
                thread.join()
        # First all that was begun beside the training, then the last one; never both at once.
        writers = disks[-1].writers
        assert writers == sorted(writers, key="MainThread".__eq__), writers
        assert [event["text"] for event in events(result.folder) if event["kind"] == "storage"] == []
        assert audit_run(result.folder).findings.violations == []
        names = sorted(path.name for path in (result.folder / "checkpoints").iterdir())
        assert names[-1] == f"step-{steps:09}"
        assert all(name.startswith("step-") for name in names)


@pytest.mark.parametrize("operation", ["write", "append", "append to", "sync", "rename", "sync_folder"])
def test_a_run_that_cannot_be_resumed_for_want_of_a_disk_says_so(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    w5xde.train(f"{JOBS}:job", nodes=1, steps=3, name="mine", runs=str(tmp_path))

    def full(root: Path) -> FaultyDisk:
        disk = FaultyDisk(root)
        disk.wrong = lambda done, name: errno.ENOSPC if done == operation else 0
        return disk

    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "RealDisk", full)
        assert main(["train", "--resume", "mine", "--steps", "6", "--runs", str(tmp_path)]) == 40
    told = capfd.readouterr().err
    assert told.startswith("error[W5-404]: ")
    assert os.strerror(errno.ENOSPC) in told
    # Nothing is spoilt by that: with room again it goes on.
    assert w5xde.train(f"{JOBS}:job", resume="mine", steps=6, runs=str(tmp_path)).summary["steps"] == 6
    assert audit_run(tmp_path / "mine").findings.violations == []


def test_a_second_coordinator_of_a_run_is_refused_at_once_and_told_whom_to_stop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Listening(w5xde.Callback):
        def on_start(self, run: RunStatus) -> None:
            os.write(theirs, b"x")

    ours, theirs = os.pipe()
    settings = {"nodes": 0, "name": "mine", "runs": str(tmp_path), "callbacks": [Listening()]}
    with forked(lambda: w5xde.train(f"{JOBS}:job", **settings)) as first:
        assert os.read(ours, 1) == b"x"
        before = time.monotonic()
        assert main(["train", "--resume", "mine", "--runs", str(tmp_path)]) == 40
        assert time.monotonic() - before < 2.0
        told = capfd.readouterr().err
        assert f"error[W5-406]: run mine is in use by process {first.pid} on " in told
        assert "stop the other one first" in told
    os.close(ours)
    os.close(theirs)
