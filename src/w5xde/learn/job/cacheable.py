"""Whether nodes may keep the samples of a data set, and the form that samples have.

Kept samples are used again in later epochs, so they must be the same whenever they are read, and with
whatever other samples. Reads a few samples twice to see that. Knows nothing of nodes and files.
"""

from __future__ import annotations

import torch

from w5xde.config import Settings
from w5xde.errors import JobError
from w5xde.learn.data.payload import pack_batch
from w5xde.learn.data.samples import NUMBERED_MAX, SampleFormat
from w5xde.learn.data.sources import MapSource, Source
from w5xde.learn.model.seeding import as_before, seed_everything
from w5xde.message_types import DIGEST_BYTES

# Samples that are read twice: enough to notice augmentation that no global generator shows.
TRIED_SAMPLES = 16
# A number and its share of the hash of a batch take about six bytes: less than 1 % of this.
AUTO_SAMPLE_BYTES = 1024


def sample_format(source: Source, settings: Settings) -> SampleFormat | None:
    """The form of the samples that nodes keep; None if every batch is sent whole.

    With `--data cached` a data set that cannot be kept is refused; with `auto` it is sent whole.
    """
    if settings.data not in ("cached", "auto"):
        return None
    try:
        form = _require_cacheable(source, settings)
    except JobError:
        if settings.data == "cached":
            raise
        return None
    return form if settings.data == "cached" or _is_worth_it(source, form, settings) else None


def slots_for(form: SampleFormat, samples: int, cache_bytes: int) -> int:
    """How many samples have room in a cache of this size."""
    return min(samples, cache_bytes // (form.sample_bytes + DIGEST_BYTES))


def _is_worth_it(source: Source, form: SampleFormat, settings: Settings) -> bool:
    samples = source.samples or 0
    is_large = form.sample_bytes >= AUTO_SAMPLE_BYTES
    has_room = slots_for(form, samples, settings.cache_bytes) == samples
    planned = settings.steps * settings.step_batches * source.batch_size if settings.steps else samples + 1
    return is_large and has_room and settings.epoch_limit != 1 and planned > samples


def _require_cacheable(source: Source, settings: Settings) -> SampleFormat:
    if not isinstance(source, MapSource):
        raise JobError(
            "--data cached needs a map-style data set, and data() returned an iterable one",
            code="W5-204",
            fix="use --data stream, or return a data set with __len__ and __getitem__",
        )
    if source.draws:
        raise _uncacheable(
            "the data set draws random numbers while it is read, so samples are never the same"
        )
    if source.samples >= NUMBERED_MAX:
        raise _uncacheable(f"the data set has {source.samples} samples, too many to number them")
    with as_before():
        form = _compare(source)
    if form.sample_bytes + DIGEST_BYTES > settings.cache_bytes:
        raise JobError(
            f"a sample takes {form.sample_bytes:,} bytes, and --cache-bytes is {settings.cache_bytes:,}",
            code="W5-251",
            fix="make it larger, or use --data stream",
        )
    return form


def _compare(source: MapSource) -> SampleFormat:
    """Read some samples twice: in another epoch, in another order, and without one of them."""
    order, types = source.epoch(0).indices, source.recipe.types
    places = {(len(order) - 1) * i // (TRIED_SAMPLES - 1) for i in range(TRIED_SAMPLES)}
    chosen = order[torch.tensor(sorted(places))]
    again = chosen.flip(0)[: max(1, len(chosen) - 1)]
    # Other generators, in case they are drawn from all the same.
    seed_everything(0)
    first = pack_batch(len(chosen), source.read_indices(chosen, 0, 0), types)
    seed_everything(1)
    second = pack_batch(len(again), source.read_indices(again, 1, 0), types)
    form = SampleFormat.of(first.item, len(chosen))
    if form is None:
        raise _uncacheable("samples hold more than tensors and numbers, or have no bytes of their own")
    rows, others = form.split(first), form.split(second)
    if rows is None or others is None:
        raise _uncacheable("samples do not have the same shape in every batch")
    if not (rows[::-1][: len(others)] == others).all():
        raise _uncacheable("the data set gives another sample each time the same one is read")
    return form


def _uncacheable(what: str) -> JobError:
    return JobError(
        what,
        code="W5-250",
        why="nodes keep samples and use them again in later epochs (--data cached)",
        fix="use --data stream, which also reads random augmentation anew in each epoch",
    )
