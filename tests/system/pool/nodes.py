"""The processes of pools that a test opened in its own process."""

from __future__ import annotations

from contextlib import suppress

import psutil


def processes() -> list[psutil.Process]:
    """All processes below this one that are nodes, or that start them."""
    return [each for each in psutil.Process().children(recursive=True) if _is_fork(each)]


def _is_fork(process: psutil.Process) -> bool:
    """Forks of this process have its command line."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline() == psutil.Process().cmdline()
    return False


def nodes() -> list[psutil.Process]:
    """The node processes: a guard has a fork server, and that has the nodes."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for guard in psutil.Process().children():
            for server in guard.children():
                found += server.children()
    return found


def kill_a_node() -> bool:
    """Kill a node; returns whether there was one."""
    found = nodes()
    if found:
        with suppress(psutil.NoSuchProcess):
            found[0].kill()
    return bool(found)
