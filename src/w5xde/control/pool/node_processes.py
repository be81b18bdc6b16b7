"""The node processes of one command: which of them is started when, started again, and given up.

Events and `now` in, decisions out. Knows no processes, sockets or clock, nor the run that the nodes work for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from w5xde.control.pool.connection_limits import UNAUTHENTICATED_HERE_MAX

# Nodes that are started but not ready yet. All of them may be unauthenticated at once, and the connections of
# nodes that reconnect need places too, so this is half of the places for this machine.
STARTING_MAX = UNAUTHENTICATED_HERE_MAX // 2
# A node that takes longer than this to build its model no longer delays the start of the others.
STARTING_SECONDS = 30.0
# A node that ends sooner than this after its start, this many times in a row, is not started again.
QUICK_SECONDS = 5.0
QUICK_ENDS_MAX = 3


@dataclass(frozen=True, slots=True)
class StartNode:
    """Start the process of this node."""

    name: str


@dataclass(frozen=True, slots=True)
class TellUser:
    """Note this about nodes; `name` is empty if it concerns all of them."""

    text: str
    name: str = ""


class NodeProcesses:
    """The processes of the nodes with these names, of which the first `allowed` may run."""

    def __init__(self, names: list[str], allowed: int | None = None) -> None:
        self._names = names
        self.allowed = len(names) if allowed is None else allowed
        self._is_serving = False
        self._waiting: deque[str] = deque()
        # Since when each node that is not ready yet is starting.
        self._starting: dict[str, float] = {}
        self._started_at: dict[str, float] = {}
        self._quick_ends: Counter[str] = Counter()
        # Nodes that are not started again.
        self.over: set[str] = set()

    @property
    def is_hopeless(self) -> bool:
        """Whether no node that may run runs, or will be started."""
        return self.over.issuperset(self._names[: self.allowed])

    def allow(self, count: int) -> None:
        """Let this many of the nodes run; those that run already go on."""
        more = self._names[self.allowed : count]
        self.allowed = max(self.allowed, count)
        if self._is_serving:
            self._waiting.extend(more)

    def serving(self) -> list[TellUser]:
        """A fork server takes requests. It may be a new one, which has none of the earlier requests."""
        was_serving, self._is_serving = self._is_serving, True
        self._waiting = deque(name for name in self._names[: self.allowed] if name not in self.over)
        self._starting.clear()
        if not was_serving:
            return []
        return [TellUser("the process that starts local nodes died, and was started again")]

    def server_died(self) -> None:
        """The fork server has died and nothing starts it again."""
        self._is_serving = False

    def started(self, name: str, now: float) -> None:
        """The process of a node exists."""
        self._started_at[name] = self._starting[name] = now

    def restart(self, name: str, now: float) -> bool:
        """A process died: start it again, and return True, unless it ended quickly too often."""
        self._starting.pop(name, None)
        is_quick = now - self._started_at[name] < QUICK_SECONDS
        self._quick_ends[name] = self._quick_ends[name] + 1 if is_quick else 0
        if self._quick_ends[name] >= QUICK_ENDS_MAX:
            return False
        self._waiting.append(name)
        return True

    def finish(self, name: str) -> None:
        """Do not start this node again."""
        self._starting.pop(name, None)
        self.over.add(name)

    def due(self, ready: Mapping[str, bool], now: float) -> list[StartNode]:
        """The nodes to start now. `ready` has every connected node, and whether it is ready."""
        for name, since in list(self._starting.items()):
            if ready.get(name) or now - since > STARTING_SECONDS:
                del self._starting[name]
        asked: list[StartNode] = []
        while self._is_serving and self._waiting and len(self._starting) < STARTING_MAX:
            name = self._waiting.popleft()
            self._starting[name] = now
            asked.append(StartNode(name))
        return asked
