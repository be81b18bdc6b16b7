"""The step log keeps whole steps only, and a run folder belongs to one coordinator at a time."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.runtime.faults import FaultyDisk, failing_at
from w5xde.errors import StorageError
from w5xde.runtime.durable.disk import Disk, RealDisk
from w5xde.runtime.durable.lock import RunLock
from w5xde.runtime.durable.step_log import StepLog, forget_steps, read_steps

# --- steps ----------------------------------------------------------------------------------------


def log(disk: Disk, life: int, first: int, count: int, *, at: int | None = None) -> StepLog:
    """A life that applied these steps; `at` is where its segment begins, if before the first of them."""
    steps = StepLog(disk, life)
    steps.begin(first if at is None else at)
    for version in range(first, first + count):
        assert steps.write({"version": version}, body(life, version))
    return steps


def body(life: int, version: int) -> bytes:
    return f"life {life}, version {version}".encode() * 3


def replayed(disk: Disk, version: int) -> list[bytes]:
    found = list(read_steps(disk, version))
    assert [record["version"] for record, _ in found] == list(range(version, version + len(found)))
    return [data for _, data in found]


def test_steps_are_read_again_from_any_version(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    steps = log(disk, 1, 0, 4)
    steps.begin(4)
    steps.write({"version": 4}, memoryview(body(1, 4)))
    steps.write({"version": 5}, b"")
    steps.close()
    whole = [body(1, version) for version in range(5)] + [b""]
    for version in range(7):
        assert replayed(disk, version) == whole[version:]


def test_a_step_is_synced_before_it_counts(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    log(disk, 1, 0, 2).close()
    name = "steps-1-1-000000000.log"
    begun = disk.done.index(f"append {name}")
    assert disk.done[begun + 1 :] == ["sync_folder ", *[f"append to {name}", f"sync {name}"] * 2]


def test_the_last_step_torn_at_any_byte_is_dropped_and_the_next_life_goes_on(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    log(RealDisk(whole), 1, 0, 3).close()
    data = (whole / "steps-1-1-000000000.log").read_bytes()
    for length in range(len(data) * 2 // 3, len(data)):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / "steps-1-1-000000000.log").write_bytes(data[:length])
        disk = RealDisk(folder)
        assert replayed(disk, 0) == [body(1, 0), body(1, 1)]
        log(disk, 2, 2, 1).close()
        assert replayed(disk, 0) == [body(1, 0), body(1, 1), body(2, 2)]
        shutil.rmtree(folder)


def test_every_changed_byte_ends_what_can_be_read(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    log(disk, 1, 0, 3).close()
    path = tmp_path / "steps-1-1-000000000.log"
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        data[at] ^= 0x01
        path.write_bytes(data)
        assert len(replayed(disk, 0)) == at * 3 // len(data)
        data[at] ^= 0x01


def test_a_later_life_supersedes_what_an_earlier_one_did_there(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    log(disk, 1, 0, 10).close()
    log(disk, 2, 4, 2).close()
    assert replayed(disk, 0) == [body(1, v) for v in range(4)] + [body(2, v) for v in (4, 5)]
    # A life that applied nothing superseded nothing.
    log(disk, 3, 3, 0).close()
    assert len(replayed(disk, 0)) == 6
    log(disk, 10, 3, 1).close()
    assert replayed(disk, 0) == [*(body(1, v) for v in range(3)), body(10, 3)]


def test_reading_holds_one_record_at_a_time(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    record_bytes = 1 << 20
    for life in (1, 2):
        steps = StepLog(disk, life)
        steps.begin(8 * (life - 1))
        for version in range(8 * (life - 1), 8 * life):
            steps.write({"version": version}, bytes(record_bytes))
        steps.close()
    tracemalloc.start()
    count = sum(len(data) == record_bytes for _, data in read_steps(disk, 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 16
    # The one that the caller holds, the next one as it was read, and its body.
    assert peak < 4 * record_bytes


def test_a_length_that_no_file_can_have_ends_what_can_be_read(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    log(disk, 1, 0, 1).close()
    with (tmp_path / "steps-1-1-000000000.log").open("ab") as file:
        file.write(struct.pack("<4sIQ32s", b"w5sl", 2**32 - 1, 2**63, bytes(32)))
    assert replayed(disk, 0) == [body(1, 0)]


def test_a_life_that_goes_on_from_the_log_writes_its_last_step_once_more(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    log(disk, 1, 0, 3).close()
    last = list(read_steps(disk, 0))[-1]
    steps = StepLog(disk, 2)
    steps.resume(3, last)
    steps.write({"version": 3}, body(2, 3))
    steps.close()
    assert replayed(disk, 0) == [body(1, 0), body(1, 1), body(1, 2), body(2, 3)]
    # Its dead writer may not have synced it: with its page gone nothing is missing.
    path = tmp_path / "steps-1-1-000000000.log"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(replayed(disk, 0)) == 4


def test_nothing_is_logged_after_a_step_that_could_not_be_until_a_checkpoint(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    disk.is_torn = True
    for place, operation in enumerate(("append to", "sync")):
        steps = log(disk, place + 1, 0, 2)
        disk.wrong = failing_at(place, errno.ENOSPC)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            steps.write({"version": 2}, b"lost")
        assert disk.done[-1].startswith(operation)
        assert not steps.write({"version": 3}, b"useless")
        assert len(replayed(disk, 0)) <= 3
        # A new segment makes nothing durable before the checkpoint with which it begins is there.
        steps.begin(4)
        assert not steps.write({"version": 4}, b"kept")
        steps.anchored()
        assert steps.write({"version": 5}, b"kept too")
        assert replayed(disk, 4) == [b"kept", b"kept too"]
        steps.close()


def test_a_segment_that_is_begun_again_at_once_stays_open(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    steps = StepLog(disk, 1)
    # A run begins one, and its first checkpoint comes before its first step.
    steps.begin(0)
    steps.begin(0)
    assert steps.write({"version": 0}, body(1, 0))
    # A checkpoint that failed is tried again at the same version.
    steps.begin(1)
    steps.begin(1)
    assert steps.write({"version": 1}, body(1, 1))
    assert replayed(disk, 0) == [body(1, 0), body(1, 1)]


def test_what_the_oldest_checkpoint_needs_is_not_forgotten(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    steps = log(disk, 1, 0, 3)
    for first in (3, 6):
        steps.begin(first)
        for version in range(first, first + 3):
            steps.write({"version": version}, body(1, version))
    steps.close()
    log(disk, 2, 8, 4)
    for version in range(13):
        before = replayed(disk, version)
        forget_steps(disk, version)
        assert replayed(disk, version) == before
    assert disk.names() == ["steps-2-1-000000008.log"]


def test_a_forgotten_past_leaves_later_lives_alone(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    log(disk, 1, 0, 10).close()
    steps = log(disk, 2, 4, 3)
    steps.begin(7)
    steps.write({"version": 7}, body(2, 7))
    before = replayed(disk, 5)
    forget_steps(disk, 5)
    assert replayed(disk, 5) == before == [body(2, version) for version in (5, 6, 7)]


# --- the lock -------------------------------------------------------------------------------------


def holder(folder: Path, then: str = "") -> tuple[subprocess.Popen[str], str]:
    """Another process that holds the lock, does something else, and stays; what it said."""
    program = (
        "import os, signal\nfrom pathlib import Path\nfrom w5xde.runtime.durable.lock import RunLock\n"
        f"lock = RunLock(Path({str(folder)!r}))\nsaid = 'held'\n{then}\n"
        "print(said, flush=True)\nsignal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    assert said
    return process, said


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(StorageError, match=f"in use by process {os.getpid()} on ") as refused:
        RunLock(tmp_path)
    assert refused.value.code == "W5-406"
    assert tmp_path.name in refused.value.what
    lock.release()
    lock.release()
    RunLock(tmp_path).release()


def test_whatever_is_in_the_file_the_lock_is_taken_or_refused(tmp_path: Path) -> None:
    for content in (b"", b"{", b"[]", b'{"pid": []}', b"\xff" * 5000):
        (tmp_path / "lock").write_bytes(content)
        lock = RunLock(tmp_path)
        (tmp_path / "lock").write_bytes(content)
        with pytest.raises(StorageError, match="is in use"):
            RunLock(tmp_path)
        lock.release()


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    process, _ = holder(tmp_path)
    with pytest.raises(StorageError, match=f"process {process.pid}"):
        RunLock(tmp_path)
    kill(process)
    RunLock(tmp_path).release()


def test_a_forked_child_that_outlives_its_parent_holds_nothing(tmp_path: Path) -> None:
    process, child = holder(
        tmp_path,
        "ours, theirs = os.pipe()\n"
        "said = os.fork()\n"
        "if said == 0:\n    os.write(theirs, b'x')\n    signal.pause()\n"
        "os.read(ours, 1)",
    )
    with pytest.raises(StorageError, match=f"process {process.pid}"):
        RunLock(tmp_path)
    kill(process)
    os.kill(int(child), 0)
    RunLock(tmp_path).release()
    os.kill(int(child), signal.SIGKILL)


def test_a_forked_child_that_ends_takes_the_lock_from_nobody(tmp_path: Path) -> None:
    process, _ = holder(tmp_path, "child = os.fork()\nos._exit(0) if child == 0 else os.waitpid(child, 0)")
    with pytest.raises(StorageError, match=f"process {process.pid}"):
        RunLock(tmp_path)
    kill(process)
