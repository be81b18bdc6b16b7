"""Data sources: from batch numbers to batches, with the same samples in any process.

A batch is read under its own seed, so that random augmentation gives the same samples wherever it is read.
Knows no sockets, threads or worker processes: the runtime decides where batches are read.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from w5xde.errors import JobError
from w5xde.learn.data.payload import Packer
from w5xde.learn.job.job import describe
from w5xde.learn.model.seeding import seed_everything
from w5xde.tree import batch_seed

# Samples whose bytes make the fingerprint of a data set: enough to notice another order or another file.
FINGERPRINT_SAMPLES = 8

# The number of samples in a batch, and the batch; `(0, None)` ends an epoch of a stream.
SizedBatch = tuple[int, Any]


class MapSource:
    """Batches of a map-style data set: any batch, at any time, in any process."""

    is_stream = False

    def __init__(self, dataset: Any, *, batch_size: int, seed: int, shuffle: bool) -> None:
        self.samples = _length(dataset)
        self.dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, torch.Tensor] = {}
        # Whether reading draws from global generators. If the first batch does not, they are not seeded.
        self.draws = True

    def samples_of(self, batch: int) -> range:
        """The places of a batch's samples in the order of its epoch."""
        start = batch * self._batch_size
        return range(start, min(start + self._batch_size, self.samples))

    def indices(self, epoch: int, batch: int) -> torch.Tensor:
        """The data set's indices of a batch's samples."""
        places = self.samples_of(batch)
        return self.order(epoch)[places.start : places.stop]

    def read(self, epoch: int, batch: int) -> Any:
        return self.read_indices(self.indices(epoch, batch), batch_seed(self._seed, epoch, batch))

    def first(self, samples: int) -> Any:
        """The first samples of the first epoch, as one batch."""
        return self.read_indices(self.indices(0, 0)[:samples], batch_seed(self._seed, 0, 0))

    def read_indices(self, indices: torch.Tensor, seed: int) -> Any:
        """The batch of these samples, read under this seed."""
        dataset = self.dataset
        if type(dataset) is TensorDataset:  # a subclass may do more in its __getitem__
            # The result of default_collate at a tenth of its cost; nothing in it is random.
            return [tensor[indices] for tensor in dataset.tensors]
        if self.draws:
            seed_everything(seed)
        chosen = indices.tolist()
        return collate(_call(lambda: _fetch(dataset, chosen)))

    def order(self, epoch: int) -> torch.Tensor:
        """The indices of all samples, in the order in which an epoch reads them."""
        order = self._orders.get(epoch)
        if order is None:
            generator = torch.Generator().manual_seed(batch_seed(self._seed, epoch, -1))
            order = (
                torch.randperm(self.samples, generator=generator)
                if self._shuffle
                else torch.arange(self.samples)
            )
            # Late batches of the epoch before may still be lent again. Replaced whole: a thread that reads
            # batches asks for orders too.
            kept = {known: each for known, each in self._orders.items() if known >= epoch - 1}
            self._orders = {**kept, epoch: order}
        return order

    def readers(self, epoch: int) -> Iterator[Callable[[], SizedBatch]]:
        """A function for each batch of an epoch, in order, that reads it."""
        for batch in range(-(-self.samples // self._batch_size)):
            yield lambda b=batch: (len(self.samples_of(b)), self.read(epoch, b))  # type: ignore[misc]

    def fingerprint(self) -> str:
        """Differs between two data sets, most likely, without reading all of them."""
        last = self.samples - 1
        places = sorted({last * i // max(1, FINGERPRINT_SAMPLES - 1) for i in range(FINGERPRINT_SAMPLES)})
        packer = Packer()
        item = packer.pack(self.read_indices(torch.tensor(places), self._seed))
        digest = hashlib.sha256(msgspec.msgpack.encode(item))
        for piece in packer.pieces:
            digest.update(piece)
        return digest.hexdigest()


class StreamSource:
    """Batches of an iterable data set: each is given once, in order."""

    is_stream = True
    samples = None

    def __init__(self, dataset: Any, *, batch_size: int, seed: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self.draws = True

    def first(self, samples: int) -> Any:
        """The first samples of the first epoch, as one batch."""
        few = min(samples, self._batch_size)
        _, batch = next(StreamSource(self._dataset, batch_size=few, seed=self._seed).epoch(0))
        return batch

    def epoch(self, epoch: int) -> Iterator[SizedBatch]:
        """Every batch of an epoch, with its number of samples."""
        items = _call(lambda: iter(self._dataset))
        for batch in itertools.count():
            if self.draws:
                seed_everything(batch_seed(self._seed, epoch, batch))
            rows = _call(lambda: list(itertools.islice(items, self._batch_size)))
            if not rows:
                return
            yield len(rows), collate(rows)

    def readers(self, epoch: int) -> Iterator[Callable[[], SizedBatch]]:
        """A function for each batch of an epoch, in order; the batch is read already."""
        batch = None
        for batch in self.epoch(epoch):
            yield lambda given=batch: given  # type: ignore[misc]
        if batch is None:
            raise JobError(
                f"the data set gave no sample in epoch {epoch + 1}",
                code="W5-204",
                fix="__iter__ must start anew each time it is called",
            )


Source = MapSource | StreamSource
# A batch: its epoch, and its number there.
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading begins: at a batch of an epoch; of the batches before it only `also` are read."""

    epoch: int = 0
    batch: int = 0
    also: frozenset[Key] = frozenset()

    @property
    def first_epoch(self) -> int:
        return min([self.epoch, *(epoch for epoch, _ in self.also)])

    def wants(self, key: Key) -> bool:
        return key >= (self.epoch, self.batch) or key in self.also


def open_source(dataset: Any, *, batch_size: int, seed: int, shuffle: bool) -> Source:
    """The source for the result of `data()`; refuses anything that is not a data set."""
    if isinstance(dataset, DataLoader):
        raise JobError(
            "data() returned a DataLoader",
            code="W5-203",
            fix="return its data set; batches are made here, by --batch-size",
        )
    if isinstance(dataset, IterableDataset) or (
        not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__")
    ):
        if iter(dataset) is dataset:
            raise JobError(
                "data() returned an iterator, which can be read only once",
                code="W5-203",
                fix="return an IterableDataset (or any object) whose __iter__ starts anew each epoch",
            )
        return StreamSource(dataset, batch_size=batch_size, seed=seed)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise JobError(
            f"data() returned a {type(dataset).__name__}, which is not a data set",
            code="W5-203",
            fix="return an object with __len__ and __getitem__, or an IterableDataset",
        )
    if _length(dataset) == 0:
        raise JobError("the data set is empty", code="W5-204", fix="data() must return at least one sample")
    return MapSource(dataset, batch_size=batch_size, seed=seed, shuffle=shuffle)


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise JobError(
            f"the length of the data set is not known: {describe(error)}",
            code="W5-203",
            fix="give it a __len__, or make it an IterableDataset",
        ) from error


def _fetch(dataset: Any, chosen: list[int]) -> list[Any]:
    while type(dataset) is Subset:
        chosen = [dataset.indices[i] for i in chosen]
        dataset = dataset.dataset
    many = getattr(dataset, "__getitems__", None)
    return list(many(chosen)) if many is not None else [dataset[i] for i in chosen]


def _call(read: Callable[[], Any]) -> Any:
    """The result of the user's code; an exception in it is reported as a failure of the data set."""
    try:
        return read()
    except Exception as error:
        raise JobError(f"the data set failed: {describe(error)}", code="W5-203") from error


def collate(rows: list[Any]) -> Any:
    """Samples as one batch; errors name the sample of the data set that is wrong."""
    try:
        return default_collate(rows)
    except TypeError as error:
        Packer().pack(rows[0], "a sample of the data set")
        raise JobError(f"samples cannot be put together: {describe(error)}", code="W5-203") from error
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        raise JobError(
            f"the samples of a batch do not fit together: {_find_ragged(rows) or describe(error)}",
            code="W5-204",
            fix="give all samples the same shape in __getitem__ (pad or crop), or use --batch-size 1",
        ) from error


def _find_ragged(rows: list[Any]) -> str:
    """The first member of a sample whose shape differs from that in the first sample."""
    first = dict(_shapes(rows[0], "sample"))
    for row in rows[1:]:
        for where, shape in _shapes(row, "sample"):
            if first.get(where) != shape:
                return f"{where} has shape {first.get(where)} in one and {shape} in another"
    return ""


def _shapes(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The members of a sample and their shapes or lengths."""
    if hasattr(value, "shape"):
        yield where, tuple(value.shape)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _shapes(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        yield where, len(value)
        for i, item in enumerate(value):
            yield from _shapes(item, f"{where}[{i}]")


class WorkerBatches(IterableDataset[Any]):
    """All batches of a run in order, for worker processes.

    Worker w of n reads every n-th batch; torch's loader takes from them in turn, which restores the order.
    """

    def __init__(self, source: Source, epochs: int | None, start: Start) -> None:
        self._source = source
        self._epochs = epochs
        self._start = start

    def __iter__(self) -> Iterator[SizedBatch]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info is not None else (0, 1)
        for read in itertools.islice(
            all_batches(self._source, self._epochs, self._start), number, None, count
        ):
            yield read()


def all_batches(source: Source, epochs: int | None, start: Start) -> Iterator[Callable[[], SizedBatch]]:
    """A function for every batch of every epoch from `start` on, in order, that reads it.

    A stream cannot begin in its middle: its batches before `start` are read and dropped.
    """
    for epoch in itertools.count(start.first_epoch) if epochs is None else range(start.first_epoch, epochs):
        for batch, read in enumerate(source.readers(epoch)):
            if start.wants((epoch, batch)):
                yield read
        if source.is_stream and epoch >= start.epoch:
            yield lambda: (0, None)
