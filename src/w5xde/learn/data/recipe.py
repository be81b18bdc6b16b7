"""Recipes: how samples become batches. Errors of the user's code name the sample that is wrong.

Knows neither data sets nor the order in which samples are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from w5xde.errors import JobError
from w5xde.learn.data.batch_types import NO_TYPES, BatchTypes
from w5xde.learn.data.payload import Packer
from w5xde.learn.job.job import call, describe


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a job makes batches from samples, besides their number."""

    # Makes a batch from a list of samples; None: as torch's default_collate does.
    collate: Callable[[list[Any]], Any] | None = None
    # Draws the order of an epoch; None: every sample once.
    sampler: Any = None
    # Whether a last batch that is not full is left out.
    drops_last: bool = False
    # The types that batches may be made of, if they travel.
    types: BatchTypes = NO_TYPES
    # How many processes read batches in a plain loop; and what is called in each, with its number.
    workers: int = 0
    prepare_worker: Callable[[int], object] | None = None
    # Whether the data set is told in which epoch it is read, if it wants to know (`set_epoch`).
    tells_epochs: bool = True

    def make(self, rows: list[Any]) -> Any:
        """The batch of these samples."""
        return collate(rows) if self.collate is None else call("collate()", self.collate, rows, code="W5-252")


PLAIN = Recipe()


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
            fix="pad them in Job(collate=…), give all the same shape in __getitem__, or use --batch-size 1",
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
