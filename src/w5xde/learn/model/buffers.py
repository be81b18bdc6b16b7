"""Buffers: memory for large bodies that is reused.

The system takes longer to provide new memory than we take to fill it. A buffer returns to its pool by itself
when the last view of it is gone. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from w5xde.learn.model.route import REUSED_BYTES_MIN

# No more buffers than this are ever free at once: as many as take this many bytes, and at least two.
SPARE_MIN = 2
SPARE_MAX = 16
SPARE_BYTES = 8 * 1024 * 1024
# Encoded bodies differ in length: a buffer serves requests down to its length divided by this.
ROOM_FACTOR = 1.25


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view of memory. When it is collected, the memory returns to its owner."""

    give_back: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.give_back is not None:
            self.give_back()


def lend(memory: np.ndarray[Any, np.dtype[np.uint8]], give_back: Callable[[], None]) -> memoryview:
    """A view of this memory; `give_back` is called, on any thread, when the last view of it is gone."""
    lent = memory.view(_Lent)
    lent.give_back = give_back
    return memoryview(lent)  # type: ignore[arg-type]  # its stubs do not say that an array is a buffer


class Buffers:
    """A pool of a few buffers, most recently used first."""

    def __init__(self) -> None:
        self._spare: deque[np.ndarray[Any, np.dtype[np.uint8]]] = deque(maxlen=SPARE_MAX)

    @property
    def spare_bytes(self) -> int:
        """How much memory is kept for later."""
        return sum(memory.nbytes for memory in list(self._spare))

    def take(self, count: int) -> bytearray | memoryview:
        """Uninitialised memory of this many bytes."""
        if count < REUSED_BYTES_MIN:
            return bytearray(count)
        memory = self._find(count)
        if memory is None:
            # Spare buffers of the wrong length would only occupy memory.
            self._spare.clear()
            memory = np.empty(count, np.uint8)
        whole = memory
        return lend(memory[:count], lambda: self.give(whole))

    def _find(self, count: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        # Only atomic operations: another thread may return a buffer at any moment.
        for _ in range(SPARE_MAX):
            try:
                memory = self._spare.popleft()
            except IndexError:
                return None
            if count <= memory.nbytes <= ROOM_FACTOR * count:
                return memory
            self._spare.append(memory)
        return None

    def give(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if len(self._spare) < max(SPARE_MIN, min(SPARE_MAX, SPARE_BYTES // memory.nbytes)):
            self._spare.appendleft(memory)
