"""The data of a job: what `data()` returns, made into a source by the job's own parts and by the settings.

A DataLoader is taken apart. What the user typed wins over what it says, and is reported; what contradicts
itself is refused. Knows nothing of nodes and of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch.utils.data import DataLoader

from w5xde.config import Settings
from w5xde.errors import JobError, UsageError
from w5xde.learn.data.batch_types import BatchTypes
from w5xde.learn.data.data_loader import LoaderParts, take_apart
from w5xde.learn.data.recipe import Recipe
from w5xde.learn.data.sources import MapSource, Source, open_source
from w5xde.learn.job.job import Job, call
from w5xde.learn.model.seeding import seed_everything


@dataclass(frozen=True, slots=True)
class JobData:
    """A data set, and what the job says about reading it."""

    parts: LoaderParts
    recipe: Recipe
    # Whether `data()` returned a DataLoader.
    is_loader: bool

    @classmethod
    def of(cls, job: Job, seed: int) -> JobData:
        """Call `data()` under this seed."""
        seed_everything(seed)
        returned = call("data()", job.data)
        is_loader = isinstance(returned, DataLoader)
        parts = take_apart(returned) if is_loader else LoaderParts(returned)
        for name, own, loaders in (
            ("collate", job.collate, parts.collate),
            ("sampler", job.sampler, (parts.shuffle or None) if parts.sampler is None else parts.sampler),
        ):
            if own is not None and loaders is not None:
                raise JobError(
                    f"the job has a {name}, and so has the DataLoader that data() returned",
                    code="W5-253",
                    fix=f"leave out one of them: Job({name}=…), or that of the DataLoader",
                )
        if job.sampler is not None:
            # A loader that says nothing about the order has torch's own sampler, which is not used then.
            parts = replace(parts, shuffle=None)
        recipe = Recipe(
            collate=job.collate or parts.collate,
            sampler=job.sampler if job.sampler is not None else parts.sampler,
            types=BatchTypes.of(job),
            workers=parts.workers or 0,
            prepare_worker=parts.prepare_worker,
        )
        return cls(parts, recipe, is_loader)

    def open(self, seed: int, batch_size: int, *, shuffle: bool, drops_last: bool = False) -> Source:
        """The source of batches for these numbers."""
        recipe = replace(self.recipe, drops_last=drops_last)
        dataset = self.parts.dataset
        return open_source(dataset, batch_size=batch_size, seed=seed, shuffle=shuffle, recipe=recipe)


@dataclass(frozen=True, slots=True)
class SettledData:
    """An open source, the settings that it was opened with, and what the user should know about them."""

    source: Source
    settings: Settings
    notes: list[str]


def settle(data: JobData, settings: Settings) -> SettledData:
    """Open a job's data: what the user set wins, then what the DataLoader says, then the defaults.

    Where a sampler decides, the settings that it replaces are None afterwards.
    """
    parts, chosen, notes = data.parts, {}, []
    if data.is_loader:
        notes.append(f"taken over from the DataLoader: {parts.described}")
    for name, said in (
        ("batch_size", parts.batch_size),
        ("shuffle", parts.shuffle),
        ("drop_last", parts.drop_last),
        ("loader_workers", parts.workers),
    ):
        given = _given(settings, name)
        chosen[name] = said if given is None else given
        if given is not None and said is not None and given != said and (said or name != "loader_workers"):
            notes.append(f"{_flag(name, given)} is used, not the DataLoader's {said}")
    if data.recipe.sampler is not None and settings.shuffle is not None:
        raise _contradiction("shuffle", settings.shuffle, "the order is drawn by a sampler")
    if parts.makes_batches and settings.batch_size not in (None, parts.batch_size):
        raise _contradiction("batch_size", settings.batch_size, "the DataLoader gets whole batches")
    settled = msgspec.structs.replace(settings, **chosen)
    source = data.open(
        settled.seed, settled.batch_samples, shuffle=settled.shuffles, drops_last=settled.drops_last
    )
    chosen = {
        "batch_size": settled.batch_samples,
        "shuffle": settled.shuffles if data.recipe.sampler is None else None,
        "drop_last": settled.drops_last,
        "loader_workers": settled.loader_workers or 0,
    }
    if isinstance(source, MapSource):
        source.try_order()
        if source.makes_batches:
            for name in ("batch_size", "drop_last"):
                if _given(settings, name) not in (None, False):
                    raise _contradiction(name, _given(settings, name), "the sampler makes the batches")
            chosen |= {"batch_size": None, "drop_last": None}
    elif (parts.workers or 0) > 1:
        notes.append("a stream comes in one order, so that one process reads it, not more")
    return SettledData(source, msgspec.structs.replace(settled, **chosen), notes)


def _given(settings: Settings, name: str) -> Any:
    return msgspec.structs.asdict(settings)[name]


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def _contradiction(name: str, value: Any, why: str) -> UsageError:
    return UsageError(
        f"{_flag(name, value)} contradicts the job: {why}",
        code="W5-253",
        fix=f"leave out --{name.replace('_', '-')} (also in W5XDE_* and w5xde.toml), or change the job",
    )
