"""The fork server's owner: it ends whatever state its helper processes are in."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil

from tests.system.jobs import job
from w5xde.config import Settings
from w5xde.runtime.node.fork_server import ForkServer


def test_a_server_that_is_gone_while_its_guard_is_frozen_keeps_nobody_from_ending() -> None:
    here = psutil.Process()
    before = {child.pid for child in here.children()}
    server = ForkServer(job, Settings(), lambda *arguments: None)
    (guard,) = [child for child in here.children() if child.pid not in before]
    serving: asyncio.Queue[int] = asyncio.Queue()

    async def kill_the_first() -> int:
        def report(kind: str, name: str, number: int) -> Any:
            if kind == "serving":
                serving.put_nowait(number)

        server.watch(report)
        first = await serving.get()
        os.kill(first, signal.SIGKILL)
        return first

    first = asyncio.run(asyncio.wait_for(kill_the_first(), 60))
    # The guard reaps it and forks another, of which the owner does not hear any more.
    while any(child.pid == first for child in guard.children()) or not guard.children():
        os.sched_yield()
    children = guard.children()
    guard.suspend()
    server.close(now=True)
    assert not guard.is_running()
    _, alive = psutil.wait_procs(children, 30)
    assert alive == []
