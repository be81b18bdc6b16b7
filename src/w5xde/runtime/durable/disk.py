"""File operations below one run folder; each operation either succeeds or raises OSError.

All storage that must survive a crash goes through the `Disk` protocol. The simulator implements the same
protocol and loses whatever was not synced. Knows nothing of what the files hold.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

Piece = bytes | memoryview
# How much of a file is in memory while it is checked: enough that opening it for each costs next to nothing.
READ_BYTES = 1024 * 1024


class Appender(Protocol):
    """An open file that only grows."""

    def write(self, data: Piece) -> None:
        """Pass data to the operating system: it survives our process, but not a power cut."""

    def sync(self) -> None:
        """Make all data written so far survive a power cut."""

    def close(self) -> None: ...


class Disk(Protocol):
    """Files by name below one folder; a name's parts are joined by `/`."""

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder; an empty list if the folder does not exist."""

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytes:
        """Return a file's bytes from `start`, at most `count`; fewer where the file ends."""

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write a whole file and sync its content; `sync_folder` must sync its name."""

    def create(self, name: str) -> Appender:
        """Create a file, or empty it; `sync_folder` must sync its name."""

    def append(self, name: str) -> Appender:
        """Create a file that only grows, and sync its name."""

    def make_folder(self, name: str) -> None: ...

    def sync_folder(self, name: str = "") -> None:
        """Make the names in this folder survive a power cut."""

    def rename(self, old: str, new: str) -> None:
        """Rename atomically within one folder; survives a power cut only after `sync_folder`."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content."""


def replace(disk: Disk, name: str, data: bytes) -> None:
    """Replace a file of the run folder atomically, and sync it."""
    disk.write(f"{name}.tmp", [data])
    disk.rename(f"{name}.tmp", name)
    disk.sync_folder()


def read_pieces(disk: Disk, name: str) -> Iterator[bytes]:
    """Yield the content of a file, of any length, in pieces."""
    at = 0
    while piece := disk.read(name, at, READ_BYTES):
        yield piece
        at += len(piece)


class HashedPieces:
    """Yields the pieces of a file once, and knows their length and hash after that."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = pieces
        self._digest = hashlib.sha256()
        self.bytes = 0

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            self.bytes += memoryview(piece).nbytes
            self._digest.update(piece)
            yield piece

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class RealDisk:
    """The operating system's files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self, folder: str = "") -> list[str]:
        path = self.root / folder
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytes:
        if not start and count is None:
            return (self.root / name).read_bytes()
        with (self.root / name).open("rb") as file:
            # `read` allocates what it is asked for, and a damaged length may be anything.
            left = max(0, os.fstat(file.fileno()).st_size - start)
            file.seek(start)
            return file.read(left if count is None else min(count, left))

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        file = self._open(name, os.O_TRUNC)
        try:
            for piece in pieces:
                file.write(piece)
            file.sync()
        finally:
            file.close()

    def create(self, name: str) -> Appender:
        return self._open(name, os.O_TRUNC)

    def _open(self, name: str, flags: int) -> Appender:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        return _RealAppender(os.open(self.root / name, flags, 0o644))

    def append(self, name: str) -> Appender:
        appender = self._open(name, os.O_EXCL | os.O_APPEND)
        try:
            self.sync_folder(name.rpartition("/")[0])
        except OSError:
            appender.close()
            raise
        return appender

    def make_folder(self, name: str) -> None:
        (self.root / name).mkdir()

    def sync_folder(self, name: str = "") -> None:
        if os.name == "nt":
            return  # Windows syncs names itself, and cannot open folders
        folder = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, old: str, new: str) -> None:
        (self.root / old).replace(self.root / new)

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class _RealAppender:
    def __init__(self, file: int) -> None:
        self._file = file

    def write(self, data: Piece) -> None:
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(self._file, left) :]

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
