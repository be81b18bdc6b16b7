"""Local nodes of a run: starts and watches them as `control/pool/local_nodes.py` decides."""

from __future__ import annotations

import asyncio
import os

from w5xde.control.pool.local_nodes import AbandonRun, Decision, LocalNodesCore
from w5xde.control.pool.names import local_name
from w5xde.control.pool.node_processes import StartNode, TellUser
from w5xde.runtime.coordinator.body import Coordinator
from w5xde.runtime.coordinator.local.memory import LocalMemory
from w5xde.runtime.node.exit_status import describe_status
from w5xde.runtime.node.fork_server import ForkServer
from w5xde.runtime.system.capacity import NodePlan, little_memory_text

# How soon a node that ended is started again.
TICK_SECONDS = 0.1


class LocalNodes:
    """The nodes `local-1` to `local-N`, each started again when it ends too early."""

    def __init__(
        self,
        server: ForkServer,
        coordinator: Coordinator,
        plan: NodePlan,
        address: tuple[str, int],
        memory: LocalMemory,
    ) -> None:
        self._server = server
        self._coordinator = coordinator
        self._memory = memory
        self._devices = {local_name(i + 1): device for i, device in enumerate(plan.devices)}
        # As many as fit into memory; if that is not known before a node has computed, one.
        self._plan = plan
        fitting = plan.fitting(memory.state_bytes, None)
        self._has_room = fitting is not None
        self._core = LocalNodesCore([*self._devices], fitting or 1)
        # If the coordinator listens on every address, its local nodes connect to the loopback address.
        host, self._port = address
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        self._server.watch(self._on_report)
        self._tick()

    def _tick(self) -> None:
        if not self._coordinator.is_over:
            if not self._has_room:
                self._look_for_room()
            self._perform(self._core.tick(self._coordinator.connected, self._loop.time()))
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _look_for_room(self) -> None:
        """Start the other nodes once the first has shown how much memory one takes."""
        first = self._coordinator.meters.node(local_name(1))
        fitting = self._plan.fitting(self._memory.state_bytes, first.pid if first.batches else None)
        if fitting is None:
            return
        self._has_room = True
        self._core.processes.allow(fitting)
        if fitting < len(self._devices):
            self._coordinator.say("little memory", little_memory_text(fitting, self._plan), "")

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
        self._server.start(name, self._devices[name], ticket, share.descriptors if share is not None else ())
        if share is not None:
            share.updates.close()
