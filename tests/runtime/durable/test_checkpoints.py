"""Checkpoints on a real disk: there whole or not at all, whatever is flipped, cut or lost."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import w5xde
from tests.learn.jobs import make, mlp, settings
from tests.learn.states import content_of
from tests.runtime.faults import FaultyDisk, failing_at
from tests.system.jobs import job
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.checkpoint import LEARNER, MODEL, TRAINING, capture
from w5xde.learn.step.learner import Learner
from w5xde.runtime.durable.audit import audit_disk
from w5xde.runtime.durable.checkpoints import FOLDER, MANIFEST, CheckpointStore
from w5xde.runtime.durable.disk import RealDisk
from w5xde.runtime.durable.sealed_json import Damaged, seal

FACTS = {"cut": {"progress": {"steps": 1}}, "ledger": {"sha256": "0" * 64, "records": 0}, "meters": {}}
PAGE_BYTES = 4096


# --- one checkpoint -------------------------------------------------------------------------------


def learner() -> Learner:
    return prepare(make(mlp()), settings()).learner


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return content_of(capture(learner()))


def save(store: CheckpointStore, version: int, files: dict[str, bytes]) -> str:
    return store.save(version, {name: [data] for name, data in files.items()}, FACTS | {"at": version})


def whole(store: CheckpointStore) -> list[int]:
    """Versions that can be read."""
    found = []
    for version in store.versions():
        try:
            found.append(store.read(version).version)
        except Damaged:
            continue
    return found


@pytest.fixture
def saved(tmp_path: Path, files: dict[str, bytes]) -> tuple[CheckpointStore, Path]:
    store = CheckpointStore(RealDisk(tmp_path))
    save(store, 7, files)
    return store, tmp_path / FOLDER / "step-000000007"


def spoiled(store: CheckpointStore, path: Path, data: bytes) -> None:
    """Something else in place of a file must be found out."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        store.read(7)
    except Damaged:
        path.write_bytes(before)
        return
    raise AssertionError(f"{path.name} was read although it is not what was written")


def test_what_was_saved_is_read_back_as_it_was(
    saved: tuple[CheckpointStore, Path], files: dict[str, bytes]
) -> None:
    store, folder = saved
    checkpoint = store.read(7)
    assert (checkpoint.version, checkpoint.files) == (7, files)
    assert checkpoint.facts["at"] == 7
    assert json.loads((folder / MANIFEST).read_bytes())["sha256"] == checkpoint.sha256
    assert sorted(path.name for path in folder.iterdir()) == sorted([*files, MANIFEST])


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_every_flipped_byte_of_the_manifest_is_found(saved: tuple[CheckpointStore, Path], mask: int) -> None:
    store, folder = saved
    data = (folder / MANIFEST).read_bytes()
    for at in range(len(data)):
        spoiled(store, folder / MANIFEST, _flipped(data, at, mask))
    assert store.read(7)


@pytest.mark.parametrize("name", [MODEL, TRAINING])
def test_every_flipped_byte_of_a_header_is_found(saved: tuple[CheckpointStore, Path], name: str) -> None:
    store, folder = saved
    data = (folder / name).read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    for at in range(8 + header_bytes):
        spoiled(store, folder / name, _flipped(data, at, 0x01))
    assert store.read(7)


def test_a_thousand_flipped_bytes_of_data_are_found(saved: tuple[CheckpointStore, Path]) -> None:
    store, folder = saved
    chance = random.Random(11)
    data = {name: (folder / name).read_bytes() for name in (MODEL, TRAINING, LEARNER)}
    for _ in range(1000):
        name = chance.choice(sorted(data))
        at, mask = chance.randrange(len(data[name])), 1 << chance.randrange(8)
        spoiled(store, folder / name, _flipped(data[name], at, mask))
    assert store.read(7)


def _flipped(data: bytes, at: int, mask: int) -> bytes:
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def test_every_cut_missing_or_foreign_file_is_found(saved: tuple[CheckpointStore, Path]) -> None:
    store, folder = saved
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for length in {*range(0, len(data), PAGE_BYTES), len(data) - 1}:
            spoiled(store, path, data[:length])
        spoiled(store, path, data + b"\n")
        path.unlink()
        with pytest.raises(Damaged, match=path.name):
            store.read(7)
        path.write_bytes(data)
    (folder / "extra.bin").write_bytes(b"")
    with pytest.raises(Damaged, match=r"extra\.bin"):
        store.read(7)
    (folder / "extra.bin").unlink()
    assert store.read(7)


def test_a_checkpoint_under_another_number_is_found(saved: tuple[CheckpointStore, Path]) -> None:
    store, folder = saved
    folder.rename(folder.with_name("step-000000008"))
    with pytest.raises(Damaged, match="version 7"):
        store.read(8)


SEALED = {
    "no json": b"{oops",
    "a list": b"[1,2]",
    "another format": b'{"format":99,"version":7,"files":{},"facts":{}}',
    "no files": b'{"format":1,"version":7,"facts":{}}',
    "files that are no table": b'{"format":1,"version":7,"files":7,"facts":{}}',
    "a file without a length": b'{"format":1,"version":7,"files":{"a":{}},"facts":{}}',
    "a file that is a number": b'{"format":1,"version":7,"files":{"a":1},"facts":{}}',
    "no version": b'{"format":1,"files":{},"facts":{}}',
    "no facts": b'{"format":1,"version":7,"files":{}}',
    "a way out": b'{"format":1,"version":7,"files":{"../../x":{"bytes":1,"sha256":""}},"facts":{}}',
    "a deep well": b"[" * 100_000 + b"]" * 100_000,
}


@pytest.mark.parametrize("case", SEALED)
def test_a_manifest_that_is_sealed_but_makes_no_sense_is_damaged(case: str, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER / "step-000000007"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(seal(SEALED[case])[0] + b"\n")
    if b'"a":' in SEALED[case]:
        (folder / "a").write_bytes(b"x")
    with pytest.raises(Damaged):
        CheckpointStore(RealDisk(tmp_path)).read(7)


# --- several --------------------------------------------------------------------------------------


def test_a_damaged_newest_one_is_named_put_aside_and_the_one_before_is_taken(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    store = CheckpointStore(RealDisk(tmp_path))
    for version in (1, 2, 3):
        save(store, version, files)
    (tmp_path / FOLDER / "step-000000003" / MODEL).write_bytes(b"")
    (tmp_path / FOLDER / "step-000000002" / MANIFEST).unlink()
    looked, why = store.find_whole()
    assert looked is not None
    assert store.versions() == [1, 2, 3], "looking changes nothing"
    assert sorted(why) == [2, 3]
    checkpoint, damaged = store.newest()
    assert checkpoint is not None
    assert checkpoint.version == 1
    assert "step-000000003" in damaged[0]
    assert MODEL in damaged[0]
    assert "step-000000002" in damaged[1]
    names = RealDisk(tmp_path).names(FOLDER)
    assert names == ["damaged-step-000000002", "damaged-step-000000003", "step-000000001"]
    save(store, 3, files)
    (tmp_path / FOLDER / "step-000000003" / MODEL).write_bytes(b"")
    assert store.newest()[1] != []
    assert "damaged-step-000000003-2" in RealDisk(tmp_path).names(FOLDER)


def test_without_any_whole_one_there_is_none(tmp_path: Path, files: dict[str, bytes]) -> None:
    store = CheckpointStore(RealDisk(tmp_path))
    assert store.newest() == (None, [])
    save(store, 1, files)
    (tmp_path / FOLDER / "step-000000001" / LEARNER).unlink()
    checkpoint, damaged = store.newest()
    assert checkpoint is None
    assert len(damaged) == 1


def test_three_are_kept_and_an_older_one_goes_only_after_the_new_one_was_read_back(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    disk = FaultyDisk(tmp_path)
    store = CheckpointStore(disk)
    for version in range(1, 6):
        disk.done.clear()
        save(store, version, files)
        assert whole(store) == list(range(max(1, version - 2), version + 1))
        if version > 3:
            removed = disk.done.index(f"rename {FOLDER}/removing-{version - 3:09}")
            name = f"{FOLDER}/step-{version:09}"
            read = [disk.done.index(f"read {name}/{file}") for file in (*files, MANIFEST)]
            assert max(read) < removed
            assert disk.done.index(f"sync_folder {FOLDER}") < min(read)


def test_what_cannot_be_read_back_costs_no_older_one(tmp_path: Path, files: dict[str, bytes]) -> None:
    disk = FaultyDisk(tmp_path)
    store = CheckpointStore(disk)
    for version in (1, 2, 3):
        save(store, version, files)
    disk.wrong = lambda operation, name: errno.EIO if operation == "read" and "004" in name else 0
    with pytest.raises(OSError, match="read back"):
        save(store, 4, files)
    disk.wrong = lambda operation, name: 0
    assert whole(store)[:3] == [1, 2, 3]


def test_leftovers_of_a_dead_writer_are_harmless(tmp_path: Path, files: dict[str, bytes]) -> None:
    for version in (4, 9):
        folder = tmp_path / FOLDER / f"writing-{version:09}"
        folder.mkdir(parents=True)
        (folder / MODEL).write_bytes(b"half of")
    store = CheckpointStore(RealDisk(tmp_path))
    assert store.newest() == (None, [])
    save(store, 4, files)
    assert whole(store) == [4]
    assert "writing-000000004" not in RealDisk(tmp_path).names(FOLDER)


# --- a disk that fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("is_torn", [False, True])
def test_a_save_that_fails_anywhere_leaves_the_older_ones_whole_and_can_be_repeated(
    tmp_path: Path, files: dict[str, bytes], number: int, is_torn: bool
) -> None:
    before = tmp_path / "before"
    store = CheckpointStore(RealDisk(before))
    before.mkdir()
    for version in (1, 2, 3):
        save(store, version, files)
    (before / FOLDER / "writing-000000004").mkdir()
    # A removal begins only when the new one is safe, and has a test of its own below.
    for place in _places(before, tmp_path / "count", files):
        folder = tmp_path / f"at-{place}"
        shutil.copytree(before, folder)
        disk = FaultyDisk(folder)
        disk.is_torn = is_torn
        disk.wrong = failing_at(place, number)
        with pytest.raises(OSError, match=os.strerror(number)):
            save(CheckpointStore(disk), 4, files)
        after = CheckpointStore(RealDisk(folder))
        assert whole(after)[:3] == [1, 2, 3], disk.done[-1]
        assert set(after.versions()) <= {1, 2, 3, 4}
        checkpoint, damaged = after.newest()
        assert checkpoint is not None
        assert damaged == [], disk.done[-1]
        save(after, 4, files)
        save(after, 5, files)
        assert whole(after) == [3, 4, 5]


def _places(before: Path, folder: Path, files: dict[str, bytes]) -> Iterator[int]:
    shutil.copytree(before, folder)
    disk = FaultyDisk(folder)
    save(CheckpointStore(disk), 4, files)
    last = next(i for i, done in enumerate(disk.done) if "removing-" in done)
    assert last > 15
    return iter(range(last))


def test_a_removal_that_stops_half_way_leaves_no_damaged_checkpoint(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    disk = FaultyDisk(tmp_path)
    disk.is_torn = True
    store = CheckpointStore(disk)
    for version in (1, 2, 3):
        save(store, version, files)
    disk.wrong = lambda operation, name: errno.EIO if operation == "remove" else 0
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        save(store, 4, files)
    disk.wrong = lambda operation, name: 0
    # What was begun to be removed counts no more: an audit must not find it damaged.
    assert store.versions() == whole(store)
    assert whole(store)[-3:] == [2, 3, 4]


def test_what_is_there_already_is_synced_before_it_counts(tmp_path: Path, files: dict[str, bytes]) -> None:
    disk = FaultyDisk(tmp_path)
    store = CheckpointStore(disk)
    save(store, 1, files)
    is_renamed = False

    def wrong(operation: str, name: str) -> int:
        nonlocal is_renamed
        is_renamed = is_renamed or operation == "rename"
        return errno.EIO if is_renamed and operation == "sync_folder" else 0

    disk.wrong = wrong
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        save(store, 2, files)
    disk.wrong = lambda operation, name: 0
    disk.done.clear()
    save(store, 2, files)
    assert f"sync_folder {FOLDER}" in disk.done, "its name may not survive, and nobody was told"


def test_the_folder_of_checkpoints_is_synced_even_if_that_failed_at_first(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    disk = FaultyDisk(tmp_path)
    store = CheckpointStore(disk)
    disk.wrong = lambda operation, name: errno.EIO if operation == "sync_folder" else 0
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        save(store, 1, files)
    disk.wrong = lambda operation, name: 0
    disk.done.clear()
    save(store, 1, files)
    assert "sync_folder " in disk.done, "the folder's own name may not survive, and nobody was told"


class PruningDisk(RealDisk):
    """Somebody removes the oldest checkpoint just when it is to be read."""

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytes:
        if name.startswith(f"{FOLDER}/step-000000001/") and self.names(f"{FOLDER}/step-000000001"):
            self.remove(f"{FOLDER}/step-000000001")
        return super().read(name, start, count)


def test_an_audit_does_not_mind_a_checkpoint_that_is_removed_meanwhile(tmp_path: Path) -> None:
    result = w5xde.train(job, nodes=1, steps=2, runs=str(tmp_path))
    folder = result.folder / FOLDER
    newest = max(folder.iterdir())
    shutil.copytree(newest, folder / "step-000000001", dirs_exist_ok=True)
    assert audit_disk(RealDisk(result.folder), "run").findings.violations != [], "it is there, and not right"
    report = audit_disk(PruningDisk(result.folder), "run")
    assert report.findings.violations == []
    assert 1 not in report.checkpoints
