"""The accountant: at every tick notes the traffic of each node, and now and then everybody's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from w5xde.control.steps.cut import Progress
from w5xde.runtime.coordinator.peers import Peers
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.system.machine import machine_name
from w5xde.runtime.system.memory import pss_bytes
from w5xde.runtime.telemetry.meters import Meters

# Asking how much memory a process has makes the kernel walk through all of it: milliseconds each.
MEMORY_SECONDS = 10.0
FIRST_MEMORY_SECONDS = 1.0


class Accountant:
    """Keeps the meters of one run up to date. `writer` is a thread that may wait."""

    def __init__(
        self, meters: Meters, reception: Peers, writer: Actor, progress: Callable[[], Progress]
    ) -> None:
        self._meters = meters
        self._reception = reception
        self._writer = writer
        self._progress = progress
        self._memory_at: float | None = None
        self.machine = machine_name()
        # When the load was asked for last, and how long we had been on a core by then.
        self._loaded_at = (0.0, 0.0)

    def load(self, now: float) -> float:
        """The share of a core that we have needed since this was asked last."""
        (then, before), spent = self._loaded_at, time.process_time()
        self._loaded_at = (now, spent)
        return (spent - before) / (now - then) if now > then else 0.0

    def count(self, now: float) -> None:
        """Note where everything stands."""
        traffic = self._reception.traffic
        for name, sent, received in traffic.news():
            meter = self._meters.node(name)
            meter.bytes_sent += sent
            meter.bytes_received += received
        self._meters.sample(now, self._progress(), traffic.sent, traffic.received)

    def weigh(self, now: float) -> None:
        """Look how much memory we and our local nodes take, if it is time."""
        if self._memory_at is None:
            self._memory_at = now + FIRST_MEMORY_SECONDS
        if now < self._memory_at:
            return
        self._memory_at = now + MEMORY_SECONDS
        pids = [os.getpid(), *(node.pid for node in self._meters.nodes.values() if node.pid is not None)]
        self._writer.call(lambda: pss_bytes(pids), self._weighed)

    def _weighed(self, found: int) -> None:
        self._meters.memory_pss_bytes = found
