"""What a tree of processes used: CPU time and memory, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil


def cores() -> int:
    """Cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def tree(pid: int) -> list[int]:
    """A process and everybody below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of processes that live."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def pss_bytes(pids: Iterable[int]) -> int | None:
    """Memory of processes, pages that several share counted once; nothing where the kernel does not tell."""
    parts = [_memory(pid) for pid in pids]
    known = [part.pss for part in parts if hasattr(part, "pss")]
    return sum(known) if known and len(known) == len([part for part in parts if part]) else None


def lent_bytes(pid: int) -> int:
    """What a process seems to own of pages that it only shares: without it, the others would own that too."""
    memory = _memory(pid)
    return max(0, memory.pss - memory.uss) if hasattr(memory, "pss") else 0


def own_bytes(pid: int) -> int | None:
    """Memory that is this process's alone, and its part of what is shared through shared memory."""
    try:
        with Path(f"/proc/{pid}/smaps_rollup").open(encoding="ascii") as rollup:
            sizes = {
                line.split(":")[0]: int(line.split()[1]) * 1024 for line in rollup if line.endswith("kB\n")
            }
    except OSError:
        return None
    private = sizes.get("Private_Clean", 0) + sizes.get("Private_Dirty", 0)
    # What is shared by agreement (not by a fork that nobody has written to) counts by its part.
    return private + max(0, sizes.get("Pss_Shmem", 0))


def _memory(pid: int) -> Any:
    try:
        return psutil.Process(pid).memory_full_info()
    except psutil.Error:
        return None


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    return {
        "cores": cores(),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_threads": 1,
    }


def _processor() -> str:
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
