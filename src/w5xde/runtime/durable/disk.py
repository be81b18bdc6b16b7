"""The disk under a run folder: few operations, each either done and synced or an OSError.

Everything that must survive a crash goes through here, and the simulator has a disk of its own with the same
operations: there writes are torn and lost, and whoever forgot to sync is found out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

Piece = bytes | memoryview


class Appender(Protocol):
    """A file that only grows."""

    def write(self, data: bytes) -> None:
        """Hand the data over to the system: it survives our death, but not the machine's."""

    def sync(self) -> None:
        """All that was written survives the machine's death too."""

    def close(self) -> None: ...


class Disk(Protocol):
    """Files by their names below one folder; parts of a name are joined by `/`."""

    def names(self, folder: str = "") -> list[str]:
        """What is in a folder, sorted; nothing if there is no such folder."""

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """A whole new file, its content synced (its name only by `sync_folder`)."""

    def append(self, name: str) -> Appender:
        """A new file that only grows, its name synced."""

    def make_folder(self, name: str) -> None: ...

    def sync_folder(self, name: str = "") -> None:
        """The names in this folder survive."""

    def rename(self, old: str, new: str) -> None:
        """Within one folder, in one piece; survives only after `sync_folder`."""

    def remove(self, name: str) -> None:
        """A file, or a folder with all it holds."""


def replace(disk: Disk, name: str, data: bytes) -> None:
    """Put this in place of a file of the run folder, whole or not at all, and synced."""
    disk.write(f"{name}.tmp", [data])
    disk.rename(f"{name}.tmp", name)
    disk.sync_folder()


class RealDisk:
    """The operating system's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self, folder: str = "") -> list[str]:
        path = self.root / folder
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        file = os.open(self.root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            for piece in pieces:
                _write_all(file, piece)
            os.fsync(file)
        finally:
            os.close(file)

    def append(self, name: str) -> Appender:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        appender = _RealAppender(os.open(self.root / name, flags, 0o644))
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
            return  # Windows keeps names by itself, and opens no folders
        folder = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, old: str, new: str) -> None:
        (self.root / old).rename(self.root / new)

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class _RealAppender:
    def __init__(self, file: int) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        _write_all(self._file, data)

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write_all(file: int, piece: Piece) -> None:
    left = memoryview(piece).cast("B")
    while left:
        left = left[os.write(file, left) :]
