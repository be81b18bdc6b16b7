"""Local memory: the memory that a coordinator shares with the nodes that it starts on its machine.

Says whether memory is shared at all, and makes the regions. Where that fails, nodes use their sockets as
other nodes do, and the user is told once. Knows no peers.
"""

from __future__ import annotations

import os

from w5xde.config import Settings
from w5xde.learn.model.route import VectorRoute
from w5xde.runtime.system.shared_memory import HAS_REGIONS, LocalShare, StateRegion, UpdateRegion


class LocalMemory:
    """Makes the regions of one run."""

    def __init__(self, settings: Settings) -> None:
        # In rounds mode nodes seldom send, and little.
        is_useful = settings.nodes != 0 and settings.mode != "rounds"
        self._is_wanted = is_useful and settings.road in ("auto", "shared")
        # In async mode a node computes on a version while the next one is made, so it needs its own copy.
        self._shares_state = settings.mode == "sync"
        self._state: StateRegion | None = None
        self._route = VectorRoute(0)
        # Of the model's parameters and buffers.
        self.state_bytes = 0
        # Why nothing is shared although it was to be; empty: all is well, or nobody asked for it.
        self.trouble = ""
        if settings.nodes and not HAS_REGIONS:
            self._is_wanted = False
            if settings.road == "shared":
                self._give_up("this system has no memory without a name (memfd)")

    def place_state(self, vector_bytes: int, count: int) -> memoryview | None:
        """Shared memory for a state of `count` bytes, of which a vector has so many; None: use your own."""
        self._route, self.state_bytes = VectorRoute(vector_bytes), count
        if not self._is_wanted or not self._shares_state or not self._route.is_shared:
            return None
        try:
            self._state = StateRegion(count)
        except OSError as error:
            self._give_up(os.strerror(error.errno or 0))
            return None
        return self._state.memory

    def new_share(self) -> LocalShare | None:
        """The memory to share with a node that is about to be started; None: it uses its socket."""
        if not self._is_wanted or not self._route.is_shared:
            return None
        try:
            return LocalShare(UpdateRegion(self._route.vector_bytes), self._state)
        except OSError as error:
            self._give_up(os.strerror(error.errno or 0))
            return None

    def _give_up(self, reason: str) -> None:
        self._is_wanted = False
        self.trouble = f"local nodes share no memory with the coordinator ({reason}): they use sockets"

    def take_trouble(self) -> str:
        """What to tell the user, once."""
        trouble, self.trouble = self.trouble, ""
        return trouble
