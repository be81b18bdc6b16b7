"""What a tree of processes used: CPU time and memory, as the kernel counts them."""

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


def lent_bytes(pid: int) -> int:
    """What a process seems to own of pages that it only shares: without it, the others would own that too."""
    memory = _memory(pid)
    return max(0, memory.pss - memory.uss) if hasattr(memory, "pss") else 0


def resident_bytes(pid: int | None = None) -> int:
    """Memory of a process, or of this one, that is in use now, whoever else uses it too.

    To see what a process grows by: its PSS also shrinks, when somebody else begins to use the same pages.
    """
    return int(psutil.Process(pid).memory_info().rss)


def forget_peak() -> None:
    """Let the kernel count this process's peak from now on, where it can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int | None:
    """The most memory of this process that was ever in use, since the peak was forgotten."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def _memory(pid: int) -> Any:
    try:
        return psutil.Process(pid).memory_full_info()
    except psutil.Error:
        return None


def socket_buffer_bytes(wanted: int) -> int | None:
    """How large the system really makes a socket's buffer that is to be so large; nothing: it adapts it."""
    if not wanted:
        return None
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
        # Linux doubles what it grants, for its own books.
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // (2 if sys.platform == "linux" else 1)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
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
