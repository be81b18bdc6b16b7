"""The sampler: reads the traffic of each node at every tick, and the memory of all processes now and then.

Writes what it reads into the meters. Knows no clock: callers pass `now`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from w5xde.control.steps.cut import Progress
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.system.machine import machine_name
from w5xde.runtime.system.memory import pss_bytes
from w5xde.runtime.telemetry.meters import Meters
from w5xde.runtime.telemetry.traffic import Traffic

# To measure the memory of a process, the kernel walks through all of its pages: milliseconds each.
MEMORY_SECONDS = 10.0
# The first measurement comes soon, so that short runs report their memory too.
FIRST_MEMORY_SECONDS = 1.0


class Sampler:
    """Keeps the meters of one run up to date. `writer` is a thread that may block."""

    def __init__(
        self, meters: Meters, traffic: Traffic, writer: Actor, progress: Callable[[], Progress]
    ) -> None:
        self._meters = meters
        self._traffic = traffic
        self._writer = writer
        self._progress = progress
        self._memory_at: float | None = None
        self.machine = machine_name()
        # The last call of `load`: its time, and our CPU time until then.
        self._loaded_at = (0.0, 0.0)

    def load(self, now: float) -> float:
        """The share of one core that this process used since the last call."""
        (then, before), spent = self._loaded_at, time.process_time()
        self._loaded_at = (now, spent)
        return (spent - before) / (now - then) if now > then else 0.0

    def count(self, now: float) -> None:
        """Add the newest traffic to the meters, and let them sample all counts."""
        for name, sent, received in self._traffic.news():
            meter = self._meters.node(name)
            meter.bytes_sent += sent
            meter.bytes_received += received
        self._meters.sample(now, self._progress(), self._traffic.sent, self._traffic.received)

    def weigh(self, now: float) -> None:
        """Measure the memory of the coordinator and its local nodes, if that is due."""
        if self._memory_at is None:
            self._memory_at = now + FIRST_MEMORY_SECONDS
        if now < self._memory_at:
            return
        self._memory_at = now + MEMORY_SECONDS
        pids = [os.getpid(), *(node.pid for node in self._meters.nodes.values() if node.pid is not None)]
        self._writer.call(lambda: pss_bytes(pids), self._weighed)

    def _weighed(self, found: int) -> None:
        self._meters.memory_pss_bytes = found
