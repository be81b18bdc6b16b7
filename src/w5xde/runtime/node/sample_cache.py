"""The sample cache: one memory-mapped file for each run, in which the nodes of a machine keep samples.

    CACHE/samples/NAME.samples      CACHE: $W5XDE_CACHE, else $XDG_CACHE_HOME/w5xde, else ~/.cache/w5xde

    header (64 bytes)   magic, id of the cache, slots, bytes of a sample
    hashes              16 bytes for each slot, zeros if it is empty
    samples             from a multiple of 4,096 on: the sample with number N is in slot N

Every node reads through a map and writes with system calls, so that a full disk is an error and not a signal.
No lock is needed: all nodes write the same bytes into a slot, and the hash of a slot last. A slot counts only
if its bytes have its hash. Knows no messages, and does not know whether a sample is the right one: callers
compare hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import stat
import struct
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from w5xde.errors import StorageError
from w5xde.learn.data.samples import ByteRows, Numbers, bits_of
from w5xde.message_types import DIGEST_BYTES
from w5xde.runs import CACHE_VARIABLE
from w5xde.runtime.admission.private_files import HAS_MODES, make_folder

SUFFIX = ".samples"
# Files that no node has opened for this long are removed; most runs are resumed sooner, or never.
KEPT_SECONDS = 7 * 24 * 3600.0
# The cache leaves half of the free disk to others.
DISK_PART = 0.5
_MAGIC = b"W5CACHE1"
_HEADER = struct.Struct(f"<8s{DIGEST_BYTES}sQQ")
_HEADER_BYTES = 64
_PAGE_BYTES = 4096
_FLAGS = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class Unusable(Exception):
    """There is no cache here; the text says why."""


class CacheKey(NamedTuple):
    """What a cache is for: files of other runs, or of other data, have other names."""

    run: str
    data_digest: str
    samples: int
    sample_bytes: int

    @property
    def file_name(self) -> str:
        named = "\0".join(map(str, self))
        return hashlib.sha256(named.encode()).hexdigest()[:32] + SUFFIX


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for what this user's nodes could do without."""
    if named := environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "w5xde"


class SampleCache:
    """One cache, open. One thread of a process uses it at a time."""

    def __init__(self, file: int, cache_id: bytes, slots: int, sample_bytes: int) -> None:
        """Callers use `open_cache`."""
        self.id = cache_id
        self.slots = slots
        self._file = file
        self._file_bytes = _file_bytes(slots, sample_bytes)
        self._sample_bytes = sample_bytes
        self._samples_at = _samples_at(slots)
        mapped = mmap.mmap(file, self._file_bytes, access=mmap.ACCESS_READ)
        self._hashes: ByteRows = np.frombuffer(mapped, np.uint8, slots * DIGEST_BYTES, _HEADER_BYTES).reshape(
            slots, DIGEST_BYTES
        )
        self._samples: ByteRows = np.frombuffer(
            mapped, np.uint8, slots * sample_bytes, self._samples_at
        ).reshape(slots, sample_bytes)
        # Why nothing more can be stored; empty if it can.
        self.trouble = ""
        weakref.finalize(self, os.close, file)

    def held(self) -> bytes:
        """A bit for each slot, the lowest first: whether a sample seems to be there."""
        if not self._is_whole:
            return bytes(-(-self.slots // 8))
        # As two numbers for each slot: there may be many millions of slots.
        return bits_of((self._hashes.view(np.uint64) != 0).any(axis=1)).tobytes()

    def read(self, numbers: Numbers) -> tuple[ByteRows, ByteRows]:
        """Copies of what is in the slots of these samples, and their hashes; zeros where there is no slot."""
        # To read a map beyond the end of its file kills the process. (If the file is cut after this line, it
        # does.)
        inside = numbers < (self.slots if self._is_whole else 0)
        if not inside.any():
            return np.zeros((len(numbers), self._sample_bytes), np.uint8), np.zeros(
                (len(numbers), DIGEST_BYTES), np.uint8
            )
        places = np.where(inside, numbers, 0)
        # Indexing copies: what is hashed afterwards cannot change any more.
        rows, hashes = self._samples[places], self._hashes[places]
        rows[~inside] = 0
        hashes[~inside] = 0
        return rows, hashes

    def write(self, numbers: Numbers, rows: ByteRows, hashes: ByteRows) -> bool:
        """Store the samples that have a slot. Returns whether all of them are there now."""
        if not self._is_whole:
            self.trouble = "its file was cut"
        if self.trouble:
            return False
        inside = np.flatnonzero(numbers < self.slots)
        # Another node of this machine may have stored some of them.
        new = inside[(self._hashes[numbers[inside]] != hashes[inside]).any(axis=1)]
        try:
            for place in new.tolist():
                number = int(numbers[place])
                self._put(self._samples_at + number * self._sample_bytes, rows[place])
                self._put(_HEADER_BYTES + number * DIGEST_BYTES, hashes[place])
        except OSError as error:
            self.trouble = error.strerror or str(error)
        return not self.trouble

    def discard(self, numbers: Numbers) -> None:
        """Empty the slots of these samples."""
        with contextlib.suppress(OSError):
            for number in numbers[numbers < self.slots].tolist():
                self._put(_HEADER_BYTES + number * DIGEST_BYTES, np.zeros(DIGEST_BYTES, np.uint8))

    def _put(self, at: int, data: ByteRows) -> None:
        os.lseek(self._file, at, os.SEEK_SET)
        # A disk that becomes full takes a part.
        if os.write(self._file, data.data) != data.nbytes:
            raise OSError("the disk is full")

    @property
    def _is_whole(self) -> bool:
        return os.fstat(self._file).st_size >= self._file_bytes


def open_cache(key: CacheKey, bytes_max: int, folder: Path | None = None) -> SampleCache:
    """Open the cache of a run, or make one of at most this many bytes; Unusable if that is not possible."""
    is_named = folder is None and bool(os.environ.get(CACHE_VARIABLE))
    folder = folder or cache_folder()
    if folder.exists() and not folder.is_dir():
        raise Unusable(f"{folder} is not a folder" + (f" ({CACHE_VARIABLE})" if is_named else ""))
    try:
        folder = make_folder(folder, "samples")
        path = folder / key.file_name
        _clean(folder, path, bytes_max)
        room = min(bytes_max, int(shutil.disk_usage(folder).free * DISK_PART))
        # A cache that another node of this machine has made is used as it is.
        return _open(path, key) or _make(path, key, _slots(room, key))
    except StorageError as error:
        raise Unusable(error.what) from error
    except OSError as error:
        raise Unusable(f"{folder}: {error.strerror or error}") from error


def _slots(room_bytes: int, key: CacheKey) -> int:
    slots = (room_bytes - _HEADER_BYTES - _PAGE_BYTES) // (key.sample_bytes + DIGEST_BYTES)
    if slots < 1 or not key.sample_bytes:
        raise Unusable(f"{room_bytes:,} bytes are too few for a sample of {key.sample_bytes:,}")
    return min(slots, key.samples)


def _samples_at(slots: int) -> int:
    return -(-(_HEADER_BYTES + slots * DIGEST_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


def _file_bytes(slots: int, sample_bytes: int) -> int:
    return _samples_at(slots) + slots * sample_bytes


def _open(path: Path, key: CacheKey) -> SampleCache | None:
    """The cache in this file; None if there is none. A file that is not a cache is removed."""
    try:
        file = os.open(path, _FLAGS)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(file)
        if HAS_MODES and (found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077):
            raise Unusable(f"{path} is not this user's alone")
        header = os.read(file, _HEADER.size)
        if len(header) == _HEADER.size:
            magic, cache_id, slots, sample_bytes = _HEADER.unpack(header)
            is_right = magic == _MAGIC and sample_bytes == key.sample_bytes and 0 < slots <= key.samples
            if is_right and found.st_size == _file_bytes(slots, sample_bytes):
                os.utime(path)
                return SampleCache(file, cache_id, slots, sample_bytes)
        path.unlink(missing_ok=True)
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _make(path: Path, key: CacheKey, slots: int) -> SampleCache:
    """A new cache, or that of a process that was quicker."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    aside.unlink(missing_ok=True)
    file = os.open(aside, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # A secret: nodes that name the same id share what the coordinator knows of the cache.
        os.write(file, _HEADER.pack(_MAGIC, os.urandom(DIGEST_BYTES), slots, key.sample_bytes))
        os.truncate(file, _file_bytes(slots, key.sample_bytes))
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        os.close(file)
        aside.unlink(missing_ok=True)
    made = _open(path, key)
    if made is None:
        raise Unusable(f"{path} is removed again and again")
    return made


def _clean(folder: Path, ours: Path, bytes_max: int) -> None:
    """Remove caches of other runs that are old, and the oldest of those that do not fit beside ours.

    A node that uses such a file keeps it until it ends, although the file has no name any more.
    """
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if path != ours and path.name.endswith((SUFFIX, ".new")) and stat.S_ISREG(facts.st_mode):
                # A sparse file takes less than its length.
                found.append((facts.st_mtime, getattr(facts, "st_blocks", 0) * 512, path))
    left = bytes_max
    with contextlib.suppress(OSError):
        left -= ours.lstat().st_size
    for touched, taken, path in sorted(found, reverse=True):
        left -= taken
        if left < 0 or time.time() - touched > KEPT_SECONDS:
            with contextlib.suppress(OSError):
                path.unlink()
