"""Local nodes: when one is given up, and when a run without nodes must end.

Events and `now` in, decisions out. Knows no processes, sockets or clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from w5xde.control.pool.members import STALL_SECONDS
from w5xde.control.pool.node_processes import NodeProcesses, StartNode, TellUser

# If no local node is connected for this long, the nodes or their fork server are frozen.
ALONE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class AbandonRun:
    """End the run for this reason: no node is connected, and no local node can join any more."""

    reason: str


Decision = StartNode | TellUser | AbandonRun


class LocalNodesCore:
    """Decides about the local nodes of one run."""

    def __init__(self, names: list[str], allowed: int | None = None) -> None:
        self.processes = NodeProcesses(names, allowed)
        # Why no local node can join any more; empty while one can.
        self._hopeless = ""
        self._alone_since = 0.0
        self._ticked_at: float | None = None

    def serving(self) -> list[Decision]:
        """A fork server takes requests. It may be a new one, which has none of the earlier requests."""
        return [*self.processes.serving()]

    def server_died(self) -> list[Decision]:
        """The fork server has died and nothing starts it again."""
        self.processes.server_died()
        self._hopeless = "every local node has ended, because the process that starts them died"
        return [TellUser("the process that starts local nodes has died, and they with it")]

    def started(self, name: str, now: float) -> None:
        """The process of a node exists."""
        self.processes.started(name, now)

    def ended(self, name: str, status: int, now: float, described: str = "") -> list[Decision]:
        """The process of a node has ended; a negative status is the signal that killed it."""
        # A positive status is the node's own word that it cannot take part.
        if status <= 0 and self.processes.restart(name, now):
            return []
        return self._give_up(name, f"ended with {described or f'status {status}'}")

    def failed(self, name: str, reason: str) -> list[Decision]:
        """The system refused to start the process of a node."""
        return self._give_up(name, f"could not be started: {reason}")

    def _give_up(self, name: str, what: str) -> list[Decision]:
        self.processes.finish(name)
        if self.processes.is_hopeless:
            self._hopeless = f"every local node has ended (the last {what})"
        return [TellUser(f"{name} {what} and is not started again", name)]

    def tick(self, connected: Mapping[str, bool], now: float) -> list[Decision]:
        """Decide what to do now. `connected` has every connected node of the run, and whether it is ready."""
        reason = self._reason_to_abandon(bool(connected), now)
        return [AbandonRun(reason)] if reason else [*self.processes.due(connected, now)]

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
