"""Fewer bits for each number: packs the floats of a vector into a narrower type, and unpacks them.

A packed vector holds the packed groups one after another, each part at the start of a cache line. Only
float32 and float64 are narrowed: every other dtype travels exactly. All sizes follow from the groups, so both
sides know them before a byte is sent. NaN and infinities stay not finite, and the receiver must look for
them. `four_bits.py` has the stage that also looks at roles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from w5xde.learn.model.buffers import Buffers
from w5xde.learn.model.layout import DtypeGroup, aligned
from w5xde.learn.model.parallel import on_all_cores
from w5xde.learn.model.route import is_large

NARROWED = (torch.float32, torch.float64)
# Values handled at a time: few enough for the cache, where several passes cost little more than one, and
# enough to hide the microseconds that each torch operation takes to start.
_CHUNK_VALUES = 1 << 18
# Fewer values than this are not worth a thread.
_PART_VALUES = 16 * _CHUNK_VALUES
# One scale for this many values: 1.6 % more bytes, and an outlier costs only these their precision.
SCALED_VALUES = 256
_INT8_MAX = 127
# The system fills fresh memory with zeros page by page, which costs several times as much as rounding into
# it.
_BUFFERS = Buffers()


@dataclass(frozen=True, slots=True)
class Run:
    """`count` values of `size` bytes each, from byte `start` on."""

    start: int
    count: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.size


class Numbers(Protocol):
    """A stage that turns the groups of a vector into other bytes, of a length known beforehand."""

    def runs(self, groups: Sequence[DtypeGroup]) -> list[Run]:
        """The runs of a packed vector, in order; the vector ends with the last one."""
        ...

    def pack(self, raw: Tensor, groups: Sequence[DtypeGroup]) -> Tensor: ...

    def unpack(self, packed: Tensor, raw: Tensor, groups: Sequence[DtypeGroup]) -> None: ...


def new_bytes(count: int) -> Tensor:
    """Uninitialised memory; a large piece is reused as soon as nothing refers to it any more."""
    if not is_large(count):
        return torch.empty(count, dtype=torch.uint8)
    return torch.frombuffer(_BUFFERS.take(count), dtype=torch.uint8)


def in_parts(work: Callable[[slice], object], count: int) -> None:
    """Call `work` for `count` values, a chunk at a time; on all cores if there are many."""

    def part(number: int) -> None:
        stop = min(count, (number + 1) * _PART_VALUES)
        for begin in range(number * _PART_VALUES, stop, _CHUNK_VALUES):
            work(slice(begin, min(stop, begin + _CHUNK_VALUES)))

    on_all_cores(part, -(-count // _PART_VALUES))


class NumberForm(ABC):
    """A narrower form of floats."""

    @abstractmethod
    def sizes(self, count: int) -> list[tuple[int, int]]:
        """The runs that `count` floats become, as (count, size)."""

    @abstractmethod
    def narrow(self, values: Tensor, *parts: Tensor) -> None:
        """Write floats into the bytes of their runs."""

    @abstractmethod
    def widen(self, values: Tensor, *parts: Tensor) -> None:
        """Read floats from the bytes of their runs."""


class PackedGroups(ABC):
    """A stage that packs every group in the form that it has for it, or copies the group."""

    @abstractmethod
    def form_of(self, group: DtypeGroup) -> NumberForm | None:
        """The form in which a group is packed; None: it is copied exactly."""

    def runs(self, groups: Sequence[DtypeGroup]) -> list[Run]:
        return [run for group_runs in self._runs_of(groups) for run in group_runs]

    def _runs_of(self, groups: Sequence[DtypeGroup]) -> Iterator[list[Run]]:
        at = 0
        for group in groups:
            runs = []
            form = self.form_of(group)
            for count, size in form.sizes(group.count) if form else [(group.count, group.dtype.itemsize)]:
                runs.append(Run(at, count, size))
                at = aligned(runs[-1].end)
            yield runs

    def pack(self, raw: Tensor, groups: Sequence[DtypeGroup]) -> Tensor:
        runs = self.runs(groups)
        packed = new_bytes(runs[-1].end if runs else 0)
        for run, following in pairwise(runs):
            # Never send what was in this memory before.
            packed[run.end : following.start] = 0
        for group, form, parts in self._parts(packed, groups):
            if form:
                form.narrow(group.values_in(raw), *parts)
            else:
                parts[0].copy_(group.bytes_in(raw))
        return packed

    def unpack(self, packed: Tensor, raw: Tensor, groups: Sequence[DtypeGroup]) -> None:
        for group, form, parts in self._parts(packed, groups):
            if form:
                form.widen(group.values_in(raw), *parts)
            else:
                group.bytes_in(raw).copy_(parts[0])

    def _parts(
        self, packed: Tensor, groups: Sequence[DtypeGroup]
    ) -> Iterator[tuple[DtypeGroup, NumberForm | None, list[Tensor]]]:
        for group, runs in zip(groups, self._runs_of(groups), strict=True):
            yield group, self.form_of(group), [packed[run.start : run.end] for run in runs]


class NarrowFloats(PackedGroups, NumberForm):
    """A stage that narrows float32 and float64 all in one form, and copies every other dtype."""

    def form_of(self, group: DtypeGroup) -> NumberForm | None:
        return self if group.dtype in NARROWED else None


class Float16(NarrowFloats):
    """Floats in 16 bits, float16 or bfloat16: half of float32's bytes, rounded to the nearest."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._largest = torch.finfo(dtype).max
        self._square_max = min(0.99 * self._largest**2, 1e38)

    def sizes(self, count: int) -> list[tuple[int, int]]:
        return [(count, 2)]

    def narrow(self, values: Tensor, *parts: Tensor) -> None:
        small = parts[0].view(self.dtype)
        in_parts(lambda places: small[places].copy_(self._within_range(values[places])), len(values))

    def widen(self, values: Tensor, *parts: Tensor) -> None:
        small = parts[0].view(self.dtype)
        in_parts(lambda places: values[places].copy_(small[places]), len(values))

    def _within_range(self, values: Tensor) -> Tensor:
        """Clamp finite values to the largest finite one of the dtype; NaN and infinities stay as they are."""
        # If the sum of squares does not exceed the largest square, no value does; that is one quick pass.
        if torch.dot(values, values) <= self._square_max:
            return values
        return torch.where(values.isfinite(), values.clamp(-self._largest, self._largest), values)


class Int8(NarrowFloats):
    """Floats in 8 bits and a float32 scale for every 256: a quarter of float32's bytes, and coarse.

    Packed, a group is its scales and then its values. A block that holds NaN or an infinity (or a float64
    beyond float32's range) has a scale that is not finite, and so none of its values is finite when unpacked.
    """

    def sizes(self, count: int) -> list[tuple[int, int]]:
        return [(-(-count // SCALED_VALUES), 4), (count, 1)]

    def narrow(self, values: Tensor, *parts: Tensor) -> None:
        scratch = torch.empty(min(len(values), _CHUNK_VALUES), dtype=values.dtype)
        for some, scale, small in _blocks(values, *parts):
            _quantize(some, scale, small, scratch[: some.numel()].view(some.shape))

    def widen(self, values: Tensor, *parts: Tensor) -> None:
        for some, scale, small in _blocks(values, *parts):
            some.copy_(small).mul_(scale[:, None])


def _blocks(values: Tensor, *parts: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Values, their scales and their int8 form: blocks as rows, as many at a time as fit the cache."""
    scales, small = parts[0].view(torch.float32), parts[1].view(torch.int8)
    whole = len(values) - len(values) % SCALED_VALUES
    for begin in range(0, whole, _CHUNK_VALUES):
        end = min(whole, begin + _CHUNK_VALUES)
        yield (
            values[begin:end].view(-1, SCALED_VALUES),
            scales[begin // SCALED_VALUES : end // SCALED_VALUES],
            small[begin:end].view(-1, SCALED_VALUES),
        )
    if whole < len(values):
        yield values[whole:].view(1, -1), scales[-1:], small[whole:].view(1, -1)


def _quantize(values: Tensor, scale: Tensor, small: Tensor, scratch: Tensor) -> None:
    torch.abs(values, out=scratch)
    scale.copy_(scratch.amax(1).div_(_INT8_MAX))
    # A subnormal scale has too few bits and could give values beyond 127: count such a block as zero.
    scale.masked_fill_(scale < torch.finfo(torch.float32).tiny, 0)
    factor = torch.where(scale > 0, 1 / scale, 0)
    torch.mul(values, factor[:, None], out=scratch)
    small.copy_(scratch.round_())
