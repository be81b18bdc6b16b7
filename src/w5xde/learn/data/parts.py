"""The parts of a call: splits a batch that the user's own loop has, along the first dimension of its tensors.

The number of rows and of parts alone decides who gets which rows, so that the result of a call does not
depend on its nodes. Knows no losses, nodes or seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from w5xde.errors import UsageError
from w5xde.learn.data.batch_types import NO_TYPES, BatchTypes
from w5xde.learn.data.payload import Packed
from w5xde.learn.data.recipe import Recipe
from w5xde.learn.data.sources import Key, SizedBatch, StreamSource
from w5xde.learn.job.pool_job import PARTS_MAX
from w5xde.learn.model.containers import record_fields, record_parts, with_parts


class Part(NamedTuple):
    """A part of a batch, and how many samples it counts for in the mean."""

    samples: int
    value: Any


class PartSource(StreamSource):
    """The parts that a caller gives: the first for trials, and those of the call under way, packed."""

    def __init__(self, first: Part, types: BatchTypes = NO_TYPES) -> None:
        super().__init__(None, batch_size=1, seed=0, recipe=Recipe(types=types))
        self.draws = False
        self._first: Part | None = first
        self.packed: dict[Key, Packed] = {}

    def forget_first(self) -> None:
        """The trials are over."""
        self._first = None

    def epoch(self, epoch: int) -> Iterator[SizedBatch]:
        if self._first is not None:
            yield self._first

    def first(self, samples: int) -> Any:
        """The first rows of the first part; all of it if it cannot be divided."""
        value = self._first.value if self._first is not None else None
        try:
            rows = _rows(value, "the part")
        except UsageError:
            return value
        return _take(value, rows, range(min(rows, samples))) if rows else value


def make_parts(batch: Any, parts: Any, samples: Any) -> list[Part]:
    """Split a batch into this many parts; without a number, a list of parts as they are.

    `samples`: how many samples each of these parts counts for; by default as many as its tensors have rows,
    or one if it has no tensor.
    """
    if parts is not None:
        if samples is not None:
            raise _unfit("samples= is for parts that are given one by one", "leave out parts=, or samples=")
        return _split(batch, parts)
    if not isinstance(batch, list) or not batch:
        what = "an empty list" if isinstance(batch, list) else f"a {type(batch).__name__}"
        raise _unfit(f"the batch is {what}, and parts= is not given", _SAY_PARTS)
    if len({_form(part) for part in batch}) > 1:
        raise _unfit("the items of this list are not alike, so they are not parts of one batch", _SAY_PARTS)
    if samples is None:
        samples = [_rows(part, f"part {i}") or 1 for i, part in enumerate(batch)]
    counts = list(samples)
    if len(counts) != len(batch) or not all(isinstance(n, int) and n > 0 for n in counts):
        raise _unfit(
            f"samples={counts!r} for {len(batch)} parts", "give a whole number above 0 for each part"
        )
    _require_count(len(batch))
    return [Part(count, part) for count, part in zip(counts, batch, strict=True)]


def _split(batch: Any, parts: Any) -> list[Part]:
    if not isinstance(parts, int) or parts < 1:
        raise _unfit(f"parts={parts!r}", _SAY_PARTS)
    rows = _rows(batch, "the batch")
    if not rows:
        raise _unfit(
            "the batch has no tensor with rows to divide",
            "give parts one by one, in a list:  pool.backward([part, part], …)",
        )
    # A last batch may have fewer rows than there are parts.
    count = min(parts, rows)
    _require_count(count)
    size, longer = divmod(rows, count)
    found, start = [], 0
    for place in range(count):
        stop = start + size + (place < longer)
        found.append(Part(stop - start, _take(batch, rows, range(start, stop))))
        start = stop
    return found


def _take(value: Any, rows: int, chosen: range) -> Any:
    """These rows of a batch of so many rows; what has no rows goes with every part."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value[chosen.start : chosen.stop] if value.ndim else value
    # What default_collate makes of strings: one for each sample.
    is_list = type(value) in (list, tuple) and len(value) == rows
    if is_list and all(isinstance(item, str) for item in value):
        return value[chosen.start : chosen.stop]
    return with_parts(value, lambda part: _take(part, rows, chosen))


def _rows(value: Any, where: str) -> int:
    """The number of rows that all tensors of a value have; 0 if it has no tensor with rows."""
    found = dict(_row_counts(value, where))
    if len(set(found.values())) > 1:
        most, least = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
        raise _unfit(
            f"{most} has {found[most]} rows, and {least} has {found[least]}",
            "let all tensors have a row for each sample; or give parts one by one, with samples=[…]",
        )
    return next(iter(found.values()), 0)


def _row_counts(value: Any, where: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim:
            yield where, len(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _row_counts(item, f"{where}[{key!r}]")
    elif (names := record_fields(type(value))) is not None:
        for name, item in zip(names, record_parts(value), strict=True):
            yield from _row_counts(item, f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _row_counts(item, f"{where}[{i}]")


def _form(value: Any) -> Any:
    """The form of a part: parts of one batch differ only in the sizes of their tensors, and in numbers."""
    if isinstance(value, (Tensor, np.ndarray)):
        return "tensor", str(value.dtype), value.ndim
    if isinstance(value, Mapping):
        return "dict", *((key, _form(item)) for key, item in value.items())
    if record_fields(type(value)) is not None:
        return type(value), *map(_form, record_parts(value))
    if isinstance(value, (list, tuple)):
        return "list", frozenset(_form(item) for item in value)
    return type(value)


def _require_count(parts: int) -> None:
    if parts > PARTS_MAX:
        raise _unfit(f"{parts} parts", f"give at most {PARTS_MAX}")


_SAY_PARTS = (
    "say into how many parts the batch is split:  pool.backward(batch, …, parts=8) ; that number, and not"
    " the nodes, decides the bits"
)


def _unfit(what: str, fix: str) -> UsageError:
    return UsageError(what, code="W5-271", fix=fix)
