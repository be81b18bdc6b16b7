"""Work on an event loop that its user may interrupt: once to end it in order, twice to stop it now.

Knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

# How late an interrupt of a notebook's run may be noticed: too short to feel, and waking up costs nothing.
WAKE_SECONDS = 0.1


class _Interruptible:
    """Runs `work` on an event loop: the first interrupt calls `stop`, the second cancels `work`."""

    def __init__(self, work: Coroutine[Any, Any, None], stop: Callable[[str], None]) -> None:
        self._work = work
        self._stop = stop
        self._is_stopping = False

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._work)
        if threading.current_thread() is threading.main_thread():
            # Where event loops have no signal handlers (Windows), Ctrl-C stops at once.
            with contextlib.suppress(NotImplementedError):
                for number in (signal.SIGINT, signal.SIGTERM):
                    self._loop.add_signal_handler(number, self._interrupt)
        try:
            await self._task
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def _interrupt(self) -> None:
        if self._is_stopping:
            self._task.cancel()
            return
        self._is_stopping = True
        print("finishing what is begun; once more stops now", file=sys.stderr, flush=True)
        self._stop("interrupted")

    def interrupt_from_outside(self, number: int, frame: object) -> None:
        """A signal handler for a thread that does not run the event loop."""
        # The event loop may not run yet, or may have ended.
        with contextlib.suppress(AttributeError, RuntimeError):
            self._loop.call_soon_threadsafe(self._interrupt)


def run_interruptibly(work: Coroutine[Any, Any, None], stop: Callable[[str], None]) -> None:
    """Run `work` to its end; on another thread if this one runs an event loop already, as notebooks do.

    The first Ctrl-C or SIGTERM calls `stop`, which lets `work` end in order; the second raises
    KeyboardInterrupt.
    """
    running = _Interruptible(work, stop)
    if not _runs_here():
        asyncio.run(running.run())
        return
    is_main = threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(max_workers=1) as threads:
        before = signal.signal(signal.SIGINT, running.interrupt_from_outside) if is_main else None
        try:
            done = threads.submit(asyncio.run, running.run())
            # With a timeout, because Python runs signal handlers only when this thread wakes up.
            while not done.done():
                wait([done], timeout=WAKE_SECONDS)
            done.result()
        finally:
            if is_main:
                signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _runs_here() -> bool:
    """Whether this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
