"""Orders: which samples an epoch reads, one after another, and where its batches begin.

An order is a function of the epoch and the run's seed alone, so that it is the same in every process, in
every life of the run, and whenever it is drawn again. A sample may come several times in an epoch, or never:
what counts once is its place in the order. Knows how to draw from torch's samplers and from a function of the
job; does not read samples.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DistributedSampler, Sampler, Subset

from w5xde.errors import JobError
from w5xde.learn.job.job import describe
from w5xde.learn.model.seeding import DrawnFrom, as_before, seed_everything
from w5xde.tree import batch_seed

# Takes the place of a batch's number in the seed of an order.
ORDER = -1
# A sampler that gives more than this has no end: so many times each sample, and some more of small data sets.
REPEATED_MAX, DRAWN_MAX = 1000, 1_000_000


@dataclass(frozen=True, slots=True)
class DrawnEpoch:
    """The samples of one epoch by their numbers in the data set, in the order in which it reads them."""

    indices: Tensor
    batch_size: int
    # How many of them are in a batch: not those of a last one that is left out.
    samples: int
    # Where each batch ends, if the sampler has made the batches.
    stops: tuple[int, ...] = ()

    @property
    def batches(self) -> int:
        return len(self.stops) or -(-self.samples // self.batch_size)

    def places(self, batch: int) -> range:
        """The places of a batch's samples in the order."""
        if self.stops:
            return range(self.stops[batch - 1] if batch else 0, self.stops[batch])
        start = batch * self.batch_size
        return range(start, min(start + self.batch_size, self.samples))

    def digest(self) -> str:
        """Differs between two orders."""
        found = hashlib.sha256(self.indices.numpy().tobytes())
        found.update(np.array(self.stops, np.int64).tobytes())
        return found.hexdigest()


def draw_shuffled(samples: int, epoch: int, seed: int, *, shuffle: bool) -> Tensor:
    """The order without a sampler: every sample once."""
    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed(batch_seed(seed, epoch, ORDER))
    return torch.randperm(samples, generator=generator)


class SampledOrder:
    """The orders that a sampler of the job draws: a Sampler, or a function of (data set, epoch, seed)."""

    def __init__(self, sampler: Any, dataset: Any, seed: int) -> None:
        self._sampler = sampler
        self._dataset = dataset
        self._seed = seed
        self._is_function = not hasattr(sampler, "__iter__")
        # Whether drawing uses the global generators, as far as is known.
        self.draws = True
        for each in _samplers_in(sampler):
            if isinstance(each, DistributedSampler) and each.num_replicas > 1:
                raise JobError(
                    "a DistributedSampler gives each process a part of the data, and here the coordinator"
                    " shares the batches among the nodes",
                    code="W5-254",
                    fix="leave it out: DataLoader(…, shuffle=True), or return the data set itself",
                )

    @property
    def length(self) -> int | None:
        """How many samples every epoch has; None if that may differ from epoch to epoch."""
        try:
            return len(self._sampler)
        except (TypeError, NotImplementedError):
            return None

    def draw(self, epoch: int) -> tuple[Tensor, tuple[int, ...]]:
        """The numbers of an epoch's samples; and where each batch ends, if the sampler makes batches."""
        seed = batch_seed(self._seed, epoch, ORDER)
        if not self.draws:
            return self._ask(epoch, seed)
        with as_before():
            seed_everything(seed)
            return self._ask(epoch, seed)

    def try_out(self) -> None:
        """Require that the order of an epoch is always the same, and find out how it is drawn."""
        with as_before():
            seed_everything(batch_seed(self._seed, 0, ORDER))
            drawn = DrawnFrom()
            first, stops = self._ask(0, batch_seed(self._seed, 0, ORDER))
            self.draws = drawn.torch or drawn.python or drawn.numpy
        self.draw(1)
        again, again_stops = self.draw(0)
        if not torch.equal(first, again) or stops != again_stops:
            raise JobError(
                "the sampler draws another order each time for the same epoch and seed",
                code="W5-254",
                why="every process, and a run that is resumed, must find the same samples in the same place",
                fix="pass sampler=f, a function f(dataset, epoch, seed) that draws from the seed it is given",
            )

    def _ask(self, epoch: int, seed: int) -> tuple[Tensor, tuple[int, ...]]:
        samples = len(self._dataset)
        most = REPEATED_MAX * samples + DRAWN_MAX
        try:
            numbers, stops = _read(self._draw_from(epoch, seed), most)
        except Exception as error:
            raise JobError(
                f"the sampler failed in epoch {epoch + 1}: {describe(error)}",
                code="W5-254",
                fix="a sampler gives the numbers of samples (0, 1, …), or lists of them, one for each batch",
            ) from error
        wrong = _find_wrong(numbers, stops, samples, most)
        if wrong:
            raise JobError(
                f"the sampler gave {wrong} in epoch {epoch + 1}",
                code="W5-254",
                fix=f"give numbers of samples, from 0 to {samples - 1}, at least one in each epoch",
            )
        return torch.tensor(numbers, dtype=torch.int64), stops

    def _draw_from(self, epoch: int, seed: int) -> Any:
        if self._is_function:
            return self._sampler(self._dataset, epoch, seed)
        _prepare(self._sampler, epoch, seed)
        return self._sampler


def _read(drawn: Any, most: int) -> tuple[list[int], tuple[int, ...]]:
    """The numbers that were drawn, at most one too many; and where batches end, if these are batches."""
    given = drawn.tolist() if hasattr(drawn, "tolist") else list(islice(drawn, most + 1))
    if not given or not isinstance(given[0], Iterable) or getattr(given[0], "ndim", 1) == 0:
        return [operator.index(each) for each in given], ()
    batches = [[operator.index(each) for each in batch] for batch in given]
    return [each for batch in batches for each in batch], tuple(accumulate(map(len, batches)))


def _find_wrong(numbers: list[int], stops: tuple[int, ...], samples: int, most: int) -> str:
    if not numbers:
        return "no sample"
    if len(numbers) > most:
        return f"more than {most:,} samples, so that it seems to have no end,"
    if any(stop == start for start, stop in pairwise((0, *stops))):
        return "an empty batch"
    outside = [number for number in (min(numbers), max(numbers)) if not 0 <= number < samples]
    return f"{outside[0]}, which is no sample of the {samples}," if outside else ""


def _prepare(sampler: Any, epoch: int, seed: int) -> None:
    """Tell a sampler, and those inside it, the epoch, and let each draw from the seed of its order."""
    for each in _samplers_in(sampler):
        set_epoch = getattr(each, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        if isinstance(getattr(each, "generator", 0), torch.Generator | None):
            each.generator = torch.Generator().manual_seed(seed)


def _samplers_in(sampler: Any) -> Iterator[Any]:
    """A sampler, and the samplers that it draws from."""
    found = sampler
    while found is not None:
        yield found
        inner = getattr(found, "sampler", None)
        found = inner if isinstance(inner, Sampler) and inner is not found else None


def epoch_listeners(dataset: Any) -> list[Any]:
    """The data sets, in this one, that want to know in which epoch they are read."""
    if hasattr(dataset, "set_epoch"):
        return [dataset]
    if isinstance(dataset, Subset):
        return epoch_listeners(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [each for part in dataset.datasets for each in epoch_listeners(part)]
    return []
