"""The validation set of a job: its batches, what is measured in them, and a trial of the first one.

Knows nothing of nodes: what they measure, the coordinator can measure too, with the same result.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from w5xde.config import Settings
from w5xde.errors import JobError
from w5xde.learn.data.data_loader import LoaderParts, take_apart
from w5xde.learn.data.payload import ReadBatch, UnreadableBatch, pack_batch
from w5xde.learn.data.recipe import Recipe
from w5xde.learn.data.sources import READ_ATTEMPTS, MapSource, open_source
from w5xde.learn.job.job import Job, call, describe
from w5xde.learn.model.seeding import DrawnFrom, as_before, seed_everything
from w5xde.learn.train.measuring import (
    SEED_EPOCH,
    Measure,
    in_order,
    measure_batch,
    metrics_of,
    weighted_means,
)
from w5xde.message_types import METRICS_MAX
from w5xde.tree import batch_seed

MEASURE_FIX = (
    "measure(model, batch) must return a dict of numbers, each the mean over the samples of the batch"
)


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """A validation set and what is measured in it."""

    source: MapSource
    measure: Measure
    # The names of the metrics, in the order in which they travel.
    names: list[str]
    # The number of samples in each batch.
    sizes: tuple[int, ...]
    seed: int
    is_bf16: bool
    # How long reading a batch takes.
    read_seconds: float

    def read(self, number: int) -> Any:
        """A batch. Leaves the global generators as they are: the training may draw from them."""
        if not self.source.draws:
            return read_batch(self.source, self.indices(number), number)
        with as_before():
            return read_batch(self.source, self.indices(number), number)

    def indices(self, number: int) -> Tensor:
        """The samples of a batch, by their numbers in the data set."""
        return self.source.indices(0, number)

    def pack(self, number: int) -> ReadBatch:
        """A batch, ready to be sent; or why it cannot be."""
        reason = ""
        for _ in range(READ_ATTEMPTS):
            try:
                return pack_batch(self.sizes[number], self.read(number), self.source.recipe.types)
            except JobError as error:
                reason = error.what
        return UnreadableBatch(reason)

    def means(self, rows: list[list[float]]) -> dict[str, float]:
        """The metrics of the whole set, from those of each batch."""
        return dict(zip(self.names, weighted_means(self.sizes, rows), strict=True))

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Measure all batches here."""
        rows = []
        with as_before():
            for number in range(len(self.sizes)):
                found = measure_batch(
                    self.measure,
                    module,
                    self.read(number),
                    seed=self.seed,
                    number=number,
                    is_bf16=self.is_bf16,
                )
                rows.append(in_order(found, self.names))
        return self.means(rows)


def read_batch(source: MapSource, indices: Tensor, number: int) -> Any:
    """A batch of a validation set: these samples, read under the seed of the batch."""
    return source.read_indices(indices, SEED_EPOCH, number)


def open_validation(job: Job, training: Recipe, seed: int, batch_size: int) -> MapSource | None:
    """The source of the job's validation batches; None if it has no validation set.

    A DataLoader is taken apart, as that of the training is. Without a collate function of its own, samples
    are put together as those of the training are.
    """
    if job.validation is None:
        return None
    seed_everything(seed)
    returned = call("validation()", job.validation)
    try:
        parts = take_apart(returned) if isinstance(returned, DataLoader) else LoaderParts(returned)
        # In its own order, whether the loader shuffles or not: a mean does not depend on it.
        recipe = Recipe(
            collate=parts.collate or training.collate,
            sampler=parts.sampler,
            drops_last=bool(parts.drop_last),
            types=training.types,
            tells_epochs=False,
        )
        source = open_source(
            parts.dataset, batch_size=parts.batch_size or batch_size, seed=seed, shuffle=False, recipe=recipe
        )
        if isinstance(source, MapSource):
            source.try_order()
            return source
    except JobError as error:
        raise JobError(
            f"validation() returned no validation set: {error.what}",
            code="W5-267",
            fix="return a data set with at least one sample, or a DataLoader of one",
        ) from error
    raise JobError(
        "validation() returned an iterable data set, whose batches cannot be lent twice",
        code="W5-267",
        fix="return a data set with __len__ and __getitem__",
    )


def build_validation(
    job: Job, module: nn.Module, training: Recipe, settings: Settings
) -> ValidationSet | None:
    """The job's validation set, whose first batch is tried on a model that nothing else uses."""
    with as_before():
        source = open_validation(job, training, settings.seed, settings.batch_samples)
        if source is None or job.measure is None:
            return None
        seed_everything(batch_seed(settings.seed, SEED_EPOCH, 0))
        drawn, begun = DrawnFrom(), time.perf_counter()
        # Not seeded, so that drawing shows; the seed is that of the batch all the same.
        source.draws = False
        batch = read_batch(source, source.indices(0, 0), 0)
        seconds = time.perf_counter() - begun
        source.draws = drawn.torch or drawn.python or drawn.numpy
        epoch = source.epoch(0)
        # Refuses what cannot be sent.
        pack_batch(len(epoch.places(0)), batch, source.recipe.types)
        names = _try_measure(job.measure, module, batch, settings)
    sizes = tuple(len(epoch.places(number)) for number in range(epoch.batches))
    return ValidationSet(
        source, job.measure, names, sizes, settings.seed, settings.precision == "bf16", seconds
    )


def _try_measure(measure: Measure, module: nn.Module, batch: Any, settings: Settings) -> list[str]:
    """The names of what is measured, from the first batch on the untrained model."""
    is_bf16 = settings.precision == "bf16"
    try:
        found = measure_batch(measure, module, batch, seed=settings.seed, number=0, is_bf16=is_bf16)
    except Exception as error:
        raise JobError(
            f"measure() failed on the untrained model: {describe(error)}", code="W5-267", fix=MEASURE_FIX
        ) from error
    if not 0 < len(found) <= METRICS_MAX:
        raise JobError(
            f"measure() returned {len(found)} numbers, and 1 to {METRICS_MAX} can be sent",
            code="W5-267",
            fix=MEASURE_FIX,
        )
    return sorted(metrics_of(found))
