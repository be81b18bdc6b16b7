"""A virtual disk with the operations of the real one, on which what was not synced may be torn or lost.

Folders and files are objects; each folder knows its names as a running system sees them, and as a disk does
that lost its power. Every operation is a point at which the world may end.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable

from w5xde.runtime.durable.disk import Appender, Piece


class File:
    """Bytes, and how many of them are on the disk for sure."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.synced = 0
        # A sync that failed: the system forgets what it did not write, and a later sync says nothing of it.
        self.is_lost = False

    def sync(self) -> None:
        if not self.is_lost:
            self.synced = len(self.data)


class Folder:
    def __init__(self) -> None:
        self.live: dict[str, File | Folder] = {}
        self.durable: dict[str, File | Folder] = {}


class VirtualDisk:
    """`point(what)` is called before every operation, and may raise: then nothing happens until `crash`."""

    def __init__(self, rng: random.Random, point: Callable[[str], None] = lambda what: None) -> None:
        self._root = Folder()
        self._rng = rng
        self._point = point
        # While set, writing fails with "full", or syncing with "broken".
        self.trouble = ""

    # --- the end of a world -----------------------------------------------------------------------

    def crash(self, *, power: bool) -> None:
        """The process dies (all that was handed over stays), or the machine loses its power."""
        self.trouble = ""
        if power:
            self._root = self._survivor(self._root)

    def _survivor(self, folder: Folder) -> Folder:
        left = Folder()
        for name, node in folder.durable.items():
            if isinstance(node, Folder):
                left.live[name] = left.durable[name] = self._survivor(node)
                continue
            file = File()
            # Of what was not synced, any part from the front may have been written.
            extra = self._rng.choice((0, 0, self._rng.randint(0, len(node.data) - node.synced)))
            file.data = node.data[: node.synced + (0 if node.is_lost else extra)]
            file.synced = len(file.data)
            left.live[name] = left.durable[name] = file
        return left

    def rot(self, folder: str) -> str:
        """Flip a bit of some file in a folder; returns which."""
        name = self._rng.choice(self.names(folder))
        file = self._file(f"{folder}/{name}")
        if file.data:
            file.data[self._rng.randrange(len(file.data))] ^= 1 << self._rng.randrange(8)
        return f"{folder}/{name}"

    # --- operations -------------------------------------------------------------------------------

    def _find(self, name: str) -> tuple[Folder, str]:
        *folders, last = name.split("/")
        at = self._root
        for folder in folders:
            node = at.live.get(folder)
            if not isinstance(node, Folder):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
            at = node
        return at, last

    def _file(self, name: str) -> File:
        folder, last = self._find(name)
        node = folder.live.get(last)
        if not isinstance(node, File):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return node

    def _folder(self, name: str) -> Folder:
        if not name:
            return self._root
        folder, last = self._find(name)
        node = folder.live.get(last)
        if not isinstance(node, Folder):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return node

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(self._folder(folder).live)
        except FileNotFoundError:
            return []

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytes:
        return bytes(self._file(name).data[start : None if count is None else start + count])

    def put(self, name: str, file: File, data: bytes) -> None:
        """Write, all of it or (the world ends, the disk is full) some."""
        try:
            self._point(f"write {name}")
        except BaseException:
            file.data += data[: self._rng.randint(0, len(data))]
            raise
        if self.trouble == "full":
            file.data += data[: self._rng.randint(0, len(data))]
            raise OSError(errno.ENOSPC, "No space left on device", name)
        file.data += data

    def settle(self, name: str, file: File) -> None:
        """Sync."""
        self._point(f"sync {name}")
        if self.trouble == "broken":
            file.is_lost = True
            raise OSError(errno.EIO, "Input/output error", name)
        file.sync()

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        file = self.create(name)
        for piece in pieces:
            file.write(piece)
        file.sync()

    def create(self, name: str) -> Appender:
        folder, last = self._find(name)
        file = folder.live[last] = File()
        return _Appender(self, name, file)

    def append(self, name: str) -> Appender:
        self._point(f"create {name}")
        folder, last = self._find(name)
        if last in folder.live:
            raise FileExistsError(errno.EEXIST, "File exists", name)
        if self.trouble == "full":
            raise OSError(errno.ENOSPC, "No space left on device", name)
        file = folder.live[last] = File()
        self.sync_folder(name.rpartition("/")[0])
        return _Appender(self, name, file)

    def make_folder(self, name: str) -> None:
        self._point(f"make {name}")
        folder, last = self._find(name)
        if last in folder.live:
            raise FileExistsError(errno.EEXIST, "File exists", name)
        folder.live[last] = Folder()

    def sync_folder(self, name: str = "") -> None:
        self._point(f"sync folder {name}")
        if self.trouble == "broken":
            raise OSError(errno.EIO, "Input/output error", name)
        folder = self._folder(name)
        folder.durable = dict(folder.live)

    def rename(self, old: str, new: str) -> None:
        self._point(f"rename {old}")
        folder, name = self._find(old)
        target, other = self._find(new)
        target.live[other] = folder.live.pop(name)

    def remove(self, name: str) -> None:
        self._point(f"remove {name}")
        folder, last = self._find(name)
        del folder.live[last]


class _Appender:
    def __init__(self, disk: VirtualDisk, name: str, file: File) -> None:
        self._disk = disk
        self._name = name
        self._file = file

    def write(self, data: Piece) -> None:
        self._disk.put(self._name, self._file, bytes(data))

    def sync(self) -> None:
        self._disk.settle(self._name, self._file)

    def close(self) -> None:
        """Nothing is kept open here."""
