"""Buffers: memory for large bodies that is reused.

The system takes longer to provide a hundred new megabytes than we take to fill them. A large buffer returns
to its pool by itself when the last view of it is gone. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from w5xde.learn.model.route import is_large

# No more buffers than this are ever free at once.
SPARE_MAX = 2
# Encoded bodies differ in length: a buffer serves requests down to its length divided by this.
ROOM_FACTOR = 1.25


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view of a buffer. When it is collected, the buffer returns to its pool."""

    pool: Buffers | None = None
    whole: np.ndarray[Any, np.dtype[np.uint8]]

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.give(self.whole)


class Buffers:
    """A pool of a few large buffers, most recently used first."""

    def __init__(self) -> None:
        self._spare: deque[np.ndarray[Any, np.dtype[np.uint8]]] = deque(maxlen=SPARE_MAX)

    def take(self, count: int) -> bytearray | memoryview:
        """Uninitialised memory of this many bytes."""
        if not is_large(count):
            return bytearray(count)
        memory = self._find(count)
        if memory is None:
            # Spare buffers of the wrong length would only occupy memory.
            self._spare.clear()
            memory = np.empty(count, np.uint8)
        lent = memory[:count].view(_Lent)
        lent.pool, lent.whole = self, memory
        return memoryview(lent)  # type: ignore[arg-type]  # its stubs do not say that an array is a buffer

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
        self._spare.appendleft(memory)
