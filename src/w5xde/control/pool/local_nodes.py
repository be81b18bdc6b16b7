"""Local nodes: when each process is started, when it is given up, and when a run without nodes must end.

Events and `now` in, decisions out. Knows no processes, sockets or clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from w5xde.control.pool.connection_limits import UNAUTHENTICATED_HERE_MAX
from w5xde.control.pool.members import STALL_SECONDS

# Nodes that are started but not ready yet. All of them may be unauthenticated at once, and the connections of
# nodes that reconnect need places too, so this is half of the places for this machine.
STARTING_MAX = UNAUTHENTICATED_HERE_MAX // 2
# A node that takes longer than this to build its model no longer delays the start of the others.
STARTING_SECONDS = 30.0
# A node that ends sooner than this after its start, this many times in a row, is not started again.
QUICK_SECONDS = 5.0
QUICK_ENDS_MAX = 3
# If no local node is connected for this long, the nodes or their fork server are frozen.
ALONE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StartNode:
    """Start the process of this local node."""

    name: str


@dataclass(frozen=True, slots=True)
class TellUser:
    """Note this about local nodes; `name` is empty if it concerns all of them."""

    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class AbandonRun:
    """End the run for this reason: no node is connected, and no local node can join any more."""

    reason: str


Decision = StartNode | TellUser | AbandonRun


class LocalNodesCore:
    """Decides about the local nodes of one run."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._is_serving = False
        self._waiting: deque[str] = deque()
        # Since when each node that is not ready yet is starting.
        self._starting: dict[str, float] = {}
        self._started_at: dict[str, float] = {}
        self._quick_ends: Counter[str] = Counter()
        self._given_up: set[str] = set()
        # Why no local node can join any more; empty while one can.
        self._hopeless = ""
        self._alone_since = 0.0
        self._ticked_at: float | None = None

    def serving(self) -> list[Decision]:
        """A fork server takes requests. It may be a new one, which has none of the earlier requests."""
        was_serving, self._is_serving = self._is_serving, True
        self._waiting = deque(name for name in self._names if name not in self._given_up)
        self._starting.clear()
        if not was_serving:
            return []
        return [TellUser("the process that starts local nodes died, and was started again")]

    def server_died(self) -> list[Decision]:
        """The fork server has died and nothing starts it again."""
        self._is_serving = False
        self._hopeless = "every local node has ended, because the process that starts them died"
        return [TellUser("the process that starts local nodes has died, and they with it")]

    def started(self, name: str, now: float) -> None:
        """The process of a node exists."""
        self._started_at[name] = self._starting[name] = now

    def ended(self, name: str, status: int, now: float, described: str = "") -> list[Decision]:
        """The process of a node has ended; a negative status is the signal that killed it."""
        self._starting.pop(name, None)
        is_quick = now - self._started_at[name] < QUICK_SECONDS
        self._quick_ends[name] = self._quick_ends[name] + 1 if is_quick else 0
        # A positive status is the node's own word that it cannot take part.
        if status > 0 or self._quick_ends[name] >= QUICK_ENDS_MAX:
            return self._give_up(name, f"ended with {described or f'status {status}'}")
        self._waiting.append(name)
        return []

    def failed(self, name: str, reason: str) -> list[Decision]:
        """The system refused to start the process of a node."""
        self._starting.pop(name, None)
        return self._give_up(name, f"could not be started: {reason}")

    def _give_up(self, name: str, what: str) -> list[Decision]:
        self._given_up.add(name)
        if len(self._given_up) == len(self._names):
            self._hopeless = f"every local node has ended (the last {what})"
        return [TellUser(f"{name} {what} and is not started again", name)]

    def tick(self, connected: Mapping[str, bool], now: float) -> list[Decision]:
        """Decide what to do now. `connected` has every connected node of the run, and whether it is ready."""
        for name, since in list(self._starting.items()):
            if connected.get(name) or now - since > STARTING_SECONDS:
                del self._starting[name]
        reason = self._reason_to_abandon(bool(connected), now)
        if reason:
            return [AbandonRun(reason)]
        decisions: list[Decision] = []
        while self._is_serving and self._waiting and len(self._starting) < STARTING_MAX:
            name = self._waiting.popleft()
            self._starting[name] = now
            decisions.append(StartNode(name))
        return decisions

    def _reason_to_abandon(self, has_nodes: bool, now: float) -> str:
        # While the coordinator itself stood still, no node could show that it is there.
        has_stalled = self._ticked_at is None or now - self._ticked_at > STALL_SECONDS
        self._ticked_at = now
        if has_nodes or has_stalled:
            self._alone_since = now
        if has_nodes:
            return ""
        if now - self._alone_since > ALONE_SECONDS:
            return f"no node was connected for {ALONE_SECONDS:.0f} s, and no local node came back"
        return self._hopeless
