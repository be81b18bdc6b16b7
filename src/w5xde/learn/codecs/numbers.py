"""Fewer bits for each number: what packs a vector's floats into a narrower type, and unpacks them.

A packed vector holds what each group became, one after the other, each part at the start of a cache line.
Only float32 and float64 are narrowed: every other dtype travels exactly. Sizes follow from the groups alone,
so both sides know them before a byte is sent. What is not finite stays so: whoever unpacks must notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from w5xde.learn.model.buffers import Buffers
from w5xde.learn.model.layout import ALIGNMENT_BYTES, Group
from w5xde.learn.model.parallel import on_all_cores
from w5xde.learn.model.route import is_large

_NARROWED = (torch.float32, torch.float64)
# Values handled in one go: few enough for the cache, where several passes are nearly as cheap as one, and
# enough to make torch's few microseconds for each operation not matter.
_CHUNK_VALUES = 1 << 18
# So many are worth a thread.
_PART_VALUES = 16 * _CHUNK_VALUES
# One scale for so many values: 1.6 % more bytes, and an outlier costs the precision of few others.
SCALED_VALUES = 256
_INT8_MAX = 127
# Fresh memory is filled with zeros page by page, which costs several times what rounding into it does.
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

    def runs(self, groups: Sequence[Group]) -> list[Run]:
        """Where values of which size lie in a packed vector, which ends with the last of them."""
        ...

    def pack(self, raw: Tensor, groups: Sequence[Group]) -> Tensor: ...

    def unpack(self, packed: Tensor, raw: Tensor, groups: Sequence[Group]) -> None: ...


def values_of(raw: Tensor, group: Group) -> Tensor:
    return bytes_of(raw, group).view(group.dtype)


def bytes_of(raw: Tensor, group: Group) -> Tensor:
    return raw[group.start : group.start + group.count * group.dtype.itemsize]


def _laid_out(sizes: Sequence[tuple[int, int]]) -> list[Run]:
    """Runs of (count, size), each at the start of a cache line."""
    found, at = [], 0
    for count, size in sizes:
        found.append(Run(at, count, size))
        at = -(-found[-1].end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return found


def new_bytes(count: int) -> Tensor:
    """Memory to be written to, whatever it holds; a large one is used again when nobody holds it any more."""
    if not is_large(count):
        return torch.empty(count, dtype=torch.uint8)
    return torch.frombuffer(_BUFFERS.take(count), dtype=torch.uint8)


def _new_packed(runs: Sequence[Run]) -> Tensor:
    packed = new_bytes(runs[-1].end if runs else 0)
    for run, following in pairwise(runs):
        packed[run.end : following.start] = 0  # what lay in memory before is nobody's business
    return packed


def _in_parts(work: Callable[[slice], None], count: int) -> None:
    """Let `work` handle so many values, a chunk at a time; many of them on all cores."""
    parts = -(-count // _PART_VALUES)

    def part(number: int) -> None:
        stop = min(count, (number + 1) * _PART_VALUES)
        for begin in range(number * _PART_VALUES, stop, _CHUNK_VALUES):
            work(slice(begin, min(stop, begin + _CHUNK_VALUES)))

    on_all_cores(part, parts)


class Narrow:
    """Floats in 16 bits: half of float32's bytes, rounded to the nearest."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._largest = torch.finfo(dtype).max
        self._square_max = min(0.99 * self._largest**2, 1e38)

    def runs(self, groups: Sequence[Group]) -> list[Run]:
        return _laid_out(
            [(group.count, 2 if group.dtype in _NARROWED else group.dtype.itemsize) for group in groups]
        )

    def singly(self, groups: Sequence[Group]) -> list[tuple[int, torch.dtype]]:
        """Where each group begins in a packed vector, and as what its numbers lie there."""
        dtypes = [self._dtype if group.dtype in _NARROWED else group.dtype for group in groups]
        return [(run.start, dtype) for run, dtype in zip(self.runs(groups), dtypes, strict=True)]

    def pack(self, raw: Tensor, groups: Sequence[Group]) -> Tensor:
        runs = self.runs(groups)
        packed = _new_packed(runs)
        for group, run in zip(groups, runs, strict=True):
            part = packed[run.start : run.end]
            if group.dtype not in _NARROWED:
                part.copy_(bytes_of(raw, group))
                continue
            values, narrow = values_of(raw, group), part.view(self._dtype)

            def round_some(places: slice, values: Tensor = values, narrow: Tensor = narrow) -> None:
                narrow[places].copy_(self._within_range(values[places]))

            _in_parts(round_some, group.count)
        return packed

    def unpack(self, packed: Tensor, raw: Tensor, groups: Sequence[Group]) -> None:
        for group, run in zip(groups, self.runs(groups), strict=True):
            part = packed[run.start : run.end]
            if group.dtype in _NARROWED:
                values, narrow = values_of(raw, group), part.view(self._dtype)

                def widen_some(places: slice, values: Tensor = values, narrow: Tensor = narrow) -> None:
                    values[places].copy_(narrow[places])

                _in_parts(widen_some, group.count)
            else:
                bytes_of(raw, group).copy_(part)

    def _within_range(self, values: Tensor) -> Tensor:
        """A large gradient becomes the largest there is, not infinite; NaN and Inf stay what they are."""
        # If the sum of squares is no larger than the largest square, no value is; that is one quick pass.
        if torch.dot(values, values) <= self._square_max:
            return values
        return torch.where(values.isfinite(), values.clamp(-self._largest, self._largest), values)


class Int8:
    """Floats in 8 bits and a float32 scale for every 256: a quarter of float32's bytes, and coarse.

    Packed, a group is its scales and then its values. A block that holds NaN or Inf (or a float64 that no
    float32 can hold) has such a scale too, and with it nothing of the block is finite.
    """

    def runs(self, groups: Sequence[Group]) -> list[Run]:
        sizes = []
        for group in groups:
            if group.dtype in _NARROWED:
                sizes += [(-(-group.count // SCALED_VALUES), 4), (group.count, 1)]
            else:
                sizes.append((group.count, group.dtype.itemsize))
        return _laid_out(sizes)

    def pack(self, raw: Tensor, groups: Sequence[Group]) -> Tensor:
        runs = self.runs(groups)
        packed = _new_packed(runs)
        parts = iter([packed[run.start : run.end] for run in runs])
        for group in groups:
            if group.dtype not in _NARROWED:
                next(parts).copy_(bytes_of(raw, group))
                continue
            scales, small = next(parts).view(torch.float32), next(parts).view(torch.int8)
            scratch = torch.empty(min(group.count, _CHUNK_VALUES), dtype=group.dtype)
            for values, scale, narrow in _blocks(values_of(raw, group), scales, small):
                _quantize(values, scale, narrow, scratch[: values.numel()].view(values.shape))
        return packed

    def unpack(self, packed: Tensor, raw: Tensor, groups: Sequence[Group]) -> None:
        parts = iter([packed[run.start : run.end] for run in self.runs(groups)])
        for group in groups:
            if group.dtype not in _NARROWED:
                bytes_of(raw, group).copy_(next(parts))
                continue
            scales, small = next(parts).view(torch.float32), next(parts).view(torch.int8)
            for values, scale, narrow in _blocks(values_of(raw, group), scales, small):
                values.copy_(narrow).mul_(scale[:, None])


def _blocks(values: Tensor, scales: Tensor, small: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Values, their scales and what they become: blocks as rows, as many at a time as fit the cache."""
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
    # A scale too small for all of its bits would make more than 127 of a value: such a block counts as zero.
    scale.masked_fill_(scale < torch.finfo(torch.float32).tiny, 0)
    factor = torch.where(scale > 0, 1 / scale, 0)
    torch.mul(values, factor[:, None], out=scratch)
    small.copy_(scratch.round_())
