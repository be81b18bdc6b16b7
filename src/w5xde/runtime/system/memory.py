"""Memory: how much processes take together, with shared memory counted once, and how much is left."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from w5xde.learn.model import cgroup

# Asking takes milliseconds of a core for each process: a thousand local nodes would keep a core busy.
PROCESSES_MAX = 32
# A little less than the largest block by which glibc changes its mind, with room for its header.
_GLIBC_BYTES_MAX = 31 * 1024 * 1024


def pss_bytes(pids: Sequence[int]) -> int:
    """Proportional set size of these processes; where the system does not tell it, their resident memory.

    Of many processes only some are asked, which stand for the others; the first stands for itself alone.
    """
    others = pids[1:]
    asked = others[:: -(-len(others) // PROCESSES_MAX) or 1]
    total = sum(_pss_bytes(pid) for pid in asked) * len(others) // max(1, len(asked))
    return total + sum(_pss_bytes(pid) for pid in pids[:1])


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    except (OSError, StopIteration):
        # Gone meanwhile, or another system.
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
    return 0


def grown_bytes(pid: int) -> int:
    """The most memory that a forked process had so far, without what it shares with its parent.

    Where the system does not tell that, all its resident memory.
    """
    try:
        now, parent = _status(pid), _status(psutil.Process(pid).ppid())
        # After a fork the child has all anonymous pages of its parent, and none of its files.
        return max(0, now["VmHWM"] - now["RssFile"] - now["RssShmem"] - parent["RssAnon"])
    except (OSError, KeyError, psutil.Error):
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
    return 0


def _status(pid: int) -> dict[str, int]:
    """The sizes that Linux tells of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {name.removesuffix(":"): int(count) * 1024 for name, count, _ in words}


def keep_freed_memory() -> None:
    """Keep what this process frees for its next allocations, instead of giving it back to the system.

    glibc gives freed memory back if it is more than twice the largest block that was ever freed, and the
    next batch waits while the system provides zeroed pages again: measured as 430 page faults for each batch.
    Freeing one large block, which is never written to, raises that limit. Elsewhere this does nothing.
    """
    np.empty(_GLIBC_BYTES_MAX, np.uint8)


def available_bytes() -> int:
    """Memory that the system has left, or less if this is a container with a limit."""
    left = int(psutil.virtual_memory().available)
    allowed = cgroup.memory_left()
    return left if allowed is None else min(left, allowed)


def return_freed() -> None:
    """Give memory that was freed back to the system, which the C library may keep otherwise.

    A model that was only tried leaves three times its size behind. psutil can do so from version 7.2 on.
    """
    trim = getattr(psutil, "heap_trim", None)
    if trim is not None:
        trim()
