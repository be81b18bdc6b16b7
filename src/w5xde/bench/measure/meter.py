"""CPU time and memory of processes, as the kernel counts them, and the facts about this machine."""

from __future__ import annotations

import contextlib
import platform
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from w5xde.learn.model.device import core_count


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of those processes that still live."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def lent_bytes(pid: int) -> int:
    """The part of shared pages that PSS counts for this process, and for the others without it."""
    memory = _memory(pid)
    return max(0, memory.pss - memory.uss) if hasattr(memory, "pss") else 0


def resident_bytes(pid: int | None = None) -> int:
    """The resident memory of a process, or of this one, including shared pages.

    For measuring growth: PSS would also shrink when another process begins to share the same pages.
    """
    return int(psutil.Process(pid).memory_info().rss)


def forget_peak() -> None:
    """Let the kernel count the peak memory of this process from now on, where it can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int | None:
    """The peak memory of this process since `forget_peak`."""
    return _status_bytes("VmHWM")


def resident_without_nodes_bytes(state_bytes: int) -> int | None:
    """The resident memory of a coordinator now, without the memory in which its nodes' updates lie.

    Shared memory counts as far as it is the coordinator's own: for a state of this many bytes.
    """
    resident, shared = _status_bytes("VmRSS"), _status_bytes("RssShmem")
    if resident is None or shared is None:
        return None
    return resident - max(0, shared - state_bytes)


def _status_bytes(name: str) -> int | None:
    """What the kernel says of this process."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _memory(pid: int) -> Any:
    try:
        return psutil.Process(pid).memory_full_info()
    except psutil.Error:
        return None


def socket_buffer_bytes(wanted: int) -> int | None:
    """The real size of a socket buffer that is set to `wanted` bytes; None for 0: the system adapts it."""
    if not wanted:
        return None
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
        # Linux doubles the value, for its own overhead.
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // (2 if sys.platform == "linux" else 1)


def machine() -> dict[str, Any]:
    """The facts about this machine that a report needs."""
    import torch

    return {
        "cores": core_count(),
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
