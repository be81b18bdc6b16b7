"""Limits of a container or a service: the cores and memory that Linux's control groups allow this process.

Reads the files of both versions of control groups, from the group of this process up to the root: the
narrowest limit counts. On other systems, and without limits, there is nothing to read. Decides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
# One line for each hierarchy: its number, its controllers, and the path of this process's group.
OWN_GROUPS = Path("/proc/self/cgroup")
NAMESPACE = Path("/proc/self/ns/cgroup")


def cpu_quota() -> float | None:
    """How many cores this process may use at a time on average; None without a limit."""
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def memory_left() -> int | None:
    """Bytes of memory that this process's groups may still take; None without a limit."""
    left = [room for group in _groups("memory") if (room := _room(group)) is not None]
    return min(left, default=None)


def namespace() -> str:
    """What tells containers of one machine apart; empty where there are no control groups."""
    with contextlib.suppress(OSError):
        return str(NAMESPACE.readlink())
    return ""


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's groups that may limit something, the innermost first."""
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = MOUNT / controllers
        if not controllers and not (root / "cgroup.controllers").exists():
            root = MOUNT / "unified"
        inside = Path(path.lstrip("/"))
        # A container that sees the host's path has its own group mounted at the root.
        yield from (root / part for part in (inside, *inside.parents))


def _quota(group: Path) -> float | None:
    both = _words(group / "cpu.max") or [
        *_words(group / "cpu.cfs_quota_us"),
        *_words(group / "cpu.cfs_period_us"),
    ]
    # "max", or -1 in the older version: no limit.
    with contextlib.suppress(ValueError):
        quota, period = (int(word) for word in both)
        return quota / period if quota > 0 and period > 0 else None
    return None


def _room(group: Path) -> int | None:
    limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
    used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
    with contextlib.suppress(ValueError):
        (allowed,), (taken,) = map(int, limit), map(int, used)
        return max(0, allowed - taken + _reclaimable(group))
    return None


def _reclaimable(group: Path) -> int:
    """Bytes of files that the system keeps in memory only until the memory is needed."""
    words = _words(group / "memory.stat")
    counts = dict(zip(words[::2], words[1::2], strict=False))
    return int(counts.get("total_inactive_file") or counts.get("inactive_file") or 0)


def _words(path: Path) -> list[str]:
    with contextlib.suppress(OSError, UnicodeError):
        return path.read_text(encoding="ascii").split()
    return []
