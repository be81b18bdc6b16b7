"""Shared memory: regions that the coordinator and the local nodes that it forked both map.

    update region    one for each node: a page with a flag for each slot, then the slots, one vector each
    state region     one for all nodes: the parameters and buffers of the newest version

The node writes a vector into a free slot, sets its flag, and sends only where the vector lies. The
coordinator clears the flag when nothing refers to the vector any more. The state region belongs to the
coordinator: nodes can only read it, or write into pages that thereby become their own.

A region is a memfd: it has no name, its size is sealed, and the system frees it when the last process that
maps it has ended, by whatever signal. Knows no messages and no connections.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from w5xde.errors import RemoteProtocolError
from w5xde.learn.model.buffers import lend
from w5xde.runtime.system.memory import available_bytes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

HAS_REGIONS = hasattr(os, "memfd_create")
PAGE_BYTES = mmap.PAGESIZE
# A node may answer several leases before the step is made that uses them all. A slot takes memory only once
# it was used, and no more than an update that is sent by a socket takes at the coordinator.
SLOTS = 4
# A cache line for each flag.
_FLAG_BYTES = 64
# For each page: it is in memory, swapped out, or still that of the file.
_PAGEMAP = Path("/proc/self/pagemap")
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
# Linux 5.1 has it, Python 3.11 has no name for it: nobody can map the region for writing from then on.
_F_SEAL_FUTURE_WRITE = 0x10


def _in_pages(count: int) -> int:
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def _create(count: int, needed: int) -> int:
    """The descriptor of a new region; OSError if there is no memory for the part of it that is needed."""
    if available_bytes() < needed:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    descriptor = os.memfd_create("w5xde", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, count)
    return descriptor


def _seal(descriptor: int, more: int = 0) -> None:
    # A region that another process could shorten would kill us by a signal when we read it.
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | more
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def _address(memory: Any) -> int:
    at: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return at


class StateRegion:
    """The coordinator's side of the memory in which the newest version lies."""

    def __init__(self, count: int) -> None:
        size = _in_pages(count)
        self.descriptor = _create(size, size)
        self._mapping = mmap.mmap(self.descriptor, size)
        _seal(self.descriptor, _F_SEAL_FUTURE_WRITE)
        self.memory = memoryview(self._mapping)[:count]
        self._begin = _address(self._mapping)

    def offset_of(self, piece: memoryview) -> int | None:
        """Where in the region these bytes lie; None if they lie elsewhere."""
        offset = _address(piece) - self._begin
        return offset if 0 <= offset <= len(self.memory) - len(piece) else None

    def __del__(self) -> None:
        # No node is started any more. The memory itself stays while it is used.
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class UpdateRegion:
    """The coordinator's side of the memory in which the updates of one node lie."""

    def __init__(self, vector_bytes: int) -> None:
        self._vector_bytes = vector_bytes
        self._stride = _in_pages(vector_bytes)
        size = PAGE_BYTES + SLOTS * self._stride
        self.descriptor = _create(size, self._stride)
        try:
            _seal(self.descriptor)
            self._memory: Bytes = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
        except BaseException:
            os.close(self.descriptor)
            raise
        # Slots with a vector that something here refers to.
        self._used: set[int] = set()

    def close(self) -> None:
        """Close the descriptor, which the node has by now."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def body_at(self, offset: int, count: int) -> memoryview:
        """The vector that a node has put into a slot. The slot is free again when the last view is gone."""
        slot, rest = divmod(offset - PAGE_BYTES, self._stride)
        if not 0 <= slot < SLOTS or rest or count > self._vector_bytes:
            raise RemoteProtocolError(
                f"a body of {count} bytes at {offset} of its shared memory, where no slot is", code="W5-120"
            )
        if slot in self._used:
            raise RemoteProtocolError("a slot of its shared memory is sent twice", code="W5-120")
        self._used.add(slot)
        return lend(self._memory[offset : offset + count], lambda: self._release(slot))

    def _release(self, slot: int) -> None:
        # In this order: the node may send the slot again as soon as its flag is clear.
        self._used.discard(slot)
        self._memory[slot * _FLAG_BYTES] = 0

    def reset(self) -> None:
        """The node has a new connection: what it sent on the one before, and we never read, is void."""
        for slot in set(range(SLOTS)) - self._used:
            self._memory[slot * _FLAG_BYTES] = 0


class LocalShare:
    """The coordinator's side of the memory that it shares with one local node."""

    def __init__(self, updates: UpdateRegion, state: StateRegion | None) -> None:
        self.updates = updates
        self._state = state

    @property
    def descriptors(self) -> list[int]:
        """For the node's process: of its update region, and of the state region if there is one."""
        return [self.updates.descriptor, *([self._state.descriptor] if self._state is not None else [])]

    def body_at(self, offset: int, count: int) -> memoryview:
        return self.updates.body_at(offset, count)

    def offset_of(self, piece: memoryview) -> int | None:
        return self._state.offset_of(piece) if self._state is not None else None


class NodeRegions:
    """A node's side: slots to write its vectors into, and the state of the model to read."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Map the regions and close the descriptors; OSError if they cannot be mapped."""
        try:
            updates = descriptors[0]
            self._updates: Bytes = np.frombuffer(mmap.mmap(updates, os.fstat(updates).st_size), np.uint8)
            self._begin = _address(self._updates)
            self.state = StateMapping(descriptors[1]) if len(descriptors) > 1 else None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._stride = 0

    def slots(self, vector_bytes: int) -> list[memoryview]:
        """The memory of each slot, for vectors of this many bytes; none if they do not fit."""
        self._stride = _in_pages(vector_bytes)
        if len(self._updates) != PAGE_BYTES + SLOTS * self._stride:
            return []
        starts = [PAGE_BYTES + slot * self._stride for slot in range(SLOTS)]
        return [memoryview(self._updates)[at : at + vector_bytes] for at in starts]  # type: ignore[arg-type]

    def is_lent(self, slot: int) -> bool:
        """Whether the coordinator still uses what was sent from this slot."""
        return bool(self._updates[slot * _FLAG_BYTES])

    def offset_of(self, piece: memoryview) -> int | None:
        """Where in our region these bytes lie, from now on lent to the coordinator; None: elsewhere."""
        offset = _address(piece) - self._begin
        if not PAGE_BYTES <= offset <= len(self._updates) - len(piece):
            return None
        self._updates[(offset - PAGE_BYTES) // self._stride * _FLAG_BYTES] = 1
        return offset

    def body_at(self, offset: int, count: int) -> memoryview:
        memory = self.state.memory if self.state is not None else memoryview(b"")
        if offset + count > len(memory):
            raise RemoteProtocolError(
                f"{count} bytes at {offset} of shared memory that has {len(memory)}", code="W5-120"
            )
        return memory[offset : offset + count]


class StateMapping:
    """A node's private view of the state region: a page follows the region until the node writes to it."""

    def __init__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        access = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        self._mapping = mmap.mmap(descriptor, size, **access)
        self.memory = memoryview(self._mapping)
        self._begin = _address(self._mapping)

    def follow(self) -> None:
        """Drop every page that this process has written, so that all show the coordinator's state again."""
        first = last = 0
        try:
            with _PAGEMAP.open("rb", buffering=0) as pagemap:
                pages = os.pread(
                    pagemap.fileno(), len(self.memory) // PAGE_BYTES * 8, self._begin // PAGE_BYTES * 8
                )
            entries = np.frombuffer(pages, np.uint64)
            is_here = (entries & np.uint64(_PRESENT | _SWAPPED)) != 0
            own = np.flatnonzero(is_here & ((entries & np.uint64(_OF_FILE)) == 0))
            if not own.size:
                return
            first, last = int(own[0]), int(own[-1]) + 1
        except OSError:
            last = len(self.memory) // PAGE_BYTES
        self._mapping.madvise(mmap.MADV_DONTNEED, first * PAGE_BYTES, (last - first) * PAGE_BYTES)
