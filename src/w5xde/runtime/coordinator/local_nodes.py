"""Local nodes of a run: keeps as many running as were asked for, and knows when that is hopeless."""

from __future__ import annotations

import asyncio

from w5xde.runtime.coordinator.body import Coordinator
from w5xde.runtime.node.fork_server import Nursery

# A node that ends sooner than this after its start did not fail by chance.
QUICK_SECONDS = 5.0
QUICK_ENDS_MAX = 3
# How long nodes take to notice that their nursery is gone.
ORPHANS_SECONDS = 3.0


class LocalNodes:
    """Starts nodes `local-1` to `local-N`, and each again when it ends before its time."""

    def __init__(self, nursery: Nursery, coordinator: Coordinator, count: int, host: str, port: int) -> None:
        self._nursery = nursery
        self._coordinator = coordinator
        self._names = [f"local-{i + 1}" for i in range(count)]
        # Whoever listens on every address is reached on this machine's own.
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._ticket = coordinator.entry.house_ticket(own, port)
        self._started_at: dict[str, float] = {}
        self._quick_ends: dict[str, int] = {}
        self._given_up: set[str] = set()
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        self._nursery.watch(self._started, self._ended, self._nursery_died)
        for name in self._names:
            self._nursery.start(name, self._ticket)

    def _started(self, name: str, pid: int) -> None:
        self._started_at[name] = self._loop.time()
        self._coordinator.meters.node(name).pid = pid

    def _nursery_died(self) -> None:
        if self._coordinator.is_over:
            return
        self._coordinator.say("failed", "the process that starts local nodes has died, and they with it", "")
        self._loop.call_later(ORPHANS_SECONDS, self._give_up_if_alone)

    def _give_up_if_alone(self) -> None:
        if not self._coordinator.has_nodes:
            self._coordinator.give_up("every local node has ended")

    def _ended(self, name: str, status: int) -> None:
        self._coordinator.meters.node(name).pid = None
        if self._coordinator.is_over:
            return
        quick = self._loop.time() - self._started_at[name] < QUICK_SECONDS
        self._quick_ends[name] = self._quick_ends.get(name, 0) + 1 if quick else 0
        if status > 0 or self._quick_ends[name] >= QUICK_ENDS_MAX:
            # It said itself that it cannot take part, or it keeps dying.
            self._given_up.add(name)
            self._coordinator.say(
                "failed", f"{name} ended with status {status} and is not started again", name
            )
            if len(self._given_up) == len(self._names) and not self._coordinator.has_nodes:
                self._coordinator.give_up(f"every local node has ended (the last with status {status})")
            return
        self._nursery.start(name, self._ticket)
