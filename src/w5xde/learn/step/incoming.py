"""Arrivals: an update of a large model while it is on its way, looked at and used piece by piece.

A piece that has just been read is still in the processor's cache: looking at its numbers, and adding them
to what is there, costs hardly more than reading it. Once all of a hundred megabytes are there, each of those
is a walk through memory of its own. And what is added at once needs no memory for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from w5xde.learn.model.layout import Blueprint, Vector
from w5xde.learn.step.finite import Gauge

# Fits the processor's cache; a multiple of every alignment, so that no number is torn.
PIECE_BYTES = 1024 * 1024


# How an update travels in which each number stands for itself: where each group begins, and as what it comes.
Wire: TypeAlias = list[tuple[int, torch.dtype]]


class _Looked:
    """An update of which it is found out, piece by piece, how large it is."""

    def __init__(self, blueprint: Blueprint, gauge: Gauge, wire: Wire | None = None) -> None:
        self._groups = blueprint.moving_groups
        self._wire = wire or [(group.start, group.dtype) for group in self._groups]
        self._gauge = gauge
        self._square = 0.0
        self._wide: dict[torch.dtype, Tensor] = {}

    @property
    def norm(self) -> float:
        return math.sqrt(self._square)

    def _parts(self, piece: Tensor, start: int) -> Iterator[tuple[int, int, Tensor]]:
        """What the piece holds of each group, as long as all so far is finite.

        Each is (the group, from which number on, the numbers), and those only until the next is asked for.
        """
        for i, (group, (begin, dtype)) in enumerate(zip(self._groups, self._wire, strict=True)):
            first = max(start, begin)
            last = min(start + piece.numel(), begin + group.count * dtype.itemsize)
            if first < last:
                numbers = piece[first - start : last - start].view(dtype)
                if dtype != group.dtype:
                    numbers = self._widened(numbers, group.dtype)
                self._square += self._gauge.square(i, numbers)
                if self._square == math.inf:
                    return
                yield i, (first - begin) // dtype.itemsize, numbers

    def _widened(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        # Not `to`: a megabyte that is new each time takes longer to be given than to be filled.
        if dtype not in self._wide:
            self._wide[dtype] = torch.empty(PIECE_BYTES // 2, dtype=dtype)
        return self._wide[dtype][: numbers.numel()].copy_(numbers)


class Kept(_Looked):
    """An update that comes as it is, straight to memory of its own."""

    def __init__(self, memory: bytearray | memoryview, blueprint: Blueprint, gauge: Gauge) -> None:
        super().__init__(blueprint, gauge)
        self._raw = torch.frombuffer(memory, dtype=torch.uint8)
        self.vector: Vector | None = Vector.over(self._raw, blueprint)
        self.body = memory
        self._filled = 0
        self._seen = 0

    def get_buffer(self) -> memoryview:
        return memoryview(self.body)[self._filled :]

    def buffer_updated(self, count: int) -> None:
        self._filled += count
        total = len(self.body)
        while self._filled - self._seen >= PIECE_BYTES or self._seen < self._filled == total:
            stop = min(self._seen + PIECE_BYTES, total)
            for _ in self._parts(self._raw[self._seen : stop], self._seen):
                pass  # it is where it belongs
            self._seen = stop


class Written(_Looked):
    """An update whose numbers are written into a vector while they come, whatever they come as."""

    def __init__(
        self, into: Vector, blueprint: Blueprint, gauge: Gauge, total: int, wire: Wire | None = None
    ) -> None:
        """So many bytes will come."""
        super().__init__(blueprint, gauge, wire)
        self.vector: Vector | None = into
        self.body = bytearray()
        self._into = into
        self._total = total
        # Numbers that are narrower on their way become wider here.
        self._scratch = torch.empty(
            min(PIECE_BYTES if wire is None else PIECE_BYTES // 2, total), dtype=torch.uint8
        )
        self._memory = self._scratch.numpy().data
        self._start = 0
        self._filled = 0

    def get_buffer(self) -> memoryview:
        return self._memory[self._filled : self._total - self._start]

    def buffer_updated(self, count: int) -> None:
        self._filled += count
        if self._filled < len(self._memory) and self._start + self._filled < self._total:
            return
        for i, first, numbers in self._parts(self._scratch[: self._filled], self._start):
            self._put(self._into.parts[i][first : first + numbers.numel()], numbers)
        self._start += self._filled
        self._filled = 0

    def _put(self, place: Tensor, numbers: Tensor) -> None:
        place.copy_(numbers)


class Added(Written):
    """An update that is added to a vector while it comes.

    Whatever happens then, the vector is not what it was: if the rest never comes, or is not finite, it is of
    no use any more.
    """

    def _put(self, place: Tensor, numbers: Tensor) -> None:
        place.add_(numbers)


class Unwanted:
    """An update that nobody needs any more, and that is only read to its end."""

    vector: Vector | None = None
    norm = 0.0

    def __init__(self) -> None:
        self.body = bytearray()
        self._scratch = bytearray(PIECE_BYTES)

    def get_buffer(self) -> memoryview:
        return memoryview(self._scratch)

    def buffer_updated(self, count: int) -> None:
        """Nothing of it matters."""


# Where the bytes of one update go, in the order they come. Once all are there: its vector, or what it was
# added to, and the norm of its gradients, infinite if a number of it is not finite.
Arrival: TypeAlias = Kept | Written | Unwanted
