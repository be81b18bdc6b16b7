"""Data: from batch numbers to batches, the same whoever reads them.

A batch is read under its own seed, so that random augmentation gives the same samples in any process.
Knows no sockets; threads and worker processes around it are the runtime's business.
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
        # Whether reading draws from global generators. The trial finds out; if not, they are left alone.
        self.draws = True

    def indices(self, epoch: int, batch: int) -> torch.Tensor:
        start = batch * self._batch_size
        return self.order(epoch)[start : start + self._batch_size]

    def read(self, epoch: int, batch: int) -> Any:
        return self.read_indices(self.indices(epoch, batch), batch_seed(self._seed, epoch, batch))

    def first(self, samples: int) -> Any:
        """The first samples of the first epoch, as one batch."""
        return self.read_indices(self.indices(0, 0)[:samples], batch_seed(self._seed, 0, 0))

    def read_indices(self, indices: torch.Tensor, seed: int) -> Any:
        """The batch of these samples, read under this seed."""
        dataset = self.dataset
        if type(dataset) is TensorDataset:  # a subclass may do more in its __getitem__
            # What default_collate would give, at a tenth of the cost; nothing random in it.
            return [tensor[indices] for tensor in dataset.tensors]
        if self.draws:
            seed_everything(seed)
        chosen = indices.tolist()
        return collate(_read(lambda: _fetch(dataset, chosen)))

    def order(self, epoch: int) -> torch.Tensor:
        """The samples of an epoch, in the order in which they are read."""
        order = self._orders.get(epoch)
        if order is None:
            if self._shuffle:
                generator = torch.Generator().manual_seed(batch_seed(self._seed, epoch, -1))
                order = torch.randperm(self.samples, generator=generator)
            else:
                order = torch.arange(self.samples)
            # Late batches of the epoch before may still be lent again.
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = order
        return order

    def fingerprint(self) -> str:
        """Tells two copies of the data apart, without reading all of it."""
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

    def epoch(self, epoch: int) -> Iterator[tuple[int, Any]]:
        """`(samples, batch)` for each batch of an epoch."""
        items = _read(lambda: iter(self._dataset))
        batch = 0
        while True:
            if self.draws:
                seed_everything(batch_seed(self._seed, epoch, batch))
            rows = _read(lambda: list(itertools.islice(items, self._batch_size)))
            if not rows:
                return
            yield len(rows), collate(rows)
            batch += 1


Source = MapSource | StreamSource
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading begins: at a batch of an epoch, and of what lies before it these batches only."""

    epoch: int = 0
    batch: int = 0
    also: frozenset[Key] = frozenset()

    @property
    def first_epoch(self) -> int:
        return min([self.epoch, *(epoch for epoch, _ in self.also)])

    def wants(self, key: Key) -> bool:
        return key >= (self.epoch, self.batch) or key in self.also


def open_source(dataset: Any, *, batch_size: int, seed: int, shuffle: bool) -> Source:
    """The source for whatever `data()` returned; refuses what is not a data set."""
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


def _read(call: Callable[[], Any]) -> Any:
    """Whatever the user's data set raises is told as its own failure."""
    try:
        return call()
    except Exception as error:
        raise JobError(f"the data set failed: {describe(error)}", code="W5-203") from error


def collate(rows: list[Any]) -> Any:
    """Samples as one batch; what goes wrong is told in the words of the data set."""
    try:
        return default_collate(rows)
    except TypeError as error:
        Packer().pack(rows[0], "a sample of the data set")
        raise JobError(f"samples cannot be put together: {describe(error)}", code="W5-203") from error
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        raise JobError(
            f"the samples of a batch do not fit together: {_ragged(rows) or describe(error)}",
            code="W5-204",
            fix="give all samples the same shape in __getitem__ (pad or crop), or use --batch-size 1",
        ) from error


def _ragged(rows: list[Any]) -> str:
    """The first two samples whose tensors differ in shape, named."""

    def shapes(value: Any, where: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor) or hasattr(value, "shape"):
            yield where, tuple(value.shape)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from shapes(item, f"{where}[{key!r}]")
        elif isinstance(value, (list, tuple)):
            yield where, len(value)
            for i, item in enumerate(value):
                yield from shapes(item, f"{where}[{i}]")

    first = dict(shapes(rows[0], "sample"))
    for row in rows[1:]:
        for where, shape in shapes(row, "sample"):
            if first.get(where) != shape:
                return f"{where} has shape {first.get(where)} in one and {shape} in another"
    return ""


class WorkerBatches(IterableDataset[Any]):
    """All batches of a run in order, for worker processes: `(samples, batch)`, `(0, None)` ends an epoch.

    Worker w of n reads every n-th batch; torch's loader takes from them in turn, which restores the order.
    """

    def __init__(self, source: Source, batch_size: int, epochs: int | None, start: Start) -> None:
        self._source = source
        self._batch_size = batch_size
        self._epochs = epochs
        self._start = start

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info is not None else (0, 1)
        for at, given in enumerate(all_batches(self._source, self._batch_size, self._epochs, self._start)):
            if at % count == number:
                yield given()


def all_batches(
    source: Source, batch_size: int, epochs: int | None, start: Start
) -> Iterator[Callable[[], tuple[int, Any]]]:
    """Every batch of every epoch from `start` on, in order, each to be read when it is called for."""
    for epoch in itertools.count(start.first_epoch) if epochs is None else range(start.first_epoch, epochs):
        if isinstance(source, MapSource):
            batches = -(-source.samples // batch_size)
            for batch in range(batches):
                samples = min(batch_size, source.samples - batch * batch_size)
                if start.wants((epoch, batch)):
                    yield lambda e=epoch, b=batch, n=samples: (n, source.read(e, b))  # type: ignore[misc]
            continue
        batch = -1
        for batch, given in enumerate(source.epoch(epoch)):
            # A stream cannot begin in its middle: what is not wanted is read and dropped.
            if start.wants((epoch, batch)):
                yield lambda given=given: given  # type: ignore[misc]
        if batch < 0:
            raise JobError(
                f"the data set gave no sample in epoch {epoch + 1}",
                code="W5-204",
                fix="__iter__ must start anew each time it is called",
            )
        if epoch >= start.epoch:
            yield lambda: (0, None)
