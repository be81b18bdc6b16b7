"""The lock of a run folder: only one coordinator may own a run. The lock ends with its process."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import msgspec

from w5xde.errors import StorageError
from w5xde.runtime.system.file_lock import call_in_children, try_lock

NAME = "lock"
IN_USE = "W5-406"


class RunLock:
    """Holds a run folder; raises StorageError if another process holds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not try_lock(self._file) or not self._is_there():
            holder = os.pread(self._file, 1000, 0) if hasattr(os, "pread") else b""
            os.close(self._file)
            raise StorageError(
                f"run {folder.name} is in use{_shown(holder)}",
                code="W5-406",
                fix="two coordinators cannot own one run: stop the other one first",
            )
        # Whose it is, for those who come too late; a full disk does not keep us from owning it.
        with contextlib.suppress(OSError):
            os.truncate(self._file, 0)
            os.write(self._file, msgspec.json.encode({"pid": os.getpid(), "host": platform.node()}))
        call_in_children(self.release)

    def _is_there(self) -> bool:
        """Whether the file is still in its folder: its holder may have removed it before it was locked."""
        try:
            return os.path.samestat(os.fstat(self._file), (self.folder / NAME).stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _shown(holder: bytes) -> str:
    try:
        facts = msgspec.json.decode(holder)
        return f" by process {int(facts['pid'])} on {str(facts['host'])[:60]}"
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return ""
