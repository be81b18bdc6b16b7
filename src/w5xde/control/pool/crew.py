"""A crew: the nodes that one `w5xde join` runs on its machine; which are started, and when all is over.

The first node goes ahead alone. If the coordinator refuses it, that is told once and not by every node; once
it has joined, the caller knows how many more fit. Events and `now` in, decisions out. Knows no processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from w5xde.control.pool.node_processes import NodeProcesses, StartNode, TellUser

# A node that leaves in a hurry does so within 8 s, and needs a moment for its goodbye; one that is frozen
# never does.
GIVE_UP_SECONDS = 11.0


@dataclass(frozen=True, slots=True)
class LeaveAll:
    """Have every node leave its run: it is over, or the user said so; `hurries`: within a few seconds."""

    hurries: bool = False


CrewDecision = StartNode | TellUser | LeaveAll


class CrewCore:
    """Decides about the nodes of one crew."""

    def __init__(self, names: list[str]) -> None:
        self.processes = NodeProcesses(names, allowed=1)
        self._running: set[str] = set()
        self._ready: dict[str, bool] = {}
        # No node is started any more: the run is over, or the crew leaves it.
        self._is_ending = False
        # When nodes that were told to leave in a hurry are waited for no longer.
        self._gives_up_at: float | None = None
        self._is_given_up = False
        self._has_server = True

    @property
    def is_over(self) -> bool:
        """Whether no node runs, and none will be started."""
        is_last = self._is_ending or self.processes.is_hopeless or not self._has_server
        return self._is_given_up or (is_last and not self._running)

    @property
    def running(self) -> int:
        """How many nodes run."""
        return len(self._running)

    def serving(self) -> list[CrewDecision]:
        """A fork server takes requests. It may be a new one; the nodes of an earlier one end with it."""
        self._running.clear()
        self._ready.clear()
        return [*self.processes.serving()]

    def server_died(self) -> list[CrewDecision]:
        """The fork server has died with its nodes, and nothing starts it again."""
        self._has_server = False
        self._running.clear()
        self.processes.server_died()
        return [TellUser("the process that starts the nodes of this machine has died, and they with it")]

    def started(self, name: str, now: float) -> None:
        """The process of a node exists."""
        self._running.add(name)
        self.processes.started(name, now)

    def joined(self, name: str) -> None:
        """The node was accepted by its coordinator."""
        self._ready[name] = True

    def leave(self) -> list[CrewDecision]:
        """The user wants to leave the run."""
        self._is_ending = True
        return [LeaveAll()]

    def leave_in_a_hurry(self, now: float) -> list[CrewDecision]:
        """The crew must have left within a few seconds."""
        self._is_ending = True
        if self._gives_up_at is None:
            self._gives_up_at = now + GIVE_UP_SECONDS
        return [LeaveAll(hurries=True)]

    def ended(self, name: str, status: int, now: float, described: str) -> list[CrewDecision]:
        """The process of a node has ended: in order (0), with an error, or by a signal (negative)."""
        self._running.discard(name)
        self._ready.pop(name, None)
        if status == 0:
            # The run is over, for the others too: one of them may have missed the goodbye and look for the
            # coordinator.
            self.processes.finish(name)
            return [] if self._is_ending else self.leave()
        if status < 0 and not self._is_ending and self.processes.restart(name, now):
            return [TellUser(f"{name} died ({described}) and is started again", name)]
        self.processes.finish(name)
        # The last one's end is the end of all, and its error is shown as such.
        return (
            [] if self.is_over else [TellUser(f"{name} ended ({described}) and is not started again", name)]
        )

    def failed(self, name: str, reason: str) -> list[CrewDecision]:
        """The system refused to start the process of a node."""
        self.processes.finish(name)
        return [TellUser(f"{name} could not be started: {reason}", name)]

    def tick(self, now: float) -> list[CrewDecision]:
        """Decide which nodes to start now, and whether to wait no longer for those that leave."""
        self._is_given_up = self._gives_up_at is not None and now >= self._gives_up_at
        return [] if self._is_ending else [*self.processes.due(self._ready, now)]
