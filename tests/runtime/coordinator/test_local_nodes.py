"""Local nodes: hundreds of real processes are started through a real fork server."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

import psutil

from tests.system.jobs import job
from w5xde.config import Settings
from w5xde.runtime.coordinator.local.memory import LocalMemory
from w5xde.runtime.coordinator.local.nodes import LocalNodes
from w5xde.runtime.node.fork_server import ForkServer
from w5xde.runtime.system.capacity import NodePlan
from w5xde.runtime.telemetry.meters import Meters
from w5xde.ticket import Secret, Ticket

# More requests than a socket holds at once.
NODES = 320


class Coordinator:
    """A coordinator to which every process that was started is a ready node."""

    def __init__(self) -> None:
        self.meters = Meters()
        self.is_over = False
        self.all_started = asyncio.Event()
        self.told: list[str] = []
        ticket = Ticket((("127.0.0.1", 5),), b"", bytes(8), Secret(bytes(16)), is_clear=True)
        self.gatekeeper = SimpleNamespace(local_ticket=lambda *arguments: ticket)

    @property
    def connected(self) -> dict[str, bool]:
        found = {node.name: True for node in self.meters.nodes.values() if node.pid is not None}
        if len(found) == NODES:
            self.is_over = True
            self.all_started.set()
        return found

    def say(self, kind: str, text: str, name: str) -> None:
        self.told.append(text)

    def give_up(self, reason: str) -> None:
        self.told.append(reason)


def idle(*arguments: Any) -> None:
    """A node that computes nothing, and ends as others do when its fork server has died."""
    server = os.getppid()
    while os.getppid() == server:
        time.sleep(0.2)


def test_hundreds_of_nodes_start() -> None:
    server = ForkServer(job, Settings(), idle)
    coordinator: Any = Coordinator()

    async def story() -> None:
        plan, memory = NodePlan(["cpu"] * NODES), LocalMemory(Settings())
        LocalNodes(server, coordinator, plan, ("127.0.0.1", 5), memory).start()
        await coordinator.all_started.wait()

    try:
        asyncio.run(asyncio.wait_for(story(), 60))
        nodes = {psutil.Process(node.pid) for node in coordinator.meters.nodes.values()}
    finally:
        server.close(now=True)
    assert coordinator.told == []
    assert len(nodes) == NODES
    # The fork server is killed at once; its nodes end a moment later.
    _, alive = psutil.wait_procs(nodes, 30)
    assert alive == []
