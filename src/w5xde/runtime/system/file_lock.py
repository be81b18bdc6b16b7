"""Locks on open files, released when the file is closed or its process ends. Knows no names of files."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable


def try_lock(file: int) -> bool:
    """Lock an open file for this process alone; returns whether that was possible at once."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def call_in_children(close: Callable[[], None]) -> None:
    """Call this method in every forked process: a child that kept the file would hold its lock longer."""
    ours = weakref.WeakMethod(close)

    def call() -> None:
        found = ours()
        if found is not None:
            found()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
