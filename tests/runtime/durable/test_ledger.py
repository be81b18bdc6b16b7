"""The ledger on a real disk: a chain that keeps what was written, and shows what was changed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from tests.processes import events
from tests.runtime.faults import FaultyDisk, failing_at
from w5xde.control.steps.cut import Accounts, Cut, Progress
from w5xde.control.steps.plan import Cursor
from w5xde.runtime.durable import ledger as module
from w5xde.runtime.durable.audit import audit_disk
from w5xde.runtime.durable.checkpoints import CheckpointStore
from w5xde.runtime.durable.disk import Disk, RealDisk
from w5xde.runtime.durable.ledger import Ledger, Record
from w5xde.runtime.durable.ledger_segments import (
    LedgerReader,
    compress_segments,
    find_missing_segments,
    segment_name,
    segments,
)
from w5xde.runtime.durable.resume import Facts, KeptMeters
from w5xde.runtime.durable.sealed_json import seal

PLAN = {"step_batches": 1, "batch_size": 4, "samples": None, "epoch_limit": None, "step_limit": None}


def open_ledger(disk: Disk) -> Ledger:
    return Ledger(disk, lambda: 5.0, module.SEGMENT_BYTES)


def notes(first: int, count: int = 1) -> list[Record]:
    return [{"kind": "note", "number": number} for number in range(first, first + count)]


def numbers(disk: Disk, *, expected: set[str] | None = None) -> list[int]:
    """The numbers of all notes that count; the ledger must be sound."""
    reading = LedgerReader(disk, expected or set())
    found = [record["number"] for record in reading.records() if record["kind"] == "note"]
    assert reading.damage == []
    return found


def begin(number: int) -> Record:
    return {"kind": "start", "incarnation": number, "plan": PLAN}


# --- a chain --------------------------------------------------------------------------------------


def test_what_is_written_is_read_in_order_with_its_time(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    ledger = open_ledger(disk)
    ledger.write(notes(0, 3))
    ledger.write([])
    ledger.write(notes(3, 2))
    ledger.close()
    reading = LedgerReader(disk)
    assert list(reading.records()) == [{"time": 5.0, **note} for note in notes(0, 5)]
    assert (reading.damage, reading.remarks) == ([], [])
    assert reading.mark == ledger.head


def test_anybody_can_check_the_chain_with_sha256_alone(tmp_path: Path) -> None:
    ledger = open_ledger(RealDisk(tmp_path))
    ledger.write(notes(0, 4))
    before = "0" * 64
    for line in (tmp_path / segment_name(1)).read_bytes().splitlines():
        found = json.loads(line)
        content = line.split(b'"sealed":', 1)[1][:-1]
        assert found["sha256"] == hashlib.sha256(before.encode() + content).hexdigest()
        before = found["sha256"]
    assert before == ledger.head.sha256


def test_every_life_has_the_next_number_and_a_segment_of_its_own(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    for life in range(1, 5):
        ledger = open_ledger(disk)
        assert ledger.life == life
        ledger.write(notes(life))
        ledger.close()
    assert numbers(disk) == [1, 2, 3, 4]
    assert [number for number, _ in segments(disk)] == [1, 2, 3, 4]


def test_the_last_record_torn_at_any_byte_is_dropped_and_the_next_life_goes_on(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    ledger = open_ledger(RealDisk(whole))
    ledger.write(notes(0, 3))
    data = (whole / segment_name(1)).read_bytes()
    start = data.rstrip(b"\n").rindex(b"\n") + 1
    for length in range(start, len(data)):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / segment_name(1)).write_bytes(data[:length])
        disk = RealDisk(folder)
        assert numbers(disk) == [0, 1]
        later = open_ledger(disk)
        assert later.life == 2
        later.write(notes(7))
        later.close()
        assert numbers(disk) == [0, 1, 7]


def test_a_segment_torn_in_its_first_line_is_passed_over(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    ledger = open_ledger(disk)
    ledger.write(notes(0, 2))
    ledger.close()
    for number, left in enumerate((0, 1, 40, 150), 2):
        later = open_ledger(disk)
        later.write(notes(99))
        later.close()
        path = tmp_path / segment_name(number)
        path.write_bytes(path.read_bytes()[:left])
        assert numbers(disk) == [0, 1]
    # Nobody knows of the lives that left no whole line; their numbers were never used for anything.
    last = open_ledger(disk)
    last.write(notes(2))
    reading = LedgerReader(disk)
    assert [record["number"] for record in reading.records()] == [0, 1, 2]
    assert reading.damage == []
    assert len(reading.remarks) == 4


def test_a_new_segment_begins_when_one_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1000)
    disk = FaultyDisk(tmp_path)
    ledger = open_ledger(disk)
    for number in range(50):
        ledger.write(notes(number))
        ledger.sync()
    assert len(segments(disk)) > 5
    assert numbers(disk) == list(range(50))
    # What is behind is synced before anything follows it.
    for number in range(2, len(segments(disk)) + 1):
        synced = disk.done.index(f"sync {segment_name(number - 1)}")
        assert synced < disk.done.index(f"append {segment_name(number)}")
    later = open_ledger(disk)
    assert later.life == 2
    later.write(notes(50))
    assert numbers(disk) == list(range(51))


# --- what was changed -----------------------------------------------------------------------------


def small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A ledger of two lives and three segments; returns the hash of its last line."""
    monkeypatch.setattr(module, "SEGMENT_BYTES", 500)
    disk = RealDisk(folder)
    first = open_ledger(disk)
    first.write([begin(1), *notes(0, 2)])
    first.sync()
    first.write(notes(2))
    first.close()
    second = open_ledger(disk)
    restore = {"kind": "restore", "version": 0, "sha256": "", "aside": [], "damaged": []}
    second.write([begin(2), restore, *notes(3)])
    second.sync()
    second.close()
    assert len(segments(disk)) == 3
    return second.head.sha256


def test_every_changed_byte_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = small(tmp_path, monkeypatch)
    disk = RealDisk(tmp_path)
    assert audit_disk(disk, "run", head).is_clean
    for _, name in segments(disk):
        data = bytearray((tmp_path / name).read_bytes())
        for at in range(len(data)):
            data[at] ^= 0x01
            (tmp_path / name).write_bytes(data)
            assert not audit_disk(disk, "run", head).is_clean, f"byte {at} of {name}"
            data[at] ^= 0x01
        (tmp_path / name).write_bytes(data)
    assert audit_disk(disk, "run", head).is_clean


def test_a_changed_byte_is_found_even_if_nobody_noted_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path, monkeypatch)
    disk = RealDisk(tmp_path)
    assert audit_disk(disk, "run").is_clean
    for number, name in segments(disk):
        data = bytearray((tmp_path / name).read_bytes())
        # Without its newline the very last line is one that was being written: that is no change.
        for at in range(len(data) - (number == 3)):
            data[at] ^= 0x01
            (tmp_path / name).write_bytes(data)
            assert not audit_disk(disk, "run").is_clean, f"byte {at} of {name}"
            data[at] ^= 0x01
        (tmp_path / name).write_bytes(data)


@pytest.mark.parametrize("change", ["remove", "swap", "double", "cut"])
def test_every_line_that_is_moved_or_taken_out_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    head = small(tmp_path, monkeypatch)
    disk = RealDisk(tmp_path)
    for _, name in segments(disk):
        data = (tmp_path / name).read_bytes()
        lines = data.splitlines(keepends=True)
        for at in range(len(lines)):
            others = {
                "remove": lines[:at] + lines[at + 1 :],
                "swap": lines[:at] + lines[at : at + 2][::-1] + lines[at + 2 :],
                "double": lines[: at + 1] + lines[at:],
                "cut": lines[:at],
            }[change]
            # Beyond the place where the next segment goes on nothing counts, and nothing is added by it.
            is_void = change == "double" and name != segments(disk)[-1][1] and at == len(lines) - 1
            if others != lines and not is_void:
                (tmp_path / name).write_bytes(b"".join(others))
                assert not audit_disk(disk, "run", head).is_clean, f"line {at} of {name}"
        (tmp_path / name).unlink()
        assert not audit_disk(disk, "run", head).is_clean, f"{name} is gone"
        (tmp_path / name).write_bytes(data)


def test_lines_cut_from_the_end_are_missed_by_the_checkpoint_that_knew_them(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    ledger = open_ledger(disk)
    ledger.write([begin(1), *notes(0, 3)])
    ledger.sync()
    facts = Facts(1, Cut(0, Progress(), Cursor(), (), Accounts()), ledger.head, "", KeptMeters())
    CheckpointStore(disk).save(0, {"a": [b"x"]}, msgspec.to_builtins(facts, str_keys=True))
    ledger.write(notes(3))
    ledger.close()
    assert audit_disk(disk, "run").is_clean
    path = tmp_path / segment_name(1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert audit_disk(disk, "run").is_clean, "nobody promised to keep what came after the checkpoint"
    path.write_bytes(b"".join(lines[:-2]))
    found = audit_disk(disk, "run").findings.violations
    assert any("which a checkpoint or the manifest names" in each for each in found)


@pytest.mark.parametrize(
    "content",
    [b"[]", b"7", b'{"after":7}', b'{"after":"0"}', b'{"records":"x"}', b"[" * 100_000, b"\xff", b""],
    ids=lambda content: repr(content[:20]),
)
def test_a_first_line_that_makes_no_sense_is_told(tmp_path: Path, content: bytes) -> None:
    disk = RealDisk(tmp_path)
    ledger = open_ledger(disk)
    ledger.write([begin(1)])
    ledger.close()
    (tmp_path / segment_name(2)).write_bytes(seal(content, ledger.head.sha256)[0] + b"\n")
    assert not audit_disk(disk, "run").is_clean
    later = open_ledger(disk)
    later.write([begin(2)])
    assert later.life == 2


# --- a disk that fails ----------------------------------------------------------------------------


def written(disk: FaultyDisk) -> None:
    """Twelve notes, each handed over and synced as often as needed."""
    ledger = open_ledger(disk)
    for number in range(12):
        fresh: list[Record] = notes(number)
        while True:
            try:
                ledger.write(fresh)
                fresh = []
                ledger.sync()
                break
            except OSError:
                fresh = []
    ledger.close()


@pytest.mark.parametrize("is_torn", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("times", [1, 3])
def test_an_error_at_any_operation_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_torn: bool, times: int
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 900)
    (tmp_path / "count").mkdir()
    count = FaultyDisk(tmp_path / "count")
    written(count)
    begun = count.done.index(f"append {segment_name(1)}")
    for place in range(begun, len(count.done)):
        folder = tmp_path / str(place)
        folder.mkdir()
        disk = FaultyDisk(folder)
        disk.is_torn = is_torn
        wrong = iter([0] * place + [number] * times)
        disk.wrong = lambda operation, name, wrong=wrong: next(wrong, 0)
        written(disk)
        assert numbers(RealDisk(folder)) == list(range(12)), count.done[place]
        shutil.rmtree(folder)


def test_a_sync_that_failed_is_never_believed_later(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    ledger = open_ledger(disk)
    ledger.write(notes(0))
    ledger.sync()
    ledger.write(notes(1))
    disk.wrong = failing_at(0, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        ledger.sync()
    # The page that could not be written is gone, as Linux has it.
    path = tmp_path / segment_name(1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    ledger.write(notes(2))
    ledger.sync()
    assert numbers(disk) == [0, 1, 2]


def test_one_sync_is_under_way_at_a_time(tmp_path: Path) -> None:
    """The pages that a sync could not write are gone: a second one would succeed and not know."""
    disk = FaultyDisk(tmp_path)
    ledger = open_ledger(disk)
    ledger.write(notes(0))
    ledger.sync()
    ledger.write(notes(1))
    syncing = ledger.begin_sync()
    assert syncing is not None
    ledger.write(notes(2))
    assert ledger.begin_sync() is None
    with pytest.raises(OSError, match="another thread"):
        ledger.sync()
    disk.wrong = failing_at(0, errno.EIO)
    syncing.sync()
    with pytest.raises(OSError, match="Input/output"):
        ledger.end_sync(syncing)
    # All that followed the last good sync is written once more, elsewhere.
    path = tmp_path / segment_name(1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    ledger.write(notes(3))
    ledger.sync()
    assert numbers(disk, expected={ledger.head.sha256}) == [0, 1, 2, 3]


def test_a_place_that_was_synced_stays_a_place_although_the_next_write_fails(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    ledger = open_ledger(disk)
    ledger.write(notes(0))
    ledger.sync()
    ledger.write(notes(1))
    # As a checkpoint does it: the thread syncs, and before the loop hears of that a write fails.
    syncing = ledger.begin_sync()
    assert syncing is not None
    syncing.sync()
    disk.wrong = failing_at(0, errno.ENOSPC)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        ledger.write(notes(2))
    ledger.write(notes(3))
    ledger.end_sync(syncing)
    ledger.write([])
    ledger.sync()
    assert numbers(disk, expected={syncing.mark.sha256}) == [0, 1, 2, 3]


def test_a_sync_under_way_does_not_mind_that_its_segment_becomes_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 600)
    disk = RealDisk(tmp_path)
    ledger = open_ledger(disk)
    ledger.write(notes(0))
    syncing = ledger.begin_sync()
    assert syncing is not None
    ledger.write(notes(1, 5))
    syncing.sync()
    ledger.end_sync(syncing)
    ledger.write(notes(6))
    assert numbers(disk, expected={syncing.mark.sha256}) == list(range(7))


def test_what_waits_for_a_disk_has_a_limit_and_the_audit_tells_of_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNSYNCED_BYTES_MAX", 2000)
    disk = FaultyDisk(tmp_path)
    ledger = open_ledger(disk)
    ledger.write([begin(1)])
    ledger.sync()
    disk.wrong = lambda operation, name: errno.ENOSPC if operation in ("append", "append to") else 0
    for number in range(200):
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            ledger.write(notes(number))
    disk.wrong = lambda operation, name: 0
    ledger.write(notes(200))
    ledger.sync()
    # What waited for the disk is written now, beside the two records of before and one of the new segment.
    written = [json.dumps(record, separators=(",", ":")) for record in events(tmp_path)]
    assert 3 < len(written) < 200
    assert sum(map(len, written)) <= 2000 + 3 * 200
    assert any("gap" in each for each in audit_disk(disk, "run").findings.violations)


def test_a_disk_that_fails_for_long_costs_no_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(RealDisk(tmp_path))
    opened: list[int] = []
    closed: list[int] = []
    real_open, real_close = os.open, os.close

    def counted(*arguments: Any, **named: Any) -> int:
        opened.append(real_open(*arguments, **named))
        return opened[-1]

    def failed(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", counted)
        patched.setattr(os, "close", lambda file: (closed.append(file), real_close(file))[1])
        patched.setattr(os, "fsync", failed)
        for number in range(5):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                ledger.write(notes(number))
    assert len(opened) == len(closed)


# --- compressed -----------------------------------------------------------------------------------


def written_in_segments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A ledger of several closed segments and an open one; returns the hash of its last line."""
    monkeypatch.setattr(module, "SEGMENT_BYTES", 2000)
    ledger = open_ledger(RealDisk(folder))
    ledger.write([begin(1)])
    for number in range(60):
        ledger.write(notes(number))
        ledger.sync()
    ledger.close()
    assert ledger.closed_segments > 3
    return ledger.head.sha256


def test_a_compressed_ledger_has_the_same_records_and_the_same_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = written_in_segments(tmp_path, monkeypatch)
    disk = RealDisk(tmp_path)
    plain = {name: (tmp_path / name).read_bytes() for _, name in segments(disk)}
    whole = LedgerReader(disk)
    records = list(whole.records())
    compress_segments(disk, range(1, 4), 100)
    assert [name for _, name in segments(disk)] == [
        f"{name}.zst" if number < 4 else name for number, name in enumerate(plain, 1)
    ]
    for name in list(plain)[:3]:
        packed = (tmp_path / f"{name}.zst").read_bytes()
        assert len(packed) < len(plain[name]) / 1.5
        assert zstandard.ZstdDecompressor().decompress(packed) == plain[name]
    reader = LedgerReader(disk, {head})
    assert list(reader.records()) == records
    assert (reader.damage, reader.remarks, reader.mark) == ([], [], whole.mark)
    assert audit_disk(disk, "run", head).is_clean


def test_small_and_open_segments_stay_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_in_segments(tmp_path, monkeypatch)
    disk = RealDisk(tmp_path)
    before = segments(disk)
    compress_segments(disk, range(1, 4), 1_000_000)
    compress_segments(disk, [], 0)
    assert segments(disk) == before


def test_every_changed_byte_of_a_compressed_segment_is_found_or_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = written_in_segments(tmp_path, monkeypatch)
    disk = RealDisk(tmp_path)
    records = list(LedgerReader(disk).records())
    compress_segments(disk, range(1, 4), 100)
    path = tmp_path / f"{segment_name(2)}.zst"
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        data[at] ^= 0x01
        path.write_bytes(data)
        if audit_disk(disk, "run", head).is_clean:
            assert list(LedgerReader(disk).records()) == records, f"byte {at}"
        data[at] ^= 0x01
    for length in (0, 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert not audit_disk(disk, "run", head).is_clean


def test_a_small_file_that_claims_to_be_large_is_refused(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    open_ledger(disk).write([begin(1)])
    bomb = zstandard.ZstdCompressor().compress(bytes(300 * 1024 * 1024))
    disk.write(f"{segment_name(2)}.zst", [bomb])
    tracemalloc.start()
    found = audit_disk(disk, "run").findings.violations
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any("is not a compressed segment" in each for each in found)
    assert peak < 10_000_000


@pytest.mark.parametrize("is_torn", [False, True])
def test_an_error_while_compressing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_torn: bool
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    head = written_in_segments(whole, monkeypatch)
    shutil.copytree(whole, tmp_path / "count")
    count = FaultyDisk(tmp_path / "count")
    compress_segments(count, range(1, 3), 100)
    for place in range(len(count.done)):
        folder = tmp_path / str(place)
        shutil.copytree(whole, folder)
        disk = FaultyDisk(folder)
        disk.is_torn = is_torn and not count.done[place].startswith("remove")
        disk.wrong = failing_at(place, errno.ENOSPC)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            compress_segments(disk, range(1, 3), 100)
        assert numbers(disk, expected={head}) == list(range(60)), count.done[place]
        compress_segments(disk, range(1, 3), 100)
        assert numbers(disk, expected={head}) == list(range(60)), count.done[place]
        assert sorted(path.suffix for path in folder.iterdir())[-2:] == [".zst", ".zst"]


def test_the_next_life_goes_on_after_a_compressed_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = written_in_segments(tmp_path, monkeypatch)
    disk = RealDisk(tmp_path)
    compress_segments(disk, range(1, len(segments(disk)) + 1), 100)
    assert all(name.endswith(".zst") for _, name in segments(disk))
    later = open_ledger(disk)
    assert (later.life, later.head.sha256) == (2, head)
    later.write(notes(60))
    assert numbers(disk, expected={head}) == list(range(61))


class CompressingDisk(RealDisk):
    """A coordinator compresses a segment just when it is to be read."""

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytes:
        if name == segment_name(2) and (self.root / name).exists():
            compress_segments(RealDisk(self.root), [2], 100)
        return super().read(name, start, count)


def test_an_audit_does_not_mind_a_segment_that_is_compressed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = written_in_segments(tmp_path, monkeypatch)
    assert numbers(CompressingDisk(tmp_path), expected={head}) == list(range(60))
    assert (tmp_path / f"{segment_name(2)}.zst").exists()


# --- gone -----------------------------------------------------------------------------------------


def test_segments_that_are_gone_are_named_without_reading_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_in_segments(tmp_path, monkeypatch)
    disk = FaultyDisk(tmp_path)
    assert find_missing_segments(disk) == []
    assert not [each for each in disk.done if each.startswith("read")]
    (tmp_path / segment_name(1)).unlink()
    (tmp_path / segment_name(3)).unlink()
    assert find_missing_segments(disk) == [
        "the ledger has lost what was before segment 2",
        "the ledger has lost what was between segments 2 and 4",
    ]
    assert not [each for each in disk.done if each == f"read {segment_name(5)}"]


def test_a_number_that_was_never_used_is_no_loss(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    for life in (1, 2, 3):
        ledger = open_ledger(disk)
        # The first line of a segment cannot be written, and the file is removed again.
        disk.wrong = lambda operation, name: errno.ENOSPC if operation == "append to" else 0
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            ledger.write(notes(life))
        disk.wrong = lambda operation, name: 0
        ledger.write([])
        ledger.sync()
        ledger.close()
    assert [number for number, _ in segments(disk)] == [2, 4, 6]
    assert find_missing_segments(disk) == []
    # The last writer died before the first line of its segment was complete.
    (tmp_path / segment_name(6)).write_bytes(b"")
    assert find_missing_segments(disk) == []
