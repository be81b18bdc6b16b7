"""Memory in which the state of a model may lie, other than memory of its own. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias


class StateView(Protocol):
    """Memory that shows the state of another process's model, except where it was written to."""

    @property
    def memory(self) -> memoryview: ...
    def follow(self) -> None:
        """Show the state of the other process everywhere again."""


# Memory for the state of a model, given the bytes of its vectors and of the state; None: use your own.
StatePlace: TypeAlias = Callable[[int, int], memoryview | None]


class Readers:
    """Counts reads of some memory: begun, and done. One thread changes each count."""

    def __init__(self) -> None:
        self.begun = self.done = 0

    @property
    def are_there(self) -> bool:
        return self.begun != self.done
