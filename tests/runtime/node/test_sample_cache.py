"""The sample cache: what is stored is found by every process, and nothing else is taken for a sample."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tests.processes import forked
from w5xde.learn.data.samples import chosen_of, hashes_of
from w5xde.runtime.node import sample_cache
from w5xde.runtime.node.sample_cache import (
    KEPT_SECONDS,
    SUFFIX,
    CacheKey,
    SampleCache,
    Unusable,
    cache_folder,
    open_cache,
)

SAMPLE_BYTES = 100
KEY = CacheKey("run", "digest", 50, SAMPLE_BYTES)
PLENTY = 2**20
NUMBERS = np.array([3, 49, 0], np.uint32)
ROWS = np.arange(3 * SAMPLE_BYTES, dtype=np.uint32).astype(np.uint8).reshape(3, SAMPLE_BYTES)
HASHES = hashes_of(NUMBERS, ROWS)


def file_of(folder: Path) -> Path:
    [found] = (folder / "samples").glob(f"*{SUFFIX}")
    return found


def whole(cache: SampleCache, numbers: np.ndarray = NUMBERS) -> list[bool]:
    """Which of these samples are there with their hashes."""
    rows, hashes = cache.read(numbers)
    return (hashes_of(numbers, rows) == hashes).all(axis=1).tolist()


def test_what_one_process_stores_another_reads(tmp_path: Path) -> None:
    ours = open_cache(KEY, PLENTY, tmp_path)

    def store() -> None:
        other = open_cache(KEY, PLENTY, tmp_path)
        assert other.id == ours.id
        assert other.write(NUMBERS, ROWS, HASHES)

    assert whole(ours) == [False] * 3
    with forked(store) as process:
        assert process.wait() == 0, process.text
    assert whole(ours) == [True] * 3
    assert (ours.read(NUMBERS)[0] == ROWS).all()
    assert np.flatnonzero(chosen_of(ours.held(), 50)).tolist() == [0, 3, 49]
    again = open_cache(KEY, PLENTY, tmp_path)
    assert again.held() == ours.held()


def test_another_run_or_other_data_have_another_file(tmp_path: Path) -> None:
    ours = open_cache(KEY, PLENTY, tmp_path)
    assert ours.write(NUMBERS, ROWS, HASHES)
    for other in (KEY._replace(run="other"), KEY._replace(data_digest="x"), KEY._replace(samples=51)):
        cache = open_cache(other, PLENTY, tmp_path)
        assert cache.id != ours.id
        assert not any(cache.held())


def test_a_slot_without_its_hash_is_no_sample(tmp_path: Path) -> None:
    cache = open_cache(KEY, PLENTY, tmp_path)
    assert cache.write(NUMBERS, ROWS, HASHES)
    stored = np.memmap(file_of(tmp_path), np.uint8, "r+")
    stored[4096 + 3 * SAMPLE_BYTES + 57] ^= 4
    stored[64 + 49 * 16] ^= 1
    assert whole(cache) == [False, False, True]
    # A sample in the place of another is not that one, although its bytes have their hash.
    stored[4096 + 7 * SAMPLE_BYTES : 4096 + 8 * SAMPLE_BYTES] = stored[4096 : 4096 + SAMPLE_BYTES]
    stored[64 + 7 * 16 : 64 + 8 * 16] = stored[64 : 64 + 16]
    assert whole(cache, np.array([7], np.uint32)) == [False]
    cache.discard(NUMBERS[:2])
    assert np.flatnonzero(chosen_of(cache.held(), 50)).tolist() == [0, 7]
    assert cache.write(NUMBERS, ROWS, HASHES)
    assert whole(cache) == [True] * 3


def test_only_the_first_samples_have_room(tmp_path: Path) -> None:
    cache = open_cache(KEY, 4096 + 64 + 10 * (SAMPLE_BYTES + 16), tmp_path)
    assert cache.slots == 10
    assert cache.write(NUMBERS, ROWS, HASHES)
    assert whole(cache) == [True, False, True]
    for beside in ([], [0]):
        rows, hashes = cache.read(np.array([2**32 - 1, *beside], np.uint32))
        assert not rows[0].any()
        assert not hashes[0].any()
    # A node that would give more uses the cache of its machine as it is.
    assert open_cache(KEY, PLENTY, tmp_path).slots == 10


@pytest.mark.parametrize("room", [0, 100, 4096 + 64 + SAMPLE_BYTES + 15])
def test_too_little_room_for_a_sample_is_told(room: int, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="too few for a sample of 100"):
        open_cache(KEY, room, tmp_path)


def test_samples_without_bytes_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(Unusable):
        open_cache(KEY._replace(sample_bytes=0), PLENTY, tmp_path)


def test_a_full_disk_is_an_error_and_ends_storing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache(KEY, PLENTY, tmp_path)
    assert cache.write(NUMBERS[:1], ROWS[:1], HASHES[:1])

    def full(file: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(sample_cache.os, "write", full)
        assert not cache.write(NUMBERS, ROWS, HASHES)
        cache.discard(NUMBERS[:0])
    assert cache.trouble == "No space left on device"
    assert not cache.write(NUMBERS, ROWS, HASHES)
    assert whole(cache) == [True, False, False]


def test_a_cache_leaves_half_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 2 * (4096 + 64 + 7 * (SAMPLE_BYTES + 16))

    monkeypatch.setattr(sample_cache.shutil, "disk_usage", lambda folder: Usage)
    assert open_cache(KEY, PLENTY, tmp_path).slots == 7


def test_a_file_that_was_cut_holds_nothing(tmp_path: Path) -> None:
    cache = open_cache(KEY, PLENTY, tmp_path)
    assert cache.write(NUMBERS, ROWS, HASHES)
    os.truncate(file_of(tmp_path), 200)
    assert whole(cache) == [False] * 3
    assert not any(cache.held())
    assert not cache.write(NUMBERS, ROWS, HASHES)
    assert "cut" in cache.trouble
    # The next node makes a new one.
    fresh = open_cache(KEY, PLENTY, tmp_path)
    assert fresh.id != cache.id
    assert fresh.write(NUMBERS, ROWS, HASHES)
    assert whole(fresh) == [True] * 3


@pytest.mark.parametrize("content", [b"", b"W5CACHE1", b"\0" * 5000, b"W5CACHE1" + b"\xff" * 5000])
def test_a_file_that_is_not_a_cache_is_replaced(content: bytes, tmp_path: Path) -> None:
    open_cache(KEY, PLENTY, tmp_path)
    file_of(tmp_path).write_bytes(content)
    assert open_cache(KEY, PLENTY, tmp_path).write(NUMBERS, ROWS, HASHES)


def test_a_deleted_file_lasts_as_long_as_its_node(tmp_path: Path) -> None:
    cache = open_cache(KEY, PLENTY, tmp_path)
    file_of(tmp_path).unlink()
    assert cache.write(NUMBERS, ROWS, HASHES)
    assert whole(cache) == [True] * 3
    assert not any(open_cache(KEY, PLENTY, tmp_path).held())


def test_a_file_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    open_cache(KEY, PLENTY, tmp_path)
    file_of(tmp_path).chmod(0o644)
    with pytest.raises(Unusable, match="not this user's alone"):
        open_cache(KEY, PLENTY, tmp_path)
    (tmp_path / "samples").chmod(0o755)
    with pytest.raises(Unusable, match="open to others"):
        open_cache(KEY, PLENTY, tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    open_cache(KEY, PLENTY, tmp_path)
    target = tmp_path / "target"
    file_of(tmp_path).rename(target)
    (tmp_path / "samples" / KEY.file_name).symlink_to(target)
    with pytest.raises(Unusable):
        open_cache(KEY, PLENTY, tmp_path)


def test_a_place_that_is_no_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unusable, match=r"file is not a folder$"):
        open_cache(KEY, PLENTY, tmp_path / "file")
    monkeypatch.setenv("W5XDE_CACHE", str(tmp_path / "file"))
    with pytest.raises(Unusable, match=r"file is not a folder \(W5XDE_CACHE\)$"):
        open_cache(KEY, PLENTY)


def test_files_of_other_runs_go_by_age_and_by_the_bound(tmp_path: Path) -> None:
    others = [KEY._replace(run=f"run {n}") for n in range(4)]
    for age, key in enumerate(others):
        numbers = np.arange(50, dtype=np.uint32)
        rows = np.ones((50, SAMPLE_BYTES), np.uint8)
        assert open_cache(key, PLENTY, tmp_path).write(numbers, rows, hashes_of(numbers, rows))
        path = tmp_path / "samples" / key.file_name
        seconds = path.stat().st_mtime - 100 * age - (KEPT_SECONDS if age == 3 else 0)
        os.utime(path, (seconds, seconds))
    (tmp_path / "samples" / "mine.txt").write_text("not a cache")
    taken = (tmp_path / "samples" / others[0].file_name).stat().st_blocks * 512

    def left() -> list[int]:
        return [n for n, key in enumerate(others) if (tmp_path / "samples" / key.file_name).exists()]

    open_cache(KEY, PLENTY, tmp_path)
    assert left() == [0, 1, 2]
    ours = (tmp_path / "samples" / KEY.file_name).stat().st_size
    open_cache(KEY, ours + taken + taken // 2, tmp_path)
    assert left() == [0]
    assert (tmp_path / "samples" / "mine.txt").exists()


def test_the_folder_is_the_users_and_can_be_named() -> None:
    assert cache_folder({"W5XDE_CACHE": "/x/y", "XDG_CACHE_HOME": "/z"}) == Path("/x/y")
    assert cache_folder({"XDG_CACHE_HOME": "/z"}) == Path("/z/w5xde")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/w5xde"
