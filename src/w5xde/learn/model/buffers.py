"""Buffers: memory for large bodies, used again and again.

A hundred megabytes that are new take longer to be given by the system than to be filled. A large buffer
comes back by itself as soon as nobody holds a view of it any more: nobody needs to say so.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from w5xde.learn.model.route import is_large

# As many as are ever free at once; more would only be kept, not used.
SPARE_MAX = 2
# What is encoded has another length each time: a buffer may be so many times as large as what is asked for.
ROOM_FACTOR = 1.25


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view of a buffer that puts it back when the last view of it is gone."""

    pool: Buffers | None = None
    whole: np.ndarray[Any, np.dtype[np.uint8]]

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.give(self.whole)


class Buffers:
    """Memory of a few sizes, most recently used first."""

    def __init__(self) -> None:
        self._spare: deque[np.ndarray[Any, np.dtype[np.uint8]]] = deque(maxlen=SPARE_MAX)

    @property
    def spare_bytes(self) -> int:
        """How much memory is kept for later."""
        return sum(memory.nbytes for memory in list(self._spare))

    def take(self, count: int) -> bytearray | memoryview:
        """Memory of this many bytes, with anything in it."""
        if not is_large(count):
            return bytearray(count)
        memory = self._find(count)
        if memory is None:
            # What does not fit now is not kept for a day on which it might.
            self._spare.clear()
            memory = np.empty(count, np.uint8)
        lent = memory[:count].view(_Lent)
        lent.pool, lent.whole = self, memory
        return memoryview(lent)  # type: ignore[arg-type]  # an array is a buffer, whatever its stubs say

    def _find(self, count: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        # Only single operations: another thread may give a buffer back at any moment.
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
