"""Local nodes of a run: starts and watches them as `control/pool/local_nodes.py` decides."""

from __future__ import annotations

import asyncio
import os

from w5xde.control.pool.local_nodes import AbandonRun, Decision, LocalNodesCore, StartNode, TellUser
from w5xde.control.pool.names import local_name
from w5xde.runtime.coordinator.body import Coordinator
from w5xde.runtime.coordinator.local_memory import LocalMemory
from w5xde.runtime.node.exit_status import describe_status
from w5xde.runtime.node.fork_server import ForkServer

# How soon a node that ended is started again.
TICK_SECONDS = 0.1


class LocalNodes:
    """The nodes `local-1` to `local-N`, each started again when it ends too early."""

    def __init__(
        self,
        server: ForkServer,
        coordinator: Coordinator,
        count: int,
        address: tuple[str, int],
        memory: LocalMemory,
    ) -> None:
        self._server = server
        self._coordinator = coordinator
        self._memory = memory
        self._core = LocalNodesCore([local_name(i + 1) for i in range(count)])
        # If the coordinator listens on every address, its local nodes connect to the loopback address.
        host, self._port = address
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        self._server.watch(self._on_report)
        self._tick()

    def _tick(self) -> None:
        if not self._coordinator.is_over:
            self._perform(self._core.tick(self._coordinator.connected, self._loop.time()))
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _on_report(self, kind: str, name: str, number: int) -> None:
        """The fork server reports; the number is a process id, an exit status or an error number."""
        if self._coordinator.is_over:
            return
        now = self._loop.time()
        match kind:
            case "serving":
                self._perform(self._core.serving())
            case "started":
                self._coordinator.meters.node(name).pid = number
                self._core.started(name, now)
            case "ended":
                self._coordinator.meters.node(name).pid = None
                self._perform(self._core.ended(name, number, now, describe_status(number)))
            case "failed":
                self._perform(self._core.failed(name, os.strerror(number)))
            case "died":
                self._perform(self._core.server_died())

    def _perform(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case StartNode():
                    self._start(decision.name)
                case TellUser():
                    self._coordinator.say("failed", decision.text, decision.name)
                case AbandonRun():
                    self._coordinator.give_up(decision.reason)

    def _start(self, name: str) -> None:
        # A new process gets new memory: one before it that has lost its fork server may still write.
        share = self._memory.new_share()
        trouble = self._memory.take_trouble()
        if trouble:
            self._coordinator.say("no shared memory", trouble, "")
        ticket = self._coordinator.gatekeeper.local_ticket(self._host, self._port, name, share)
        self._server.start(name, ticket, share.descriptors if share is not None else ())
        if share is not None:
            share.updates.close()
