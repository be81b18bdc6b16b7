"""The loader: reads batches ahead in the order of the plan, so that nodes do not wait for them.

It reads quick data sets on the event loop, others on a thread, and with `--loader-workers`, or if reading
draws random numbers, in worker processes. A stream, and what worker processes read, comes in order; any other
batch is read when it is asked for, or ahead if it is wanted. It keeps a batch until its step is applied, so
that a retry costs nothing and a stream is never read twice. An epoch that a sampler draws is drawn when the
epoch before it begins. In place of a batch of a map-style data set that cannot be read it gives the reason.
Knows nothing of leases and nodes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from w5xde.config import Settings
from w5xde.errors import JobError
from w5xde.learn.data.batch_types import BatchTypes
from w5xde.learn.data.epoch_order import DrawnEpoch
from w5xde.learn.data.packed_epochs import PackedEpochs
from w5xde.learn.data.payload import (
    Packed,
    ReadBatch,
    Shipped,
    UnreadableBatch,
    pack_batch,
    ship,
    unship,
)
from w5xde.learn.data.sources import (
    Key,
    MapSource,
    SizedBatch,
    Source,
    Start,
    WorkerBatches,
    WorkerEpochs,
    all_batches,
)
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.system.parent import serve_parent
from w5xde.runtime.telemetry.metrics_rows import DataAhead
from w5xde.specs.round_settings import ROUNDS, round_steps_max

# Reading a batch on the event loop delays everything else by as much.
INLINE_READ_SECONDS = 0.002
# At least this many batches are read before they are asked for: enough for one step of most runs.
AHEAD_BATCHES = 16


def _begin_worker(prepare: Callable[[int], object] | None, coordinator: int, worker: int) -> None:
    """Prepare a worker process, a child of the coordinator's."""
    serve_parent(coordinator)
    if prepare is not None:
        prepare(worker)


def _start_workers(
    given: IterableDataset[Any],
    count: int,
    convert: Callable[[Any], Any] | None = None,
    prepare: Callable[[int], object] | None = None,
) -> Iterator[Any]:
    """Start processes that make items ahead, and convert them; the items come in order."""
    # Forked now, before there are threads, which a fork would lose.
    return iter(
        DataLoader(
            given,
            batch_size=None,
            collate_fn=convert,
            num_workers=count,
            prefetch_factor=4,
            worker_init_fn=partial(_begin_worker, prepare, os.getpid()),
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
    )


def _pack(types: BatchTypes, given: SizedBatch, *, is_stream: bool) -> ReadBatch | None:
    """A batch that was read, ready to be sent, or why it cannot be; None at the end of a stream's epoch.

    A batch of a stream that cannot be sent raises: a stream cannot go on behind it.
    """
    samples, batch = given
    if isinstance(batch, UnreadableBatch) or not samples:
        return batch  # type: ignore[no-any-return]
    try:
        return pack_batch(samples, batch, types)
    except JobError as error:
        if is_stream:
            raise
        return UnreadableBatch(error.what)


def _ship(types: BatchTypes, given: SizedBatch, *, is_stream: bool) -> Shipped | UnreadableBatch | None:
    """In a worker process: pack a batch, so that whatever it is made of comes as bytes."""
    packed = _pack(types, given, is_stream=is_stream)
    return ship(packed) if isinstance(packed, Packed) else packed


def _unship(given: Shipped | UnreadableBatch | None) -> ReadBatch | None:
    return unship(given) if isinstance(given, Shipped) else given


class OrderProcess:
    """Draws the orders of epochs, one after another, in a process of its own.

    For samplers that draw from the global generators: in this process threads may draw from them too.
    """

    def __init__(self, source: MapSource, first: int) -> None:
        self._next = first
        self._epochs = _start_workers(WorkerEpochs(source, first), 1)

    def draw(self, epoch: int) -> DrawnEpoch | None:
        """The order of this epoch or, if it is past already, None."""
        while self._next <= epoch:
            number, drawn = next(self._epochs)
            self._next = number + 1
            if number == epoch:
                return drawn  # type: ignore[no-any-return]
        return None


def _end_of_epoch() -> None:
    return None


class Loader:
    """Hands out packed batches by (epoch, batch)."""

    def __init__(
        self,
        source: Source,
        settings: Settings,
        start: Start,
        is_wanted: Callable[[Key], bool] | None = None,
    ) -> None:
        """Batches that are not wanted are read only if they are asked for; by default all are wanted."""
        self.is_stream = source.is_stream
        self._is_wanted = is_wanted or (lambda key: True)
        self._source = source
        self._epochs = settings.epoch_limit
        is_local = settings.data == "local"
        # Reading may draw from the global generators only where nothing else computes: in another process.
        self._workers = 0 if is_local else max(settings.loader_workers or 0, int(source.draws))
        if self.is_stream:
            self._workers = min(self._workers, 1)
        self._ahead = max(AHEAD_BATCHES, settings.step_batches + 1)
        if self.is_stream and settings.mode == ROUNDS:
            # A round is planned when all its batches are known, and one more.
            self._ahead = max(self._ahead, settings.step_batches * round_steps_max(settings.local_steps) + 1)
        # The source itself, if any batch of it can be read at any time.
        self._any_batch = source if isinstance(source, MapSource) and not self._workers else None
        self._reading: set[Key] = set()
        self._ready: dict[Key, ReadBatch] = {}
        self._waiting: dict[Key, list[Callable[[ReadBatch], None]]] = {}
        self._claimed: set[Key] = set()
        # Batches that come in order after their steps are applied: nodes had their samples.
        self._too_late: set[Key] = set()
        # The batches to read next: first those left over by an earlier life of the run, then all from here
        # on.
        self._also: deque[Key] = deque(sorted(start.also))
        self._next: Key = (start.epoch, start.batch)
        self._unclaimed = 0
        # Whether the loop will call `_read_ahead`.
        self._is_ahead_due = False
        self._batches = self._read_all(start)
        if isinstance(source, MapSource) and source.order_draws:
            # After the workers were forked, which draw orders themselves.
            source.draw_elsewhere = OrderProcess(source, start.first_epoch).draw
        # The epoch that is drawn next, if a sampler draws epochs, and its first batch that is still to come.
        self._to_draw: Key = (start.epoch, start.batch)
        # Gives any batch without reading: from memory, or as indices for nodes with their own data.
        self._direct = self._make_direct(is_local=is_local)
        self._actor: Actor | None = None
        self._discovered: Callable[[int, Sequence[int]], None] = lambda epoch, sizes: None
        self._failed: Callable[[BaseException], None] = lambda error: None

    def _make_direct(self, *, is_local: bool) -> Callable[[int, int], Packed] | None:
        source = self._source
        if is_local and isinstance(source, MapSource):

            def indices(epoch: int, batch: int) -> Packed:
                chosen = source.indices(epoch, batch)
                return pack_batch(len(chosen), chosen)

            return indices
        packed = None if self._workers else PackedEpochs.of(source)
        return packed.batch if packed is not None else None

    def _read_all(self, start: Start) -> Iterator[Callable[[], ReadBatch | None]]:
        source, types, is_stream = self._source, self._source.recipe.types, self.is_stream
        if not self._workers:
            reading = all_batches(source, self._epochs, start)
            return (lambda read=read: _pack(types, read(), is_stream=is_stream) for read in reading)  # type: ignore[misc]
        batches, prepare = WorkerBatches(source, self._epochs, start), source.recipe.prepare_worker
        convert = partial(_ship, types, is_stream=is_stream)
        arriving = _start_workers(batches, self._workers, convert, prepare)
        return (partial(_unship, given) for given in arriving)

    def start(
        self,
        *,
        read_seconds: float,
        discovered: Callable[[int, Sequence[int]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Begin to read. `discovered(epoch, sizes)` reports batches that no plan can know of.

        Those of a stream, and those of epochs that may have another number of them each time. A batch of 0
        samples ends its epoch.
        """
        inline = self._direct is not None or (not self._workers and read_seconds < INLINE_READ_SECONDS)
        self._actor = Actor("w5xde-loader", failed, inline=inline)
        self._discovered, self._failed = discovered, failed
        self._draw_up_to(self._to_draw[0] + 1)
        self._read_ahead()

    def stop(self) -> None:
        if self._actor is not None:
            self._actor.stop()
            self._actor = None
        self._batches = iter(())

    @property
    def data_ahead(self) -> DataAhead:
        """How far reading is ahead of the leases."""
        return DataAhead(len(self._ready.keys() - self._claimed), is_behind=bool(self._waiting))

    def at_once(self, keys: list[Key]) -> dict[Key, Packed] | None:
        """These batches, if no batch of this data set needs to be read; else None."""
        direct = self._direct
        for key in keys[:1]:
            self._draw_up_to(key[0] + 1)
        return {key: direct(*key) for key in keys} if direct is not None else None

    def get(self, key: Key, done: Callable[[ReadBatch], None]) -> None:
        """Call `done` with the batch, now or as soon as it has been read; or with why it cannot be."""
        self._draw_up_to(key[0] + 1)
        if key not in self._claimed:
            self._claimed.add(key)
            self._unclaimed -= 1
        ready = self._ready.get(key)
        if ready is not None:
            done(ready)
        else:
            self._waiting.setdefault(key, []).append(done)
            if self._any_batch is not None:
                self._read_batch(self._any_batch, key)
            else:
                self._read_up_to(key)
        self._read_ahead_later()

    def _draw_up_to(self, epoch: int) -> None:
        """Draw epochs up to this one, if a sampler draws them, and report their batches."""
        source = self._source
        if not isinstance(source, MapSource) or source.recipe.sampler is None:
            return
        while self._to_draw[0] <= epoch and self._to_draw[0] != self._epochs:
            number, first = self._to_draw
            self._to_draw = (number + 1, 0)
            try:
                drawn = source.epoch(number)
            except JobError as error:
                self._failed(error)
                return
            if source.epoch_samples is None:
                self._discovered(number, [*map(len, map(drawn.places, range(first, drawn.batches))), 0])

    def _read_ahead_later(self) -> None:
        """Read ahead once the leases that are being sent are sent: the thread would take the interpreter."""
        if not self._is_ahead_due and self._actor is not None:
            self._is_ahead_due = True
            asyncio.get_running_loop().call_soon(self._read_ahead)

    def _read_up_to(self, key: Key) -> None:
        while key in self._waiting and self._is_to_come(key) and self._actor is not None:
            self._read_one()
            if self.is_stream and not self._actor.inline:
                break  # which batch of a stream it is, is known when it arrives

    def release(self, keys: list[Key]) -> None:
        """Forget batches that are applied."""
        if self._direct is not None:
            return
        for key in keys:
            if key not in self._claimed and (key in self._ready or key in self._reading):
                self._unclaimed -= 1  # it was read ahead for nothing
            if self._any_batch is None and (key in self._reading or self._is_to_come(key)):
                self._too_late.add(key)
            self._ready.pop(key, None)
            self._reading.discard(key)
            self._claimed.discard(key)
        if self._any_batch is None:
            # What is in order before the next batch that is needed has to be read too.
            self._read_ahead_later()

    def _read_ahead(self) -> None:
        self._is_ahead_due = False
        if self._actor is None or (self._actor.inline and not self.is_stream):
            return
        source = self._any_batch
        if source is None:
            while self._unclaimed < self._ahead and not self._is_over:
                self._read_one()
            return
        for _ in range(self._ahead):
            if self._unclaimed >= self._ahead or self._is_over:
                return
            key = self._also.popleft() if self._also else self._next
            self._next = max(self._next, self._after(key))
            if key not in self._ready and self._is_wanted(key):
                self._read_batch(source, key)

    def _read_batch(self, source: MapSource, key: Key) -> None:
        """Read this batch, whatever was read before it."""
        if self._actor is None or key in self._reading:
            return
        if key in self._also:
            self._also.remove(key)
        self._reading.add(key)
        self._unclaimed += 1
        self._next = max(self._next, self._after(key))

        def arrived(read: ReadBatch) -> None:
            if key in self._reading:
                self._arrived(key, read)
            else:
                # It is applied already. A lease that waited for it hears of that when it is to be sent.
                self._serve(key, read)

        types = source.recipe.types
        self._actor.call(lambda: _pack(types, source.try_to_read(*key), is_stream=False), arrived)

    @property
    def _is_over(self) -> bool:
        return not self._also and self._next[0] == self._epochs

    def _is_to_come(self, key: Key) -> bool:
        return key >= self._next or key in self._also

    def _read_one(self) -> None:
        if self._actor is None:
            return
        if self.is_stream:
            self._unclaimed += 1
            self._actor.call(self._read, self._stream_arrived)
            return
        key = self._also.popleft() if self._also else self._next
        if key == self._next:
            self._next = self._after(key)
        if key not in self._too_late:
            self._unclaimed += 1
            self._reading.add(key)
        self._actor.call(self._read, lambda read: self._arrived(key, read))

    def _after(self, key: Key) -> Key:
        epoch, batch = key
        batches = self._source.epoch(epoch).batches if isinstance(self._source, MapSource) else 0
        return (epoch, batch + 1) if batch + 1 < batches else (epoch + 1, 0)

    def _read(self) -> ReadBatch | None:
        return next(self._batches, _end_of_epoch)()

    def _stream_arrived(self, packed: Packed | None) -> None:
        if self._is_over:
            return  # a batch beyond the last epoch, which was read ahead
        if packed is not None and self._also:
            self._arrived(self._also.popleft(), packed)
            return
        epoch, batch = self._next
        if packed is None:
            self._next = (epoch + 1, 0)
            self._unclaimed -= 1
            self._discovered(epoch, [0])
            self._read_ahead()
        else:
            self._next = (epoch, batch + 1)
            self._arrived((epoch, batch), packed)
            self._discovered(epoch, [packed.samples])

    def _arrived(self, key: Key, read: ReadBatch) -> None:
        self._reading.discard(key)
        if key in self._too_late:
            self._too_late.discard(key)
        else:
            self._ready[key] = read
        self._serve(key, read)

    def _serve(self, key: Key, read: ReadBatch) -> None:
        for done in self._waiting.pop(key, ()):
            done(read)
