"""The lock of a run folder: only one coordinator may own a run. The lock ends with its process."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import weakref
from pathlib import Path

import msgspec

from w5xde.errors import StorageError

NAME = "lock"


class RunLock:
    """Holds a run folder; raises StorageError if another process holds it."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take()
        except OSError:
            holder = os.pread(self._file, 1000, 0) if hasattr(os, "pread") else b""
            os.close(self._file)
            raise StorageError(
                f"run {folder.name} is in use{_shown(holder)}",
                code="W5-406",
                fix="two coordinators cannot own one run: stop the other one first",
            ) from None
        # Names the holder, for the error of the next process; a full disk does not keep us from locking.
        with contextlib.suppress(OSError):
            os.truncate(self._file, 0)
            os.write(self._file, msgspec.json.encode({"pid": os.getpid(), "host": platform.node()}))
        # A forked process would hold the lock too, and longer than we live.
        ours = weakref.ref(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _let_go(ours()))

    def _take(self) -> None:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(self._file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _let_go(lock: RunLock | None) -> None:
    if lock is not None:
        lock.release()


def _shown(holder: bytes) -> str:
    try:
        facts = msgspec.json.decode(holder)
        return f" by process {int(facts['pid'])} on {str(facts['host'])[:60]}"
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return ""
