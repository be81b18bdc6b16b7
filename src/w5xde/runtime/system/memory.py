"""How much memory processes take together, where what they share is counted once; and how much is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil

# What a container may use, and what it uses now.
_CGROUP = Path("/sys/fs/cgroup")


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size of these processes; where the system does not tell it, what is resident."""
    return sum(_pss_bytes(pid) for pid in pids)


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    except (OSError, StopIteration):
        # Gone meanwhile, or another system.
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
    return 0


def available_bytes() -> int:
    """Memory that can still be had: what the system has left, or less if this is a container with a limit."""
    left = int(psutil.virtual_memory().available)
    # The word "max" where there is no limit, and no such files on other systems.
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        left = min(left, max(0, limit - used))
    return left
