"""An actor: one thread that owns one object. Calls are made one after another, results come to the loop.

For small models a thread costs more than the work: an *inline* actor makes each call at once, behind the
same interface.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Actor:
    """Makes calls for one owner, in order. `prepare` is called first in its thread."""

    def __init__(
        self,
        name: str,
        failed: Callable[[BaseException], None],
        *,
        inline: bool,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=prepare)
        self._waiting = 0
        self._inline = inline

    @property
    def inline(self) -> bool:
        return self._inline

    @inline.setter
    def inline(self, inline: bool) -> None:
        # Calls already queued keep their turn: only an actor with nothing to do may change its ways.
        if self._waiting == 0:
            self._inline = inline

    def call(self, function: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None:
        """Call `function` after all calls before it; `done` gets what it returned, on the loop."""
        if self._inline:
            try:
                result = function()
            except (Exception, SystemExit) as error:
                self._failed(error)
                return
            if done is not None:
                done(result)
            return
        self._waiting += 1
        self._threads.submit(self._run, function, done)

    def _run(self, function: Callable[[], Any], done: Callable[[Any], None] | None) -> None:
        try:
            result = function()
        except BaseException as error:  # also a sys.exit in the user's code: somebody waits for the answer
            self._post(self._failed, error)
            return
        self._post(done, result)

    def _post(self, callback: Callable[[Any], None] | None, value: Any) -> None:
        # A loop that is closed already: nobody waits for this any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrive, callback, value)

    def _arrive(self, callback: Callable[[Any], None] | None, value: Any) -> None:
        self._waiting -= 1
        if callback is not None:
            callback(value)

    async def result_of(self, function: Callable[[], T]) -> T:
        """Call `function` after all calls before it; returns what it returns, raises what it raises."""
        if self._inline:
            return function()
        return await self._loop.run_in_executor(self._threads, function)

    async def drain(self) -> None:
        """Wait until every call made so far is done, and its `done` has been called."""
        await self.result_of(lambda: None)

    def stop(self, *, cancels: bool = True) -> None:
        """Take no more calls; those that wait for their turn are cancelled, or still made."""
        self._threads.shutdown(wait=False, cancel_futures=cancels)
