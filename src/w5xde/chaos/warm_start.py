"""Starts commands from a process that has loaded torch: without that, each start takes seconds of a core.

On machines of their own, nodes that start again cost the others nothing; on one machine they would be most of
what a soak measures. Knows no other process of the pool.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import cast

from w5xde.chaos.child import Command

_PRELOADED = ["w5xde.cli.main", "w5xde.runtime.coordinator.body", "w5xde.runtime.node.body", "w5xde.chaos"]


class WarmProcess:
    """A command in a child of the fork server."""

    def __init__(self, child: ForkServerProcess) -> None:
        self._child = child
        self.pid = cast(int, child.pid)

    def poll(self) -> int | None:
        return self._child.exitcode

    def wait(self) -> int | None:
        self._child.join()
        return self._child.exitcode

    def kill(self) -> None:
        self._child.kill()

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def start_warm(command: Command) -> WarmProcess:
    """Start a `w5xde` command; its output goes to its log."""
    child = _fork_server().Process(target=_run, args=(command,))
    child.start()
    return WarmProcess(child)


@functools.cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _run(command: Command) -> None:
    from w5xde.cli.main import run

    log = os.open(command.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.argv = ["w5xde", *command.words]
    run()
