"""The stream of a run to a browser: server-sent events, whose ids are byte offsets in metrics.jsonl.

A browser that comes back with the last id goes on there, whichever process answers: nothing is remembered
here. One watcher reads the files of a run for all browsers, and only while one of them looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from w5xde.follow.line_tail import lines_from
from w5xde.follow.rows import read_row
from w5xde.follow.run_follower import RunFollower
from w5xde.page import picture
from w5xde.runs import METRICS
from w5xde.sanitize import to_json

# Rows come four times a second at most.
POLL_SECONDS = 0.25
# A sign of life, and the age of the newest row, also if nothing is new.
BEAT_SECONDS = 1.0
# A browser that has missed more is sent a thinned history instead.
MISSED_BYTES_MAX = 2_000_000
# How soon a browser comes back after a failure.
RETRY = b"retry: 1000\n\n"


def encode(kind: str, data: Any, offset: int | None = None) -> bytes:
    """One server-sent event."""
    head = f"id: {offset}\n" if offset is not None else ""
    return f"{head}event: {kind}\ndata: {to_json(data)}\n\n".encode()


class RunWatch:
    """Reads a run for all browsers that look at it."""

    def __init__(self, run: RunFollower) -> None:
        self.run = run
        self._lookers = 0
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._read = asyncio.Lock()

    async def refresh(self) -> None:
        """Read all that is new; the first time that may take a second, so a thread does it."""
        async with self._read:
            await asyncio.to_thread(self.run.poll)

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Keep reading as long as somebody looks."""
        await self.refresh()
        self._lookers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._lookers -= 1
            if not self._lookers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            # Short by now: no thread is needed.
            async with self._read:
                has_news = self.run.poll()
            if has_news:
                self._news.set()
                self._news = asyncio.Event()

    async def news(self) -> None:
        """Return when there is news, or after a beat without."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                await self._news.wait()


async def stream(watch: RunWatch, offset: int | None) -> AsyncIterator[bytes]:
    """The events for one browser, which has seen metrics.jsonl up to this offset; None: nothing."""
    run = watch.run
    yield RETRY
    async with watch.looking():
        if offset is None or not 0 <= run.offset - offset <= MISSED_BYTES_MAX:
            offset = run.offset
            yield encode("history", picture.history(run), offset)
        yield encode("about", picture.about(run))
        yield encode("nodes", picture.nodes(run))
        yield encode("events", picture.events(run))
        yield encode("trace", picture.trace(run))
        told = run.events.count, run.trace_count, run.state(time.time())
        while True:
            changed: set[str] = set()
            # As far as the sentences know, and no further.
            for line in lines_from(run.folder / METRICS, offset):
                if line.end > run.offset:
                    break
                offset = line.end
                row = read_row(line.text)
                if row is not None:
                    changed |= row.node_facts.keys()
                    yield encode("row", picture.point(row), offset)
            clock = time.time()
            if changed:
                yield encode("nodes", picture.nodes(run, changed))
            events, traced, state = told
            if run.events.count != events:
                yield encode("more events", picture.events(run, run.events.count - events))
            if run.trace_count != traced:
                yield encode("more trace", picture.trace(run, run.trace_count - traced))
            told = run.events.count, run.trace_count, run.state(clock)
            if told[2] != state:
                yield encode("about", picture.about(run))
            yield encode("now", picture.now(run, clock))
            await watch.news()
