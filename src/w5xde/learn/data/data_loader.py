"""Takes a torch DataLoader apart: what of it a run takes over, and what cannot be taken over.

A DataLoader says how a plain loop would read the data. Here batches are read by number, wherever they are
needed, so that its parts are used and not the loader itself. Knows no settings and no job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from w5xde.errors import JobError


@dataclass(frozen=True, slots=True)
class LoaderParts:
    """What a DataLoader says; None: nothing."""

    dataset: Any
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    workers: int | None = None
    # Draws the order, or batches of it; None: every sample once.
    sampler: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    prepare_worker: Callable[[int], object] | None = None
    # Whether the data set, or the sampler, makes the batches, so that no setting can change their size.
    makes_batches: bool = False

    @property
    def described(self) -> str:
        """A phrase that says what is taken over."""
        size = "the batches of its sampler" if self.batch_size is None else f"batches of {self.batch_size}"
        order = {True: "shuffled", False: "in order", None: ""}[self.shuffle]
        named = type(self.sampler).__name__ if self.sampler is not None else order
        last = "the last one dropped if it is not full" if self.drop_last else ""
        workers = f"{self.workers} worker{'s' * (self.workers != 1)}" if self.workers else ""
        collate = "its collate_fn" if self.collate is not None else ""
        return ", ".join(filter(None, [size, named, last, collate, workers]))


def take_apart(loader: DataLoader[Any]) -> LoaderParts:
    """The parts of a DataLoader; JobError if it reads in a way that they do not show."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise JobError(
            f"data() returned a {type(loader).__name__}, which reads in a way of its own (__iter__)",
            code="W5-253",
            why="of a DataLoader its data set, sampler, collate function and numbers are used, not its loop",
            fix="return torch's own DataLoader, or the data set, and do the rest in Job(collate=…)",
        )
    parts: dict[str, Any] = {
        "dataset": loader.dataset,
        "workers": loader.num_workers,
        "prepare_worker": loader.worker_init_fn,
    }
    if loader.batch_size is None and loader.batch_sampler is None:
        # Each item of the data set is a batch already.
        convert = loader.collate_fn
        parts |= {"batch_size": 1, "makes_batches": True, "collate": lambda rows: convert(rows[0])}
    else:
        parts["collate"] = None if loader.collate_fn is default_collate else loader.collate_fn
    if loader.batch_size is not None:
        parts |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        return LoaderParts(**parts, sampler=loader.batch_sampler, makes_batches=True)
    return LoaderParts(**parts) if isinstance(loader.dataset, IterableDataset) else _with_order(loader, parts)


def _with_order(loader: DataLoader[Any], parts: dict[str, Any]) -> LoaderParts:
    """The parts with the order: ours where the loader's is the usual one, else that of its sampler."""
    sampler = loader.sampler
    is_random = type(sampler) is RandomSampler and not sampler.replacement
    # The numbers of samples that a sampler draws are those of its own source, which may be a shorter list.
    if is_random and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return LoaderParts(**parts, shuffle=True)
    if type(sampler) is SequentialSampler and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return LoaderParts(**parts, shuffle=False)
    return LoaderParts(**parts, sampler=sampler)
