"""A thread for loggers: they may wait for a disk or a server, and the event loop of a run must not.

Knows no loggers: it runs functions, one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

# A logger that is so many rows behind is stuck, or slower than the training.
WAITING_MAX = 1000
# How long the end of a run waits for the last rows.
END_SECONDS = 30.0


class Background:
    """Runs functions in the order in which they are given. The first error is raised at the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="w5xde-loggers")
        self._waiting: list[Future[object]] = []
        self._dropped = 0

    def run(self, work: Callable[[], object]) -> None:
        """Run a function soon; it is dropped, and counted, if too many are waiting."""
        self._raise_first()
        if len(self._waiting) >= WAITING_MAX:
            self._dropped += 1
        else:
            self._waiting.append(self._thread.submit(work))

    def close(self) -> None:
        """Wait for what was given, for a while."""
        wait(self._waiting, timeout=END_SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._raise_first()
        if self._dropped:
            raise RuntimeError(f"{self._dropped} rows were dropped: the loggers are slower than the training")

    def _raise_first(self) -> None:
        done = [each for each in self._waiting if each.done()]
        self._waiting = [each for each in self._waiting if not each.done()]
        for each in done:
            if not each.cancelled():
                each.result()
