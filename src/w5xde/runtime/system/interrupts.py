"""Work on an event loop that may be interrupted, by its user or by a program that minds the process.

    Ctrl-C      once: the work ends in order, however long that takes; twice: it stops now
    SIGTERM     the work ends in order and in a hurry; sent again, it changes nothing, because engines send it
                to several processes, and more than once

Knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol

from w5xde.runtime.system.termination import note_orderly_end

# How late an interrupt of a notebook's run may be noticed: too short to feel, and waking up costs nothing.
WAKE_SECONDS = 0.1


class StopWork(Protocol):
    """Lets the work end in order; `hurries`: within a few seconds."""

    def __call__(self, reason: str, *, hurries: bool) -> None: ...


class _Interruptible:
    """Runs `work` on an event loop: the first signal calls `stop`, the second Ctrl-C cancels `work`."""

    def __init__(self, work: Coroutine[Any, Any, None], stop: StopWork) -> None:
        self._work = work
        self._stop = stop
        self._is_stopping = self._hurries = False

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._work)
        with self._handling_signals():
            try:
                await self._task
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        # Where event loops are not woken up by signals (Windows), Ctrl-C stops at once.
        if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
            yield
            return
        # Not by the loop's own `add_signal_handler`: that leaves no handler behind when the loop ends, and
        # tells this process of signals that a forked child gets.
        handlers = {signal.SIGINT: self.interrupt_from_outside, signal.SIGTERM: self._terminate_from_outside}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _interrupt(self) -> None:
        if self._is_stopping:
            self._task.cancel()
            return
        self._is_stopping = True
        print("finishing what is begun; once more stops now", file=sys.stderr, flush=True)
        self._stop("interrupted", hurries=False)

    def _terminate(self) -> None:
        if self._hurries:
            return
        self._hurries = True
        print("told to end: finishing what is nearly done", file=sys.stderr, flush=True)
        self._stop("terminated", hurries=True)

    def interrupt_from_outside(self, number: int, frame: object) -> None:
        """A signal handler, also for a thread that does not run the event loop."""
        self._call(self._interrupt)

    def _terminate_from_outside(self, number: int, frame: object) -> None:
        note_orderly_end()
        self._call(self._terminate)

    def _call(self, function: Callable[[], None]) -> None:
        # The event loop may not run yet, or may have ended.
        with contextlib.suppress(AttributeError, RuntimeError):
            self._loop.call_soon_threadsafe(function)


def run_interruptibly(work: Coroutine[Any, Any, None], stop: StopWork) -> None:
    """Run `work` to its end; on another thread if this one runs an event loop already, as notebooks do.

    The first Ctrl-C or SIGTERM calls `stop`, which lets `work` end in order; a second Ctrl-C raises
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
