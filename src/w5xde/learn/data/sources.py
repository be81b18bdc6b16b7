"""Data sources: from batch numbers to batches, with the same samples in any process.

A batch is read under its own seed, so that random augmentation gives the same samples wherever it is read.
Knows no sockets, threads or worker processes: the runtime decides where batches are read.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, get_worker_info

from w5xde.errors import JobError
from w5xde.learn.data.epoch_order import ORDER, DrawnEpoch, SampledOrder, draw_shuffled, epoch_listeners
from w5xde.learn.data.payload import Packer, UnreadableBatch
from w5xde.learn.data.recipe import PLAIN, Recipe
from w5xde.learn.job.job import call, describe
from w5xde.learn.model.seeding import seed_everything
from w5xde.tree import batch_seed

# Samples whose bytes make the fingerprint of a data set: enough to notice another order or another file.
FINGERPRINT_SAMPLES = 8

# A batch that cannot be read is tried this often: a disk or a network may fail for once.
READ_ATTEMPTS = 3

# The number of samples in a batch, and the batch or an `UnreadableBatch`; `(0, None)` ends an epoch of a
# stream.
SizedBatch = tuple[int, Any]


class MapSource:
    """Batches of a map-style data set: any batch, at any time, in any process."""

    is_stream = False

    def __init__(
        self, dataset: Any, *, batch_size: int, seed: int, shuffle: bool, recipe: Recipe = PLAIN
    ) -> None:
        self.samples = _length(dataset)
        self.dataset = dataset
        self.batch_size = batch_size
        self.recipe = recipe
        self._seed = seed
        self._shuffle = shuffle
        self._sampled = None if recipe.sampler is None else SampledOrder(recipe.sampler, dataset, seed)
        self._epochs: dict[int, DrawnEpoch] = {}
        self._listeners = epoch_listeners(dataset) if recipe.tells_epochs else []
        self._told = -1
        # Draws an epoch in place of this object, in another process.
        self.draw_elsewhere: Callable[[int], DrawnEpoch | None] = lambda epoch: None
        # Whether reading draws from global generators. If the first batch does not, they are not seeded.
        self.draws = True

    # --- orders -----------------------------------------------------------------------------------

    @property
    def makes_batches(self) -> bool:
        """Whether the sampler makes the batches, whose sizes may differ."""
        return self._sampled is not None and bool(self.epoch(0).stops)

    @property
    def epoch_samples(self) -> int | None:
        """How many samples every epoch counts; None if that may differ from epoch to epoch."""
        if self._sampled is None:
            return self._counted(self.samples)
        return None if self._sampled.length is None or self.makes_batches else self.epoch(0).samples

    def _counted(self, drawn: int) -> int:
        """How many of so many samples are in batches that are not left out."""
        return drawn - drawn % self.batch_size if self.recipe.drops_last else drawn

    @property
    def order_draws(self) -> bool:
        """Whether drawing an order uses the global generators."""
        return self._sampled is not None and self._sampled.draws

    @property
    def order_digest(self) -> str:
        """Differs between two samplers; empty without one."""
        return "" if self._sampled is None else self.epoch(0).digest()

    def try_order(self) -> None:
        """Refuse a sampler that does not always draw the same order, or leaves nothing to train on."""
        if self._sampled is not None:
            self._sampled.try_out()
        self.epoch(0)

    def epoch(self, epoch: int) -> DrawnEpoch:
        """The samples of an epoch, in the order in which it reads them, and its batches."""
        drawn = self._epochs.get(epoch)
        if drawn is None:
            drawn = self.draw_elsewhere(epoch) or self.draw(epoch)
            # Late batches of the epoch before may still be lent again. Replaced whole: a thread that reads
            # batches asks for orders too. The first epoch says how long all of them are.
            kept = {known: each for known, each in self._epochs.items() if known >= epoch - 1 or not known}
            self._epochs = {**kept, epoch: drawn}
        return drawn

    def draw(self, epoch: int) -> DrawnEpoch:
        """Draw the order of an epoch; JobError if it is not one to train on."""
        stops: tuple[int, ...] = ()
        if self._sampled is None:
            indices = draw_shuffled(self.samples, epoch, self._seed, shuffle=self._shuffle)
        else:
            indices, stops = self._sampled.draw(epoch)
        count = len(indices) if stops else self._counted(len(indices))
        if self._sampled is not None and epoch and self.epoch_samples not in (None, count):
            raise JobError(
                f"the sampler gave {len(indices)} samples in epoch {epoch + 1}, and"
                f" {len(self.epoch(0).indices)} in the first",
                code="W5-254",
                fix="let it have no __len__, or use a function of (dataset, epoch, seed): then epochs may"
                " differ",
            )
        if not count:
            raise JobError(
                f"epoch {epoch + 1} has {len(indices)} samples, fewer than a batch of {self.batch_size}, and"
                " drop-last leaves out a batch that is not full",
                code="W5-204",
                fix="use a smaller --batch-size, or --no-drop-last",
            )
        return DrawnEpoch(indices, self.batch_size, count, stops)

    def indices(self, epoch: int, batch: int) -> torch.Tensor:
        """The data set's indices of a batch's samples."""
        drawn = self.epoch(epoch)
        places = drawn.places(batch)
        return drawn.indices[places.start : places.stop]

    # --- reading ----------------------------------------------------------------------------------

    def read(self, epoch: int, batch: int) -> Any:
        return self.read_indices(self.indices(epoch, batch), epoch, batch)

    def try_to_read(self, epoch: int, batch: int) -> SizedBatch:
        """A batch with its number of samples; an `UnreadableBatch` if the data set fails on it."""
        reason, samples = "", len(self.epoch(epoch).places(batch))
        for _ in range(READ_ATTEMPTS):
            try:
                return samples, self.read(epoch, batch)
            except JobError as error:
                reason = error.what
        return samples, UnreadableBatch(reason)

    def first(self, samples: int) -> Any:
        """The first samples of the first epoch, as one batch."""
        return self.read_indices(self.indices(0, 0)[:samples], 0, 0)

    def read_indices(self, indices: torch.Tensor, epoch: int, batch: int) -> Any:
        """The batch of these samples, read as that batch of that epoch."""
        dataset = self.dataset
        # A subclass may do more in its __getitem__.
        if type(dataset) is TensorDataset and self.recipe.collate is None:
            # The result of default_collate at a tenth of its cost; nothing in it is random.
            return [tensor[indices] for tensor in dataset.tensors]
        if self._told != epoch:
            self._told = epoch
            for each in self._listeners:
                call("set_epoch()", each.set_epoch, epoch, code="W5-203")
        if self.draws:
            seed_everything(batch_seed(self._seed, epoch, batch))
        return self.recipe.make(call("the data set", _fetch, dataset, indices.tolist(), code="W5-203"))

    def readers(self, epoch: int) -> Iterator[Callable[[], SizedBatch]]:
        """A function for each batch of an epoch, in order, that reads it."""
        drawn = self.epoch(epoch)
        for batch in range(drawn.batches):
            yield lambda b=batch: (len(drawn.places(b)), self.read(epoch, b))  # type: ignore[misc]

    def fingerprint(self) -> str:
        """Differs between two data sets, most likely, without reading all of them."""
        last = self.samples - 1
        places = sorted({last * i // max(1, FINGERPRINT_SAMPLES - 1) for i in range(FINGERPRINT_SAMPLES)})
        packer = Packer(self.recipe.types)
        item = packer.pack(self.read_indices(torch.tensor(places), 0, ORDER))
        digest = hashlib.sha256(msgspec.msgpack.encode(item))
        for piece in packer.pieces:
            digest.update(piece)
        return digest.hexdigest()


class StreamSource:
    """Batches of an iterable data set: each is given once, in order."""

    is_stream = True
    samples = None
    epoch_samples = None
    order_digest = ""

    def __init__(self, dataset: Any, *, batch_size: int, seed: int, recipe: Recipe = PLAIN) -> None:
        self._dataset = dataset
        self.batch_size = batch_size
        self.recipe = recipe
        self._seed = seed
        self._listeners = epoch_listeners(dataset)
        self.draws = True

    def first(self, samples: int) -> Any:
        """The first samples of the first epoch, as one batch."""
        few = min(samples, self.batch_size)
        alike = StreamSource(
            self._dataset, batch_size=few, seed=self._seed, recipe=replace(self.recipe, drops_last=False)
        )
        _, batch = next(alike.epoch(0))
        return batch

    def epoch(self, epoch: int) -> Iterator[SizedBatch]:
        """Every batch of an epoch, with its number of samples."""
        for each in self._listeners:
            call("set_epoch()", each.set_epoch, epoch, code="W5-203")
        items = call("the data set", iter, self._dataset, code="W5-203")
        for batch in itertools.count():
            if self.draws:
                seed_everything(batch_seed(self._seed, epoch, batch))
            few = itertools.islice(items, self.batch_size)
            rows = call("the data set", list, few, code="W5-203")
            if not rows or (self.recipe.drops_last and len(rows) < self.batch_size):
                return
            yield len(rows), self.recipe.make(rows)

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


def open_source(dataset: Any, *, batch_size: int, seed: int, shuffle: bool, recipe: Recipe = PLAIN) -> Source:
    """The source for a data set; refuses anything that is not one. A DataLoader is taken apart before."""
    if isinstance(dataset, DataLoader):
        raise JobError(
            "the data set is a DataLoader, whose batches would be put together again",
            code="W5-203",
            fix="give the data set of that loader, or return the loader itself from data()",
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
        if recipe.sampler is not None:
            raise JobError(
                "the data set is iterable, and a sampler draws numbers of samples",
                code="W5-254",
                fix="leave the sampler out, or return a data set with __len__ and __getitem__",
            )
        return StreamSource(dataset, batch_size=batch_size, seed=seed, recipe=recipe)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise JobError(
            f"data() returned a {type(dataset).__name__}, which is not a data set",
            code="W5-203",
            fix="return an object with __len__ and __getitem__, an IterableDataset, or a DataLoader",
        )
    if _length(dataset) == 0:
        raise JobError("the data set is empty", code="W5-204", fix="data() must return at least one sample")
    return MapSource(dataset, batch_size=batch_size, seed=seed, shuffle=shuffle, recipe=recipe)


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


class WorkerEpochs(IterableDataset[Any]):
    """The orders of all epochs from `first` on, for a process in which nothing else draws random numbers."""

    def __init__(self, source: MapSource, first: int) -> None:
        self._source = source
        self._first = first

    def __iter__(self) -> Iterator[tuple[int, DrawnEpoch]]:
        return ((epoch, self._source.draw(epoch)) for epoch in itertools.count(self._first))


def all_batches(source: Source, epochs: int | None, start: Start) -> Iterator[Callable[[], SizedBatch]]:
    """A function for every batch of every epoch from `start` on, in order, that reads it.

    A stream cannot begin in its middle: its batches before `start` are read and dropped. Nor can it go on
    behind a sample that fails: then it raises, where a map-style data set gives an `UnreadableBatch`.
    """
    for epoch in itertools.count(start.first_epoch) if epochs is None else range(start.first_epoch, epochs):
        for batch, read in enumerate(source.readers(epoch)):
            if start.wants((epoch, batch)):
                yield read if isinstance(source, StreamSource) else partial(source.try_to_read, epoch, batch)
        if source.is_stream and epoch >= start.epoch:
            yield lambda: (0, None)
