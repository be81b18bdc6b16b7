"""Processes that end when their parent does: nothing but the name of its parent tells a process of that.

When a process has died, even if nobody has asked for its exit code yet, the system gives its children another
parent. Knows nothing of what the processes do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from w5xde.runtime.system.termination import END_SECONDS, NOT_OVER

# How soon a process notices that its parent has died.
LOOK_SECONDS = 0.5


def call_when_orphaned(parent: int, act: Callable[[], None]) -> None:
    """On a thread of its own, call `act` when the process `parent` is not our parent any more."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        act()

    threading.Thread(target=watch, name="w5xde-parent", daemon=True).start()


@contextlib.contextmanager
def ending_with_parent(is_wanted: bool, parent: int | None = None) -> Iterator[None]:
    """Meanwhile, if it is wanted and the parent ends, end this process as SIGTERM does, and in time.

    `parent`: the process that started this one, if somebody has noted it earlier.
    """
    is_over, parent = threading.Event(), os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            if is_over.wait(LOOK_SECONDS):
                return
        os.kill(os.getpid(), signal.SIGTERM)
        if not is_over.wait(END_SECONDS):
            os._exit(NOT_OVER)

    if is_wanted:
        threading.Thread(target=watch, name="w5xde-with-parent", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def serve_parent(parent: int) -> None:
    """In a process that only works for its parent: end with it, and leave signals that mean both to it.

    Ctrl-C reaches the whole process group, and engines send SIGTERM to every process of a job. The parent
    decides what that means; but if the parent itself sends SIGTERM, this process ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "linux":
        call_when_orphaned(parent, lambda: os._exit(0))
        return
    # Threads that are started later have the same mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch() -> None:
        while os.getppid() == parent:
            told = signal.sigtimedwait({signal.SIGTERM}, LOOK_SECONDS)
            if told is not None and told.si_pid == parent:
                break
        os._exit(0)

    threading.Thread(target=watch, name="w5xde-parent", daemon=True).start()


def leave_sigterm_to_parent() -> None:
    """In a process that was forked to work for its parent, and ends when that tells it: hear no SIGTERM.

    By a handler that does nothing, not by SIG_IGN, which programs that the user's code starts would inherit.
    """
    signal.signal(signal.SIGTERM, _do_nothing)


def _do_nothing(number: int, frame: object) -> None:
    pass


def _end_in_children() -> None:
    """A process that the user's code forks ends by SIGTERM, as its parent may expect."""
    if signal.getsignal(signal.SIGTERM) is _do_nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_children)
