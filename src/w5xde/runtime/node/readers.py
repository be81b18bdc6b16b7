"""Reading processes of a node, with `--data local`: they read batches while the node computes others.

A batch comes back as bytes, and is then unpacked like one that the coordinator sent. If a process dies, the
node goes on to read by itself. Knows no leases and no connections.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from w5xde.errors import JobError
from w5xde.learn.data.payload import Packer, unpack
from w5xde.learn.data.sources import Key, MapSource
from w5xde.learn.model.device import core_count, use_threads
from w5xde.message_types import Item
from w5xde.runtime.system.parent import serve_parent

# A batch that was read, as its description and its bytes; or why it could not be.
_Read: TypeAlias = tuple[bytes, bytearray] | str
_ITEMS = msgspec.msgpack.Decoder(Item)
# In a reading process: what it reads from.
_SOURCES: list[MapSource] = []


class BatchReaders:
    """Processes that read the batches of one node, in the order in which they are asked for."""

    def __init__(self, source: MapSource, count: int, inherited: int | None = None) -> None:
        """The processes close the descriptor that they have `inherited`: it is the node's alone."""
        self._source = source
        context = multiprocessing.get_context("fork")
        prepared = source, context.Value("i", 0), inherited, os.getpid()
        self._processes = ProcessPoolExecutor(count, context, _begin, prepared)
        # Forks all of them now, while the descriptor is what it is.
        self._processes.submit(os.getpid)
        self._asked: dict[Key, Future[_Read]] = {}
        # Why the node reads by itself, if it does.
        self.trouble = ""

    @classmethod
    def start(
        cls, source: MapSource | None, wanted: int | None, inherited: int | None = None
    ) -> BatchReaders | None:
        """The wanted number of processes; None: as many as the job's DataLoader has, up to all cores.

        None if the node reads by itself.
        """
        if source is None or sys.platform != "linux":  # elsewhere a fork may break system libraries
            return None
        count = min(source.recipe.workers, core_count()) if wanted is None else wanted
        return cls(source, count, inherited) if count else None

    def ask(self, key: Key, indices: Tensor) -> None:
        """Begin to read a batch, as soon as a process is free."""
        if key in self._asked or self.trouble:
            return
        try:
            self._asked[key] = self._processes.submit(_read, key, indices.tolist())
        except BrokenProcessPool as error:
            self._broke(error)

    def take(self, key: Key, indices: Tensor) -> Any:
        """The batch, once it is read. Raises JobError if it cannot be."""
        self.ask(key, indices)
        asked = self._asked.pop(key, None)
        if asked is None:
            return self._source.read_indices(indices, *key)
        try:
            read = asked.result()
        except BrokenProcessPool as error:
            self._broke(error)
            return self._source.read_indices(indices, *key)
        if isinstance(read, str):
            raise JobError(read, code="W5-203")
        item, body = read
        return unpack(_ITEMS.decode(item), body, types=self._source.recipe.types)

    def forget(self, keys: list[Key]) -> None:
        """Nobody needs these batches any more."""
        for key in keys:
            asked = self._asked.pop(key, None)
            if asked is not None:
                asked.cancel()

    def close(self) -> None:
        self._processes.shutdown(wait=False, cancel_futures=True)

    def _broke(self, error: BrokenProcessPool) -> None:
        self._asked.clear()
        self.trouble = f"a process that read batches ended ({error}); the node reads them itself"


def _begin(source: MapSource, begun: Any, inherited: int | None, node: int) -> None:
    """Prepare a reading process, a child of the node's."""
    if inherited is not None:
        # Else the connection would stay open when the node closes it, or dies.
        os.close(inherited)
    serve_parent(node)
    # A process that was forked from one with several threads must not wait for them.
    use_threads(1)
    _SOURCES[:] = [source]
    if source.recipe.prepare_worker is not None:
        with begun.get_lock():
            number, begun.value = begun.value, begun.value + 1
        source.recipe.prepare_worker(number)


def _read(key: Key, indices: list[int]) -> _Read:
    (source,) = _SOURCES
    packer = Packer(source.recipe.types)
    try:
        item = packer.pack(source.read_indices(torch.tensor(indices), *key))
    except JobError as error:
        return error.what
    return msgspec.msgpack.encode(item), bytearray().join(packer.pieces)
