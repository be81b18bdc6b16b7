"""A real disk with faults: for tests of what must survive them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from w5xde.runtime.durable.disk import Appender, Piece, RealDisk


class FaultyDisk(RealDisk):
    """A real disk that counts its operations and fails at some of them, at once or in their middle."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.done: list[str] = []
        # Asked before each operation; an errno to fail with, or 0.
        self.wrong: Callable[[str, str], int] = lambda operation, name: 0
        # A write that fails leaves half of its data, as a full disk does; a removal leaves a part of it.
        self.is_torn = False

    def check(self, operation: str, name: str) -> None:
        number = self.wrong(operation, name)
        self.done.append(f"{operation} {name}")
        if number:
            raise OSError(number, os.strerror(number))

    def names(self, folder: str = "") -> list[str]:
        self.check("names", folder)
        return super().names(folder)

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytes:
        self.check("read", name)
        return super().read(name, start, count)

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        data = b"".join(pieces)
        try:
            self.check("write", name)
        except OSError:
            if self.is_torn:
                super().write(name, [data[: len(data) // 2]])
            raise
        super().write(name, [data])

    def create(self, name: str) -> Appender:
        self.check("create", name)
        return FaultyAppender(self, name, super().create(name))

    def append(self, name: str) -> Appender:
        self.check("append", name)
        return FaultyAppender(self, name, super().append(name))

    def make_folder(self, name: str) -> None:
        self.check("make_folder", name)
        super().make_folder(name)

    def sync_folder(self, name: str = "") -> None:
        self.check("sync_folder", name)
        super().sync_folder(name)

    def rename(self, old: str, new: str) -> None:
        self.check("rename", new)
        super().rename(old, new)

    def remove(self, name: str) -> None:
        try:
            self.check("remove", name)
        except OSError:
            if self.is_torn:
                for path in sorted((self.root / name).iterdir())[:1]:
                    path.unlink()
            raise
        super().remove(name)


class FaultyAppender:
    """The same for a file that only grows."""

    def __init__(self, disk: FaultyDisk, name: str, file: Appender) -> None:
        self._disk, self._name, self._file = disk, name, file

    def write(self, data: Piece) -> None:
        try:
            self._disk.check("append to", self._name)
        except OSError:
            if self._disk.is_torn:
                self._file.write(data[: len(data) // 2])
            raise
        self._file.write(data)

    def sync(self) -> None:
        self._disk.check("sync", self._name)
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def failing_at(place: int, number: int) -> Callable[[str, str], int]:
    """Fail the operation at this place, counted from now on."""
    left = iter([0] * place + [number])
    return lambda operation, name: next(left, 0)
