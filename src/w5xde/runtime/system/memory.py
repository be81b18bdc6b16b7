"""Memory: how much processes take together, with shared memory counted once, and how much is left."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

# Asking takes milliseconds of a core for each process: a thousand local nodes would keep a core busy.
PROCESSES_MAX = 32
# What a container may use, and what it uses now.
_CGROUP = Path("/sys/fs/cgroup")


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


def available_bytes() -> int:
    """Memory that the system has left, or less if this is a container with a limit."""
    left = int(psutil.virtual_memory().available)
    # The file holds the word "max" if there is no limit, and other systems have no such file.
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        left = min(left, max(0, limit - used))
    return left
