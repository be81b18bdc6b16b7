"""Incoming updates: bodies of frames become vectors whose numbers are checked.

A large update is checked, and written to its place, piece by piece while it arrives: a piece that has just
been read is still in the processor's cache. Knows no sockets: a connection asks for memory (`get_buffer`)
and says how much of it was filled (`buffer_updated`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from w5xde.compression import NONE
from w5xde.learn.codecs.receiver import CodecReceiver
from w5xde.learn.model.layout import Blueprint, Vector
from w5xde.learn.step.finite import Gauge

# Fits the processor's cache; a multiple of every alignment, so that no number is split.
PIECE_BYTES = 1024 * 1024

# Where each group of numbers begins in an encoded body, and its dtype there.
EncodedGroups: TypeAlias = list[tuple[int, torch.dtype]]
# A vector, and the norm of its gradients: infinite if a number of it is not finite.
Checked: TypeAlias = tuple[Vector, float]


class _PieceChecker:
    """Adds up the norm of an update piece by piece."""

    def __init__(self, blueprint: Blueprint, gauge: Gauge, encoded: EncodedGroups | None = None) -> None:
        self._groups = blueprint.moving_groups
        self._encoded = encoded or [(group.start, group.dtype) for group in self._groups]
        self._gauge = gauge
        self._square = 0.0
        self._wide: dict[torch.dtype, Tensor] = {}

    @property
    def norm(self) -> float:
        return math.sqrt(self._square)

    def _parts(self, piece: Tensor, start: int) -> Iterator[tuple[int, int, Tensor]]:
        """For each group in the piece: (its place, its first number, its numbers); ends at infinity.

        The numbers are valid until the next group is asked for.
        """
        for i, (group, (begin, dtype)) in enumerate(zip(self._groups, self._encoded, strict=True)):
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
        # Not `to`: allocating a new megabyte takes longer than filling one.
        if dtype not in self._wide:
            self._wide[dtype] = torch.empty(PIECE_BYTES // 2, dtype=dtype)
        return self._wide[dtype][: numbers.numel()].copy_(numbers)


class StoredVector(_PieceChecker):
    """An update that is not encoded: its bytes go straight to their final memory."""

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
                pass  # the numbers are in their place already
            self._seen = stop


class WidenedVector(_PieceChecker):
    """An update whose numbers travel in fewer bits: each piece is widened into its final memory."""

    def __init__(
        self, into: Vector, blueprint: Blueprint, gauge: Gauge, body_bytes: int, encoded: EncodedGroups
    ) -> None:
        super().__init__(blueprint, gauge, encoded)
        self.vector: Vector | None = into
        self.body = bytearray()
        self._into = into
        self._body_bytes = body_bytes
        self._scratch = torch.empty(min(PIECE_BYTES // 2, body_bytes), dtype=torch.uint8)
        self._memory = self._scratch.numpy().data
        self._start = 0
        self._filled = 0

    def get_buffer(self) -> memoryview:
        return self._memory[self._filled : self._body_bytes - self._start]

    def buffer_updated(self, count: int) -> None:
        self._filled += count
        if self._filled < len(self._memory) and self._start + self._filled < self._body_bytes:
            return
        for i, first, numbers in self._parts(self._scratch[: self._filled], self._start):
            self._into.parts[i][first : first + numbers.numel()].copy_(numbers)
        self._start += self._filled
        self._filled = 0


class DiscardedVector:
    """An update that cannot count any more: its bytes are read and thrown away."""

    vector: Vector | None = None
    norm = 0.0

    def __init__(self) -> None:
        self.body = bytearray()
        self._scratch = bytearray(PIECE_BYTES)

    def get_buffer(self) -> memoryview:
        return memoryview(self._scratch)

    def buffer_updated(self, count: int) -> None:
        """The bytes are not needed."""


IncomingVector: TypeAlias = StoredVector | WidenedVector | DiscardedVector


class UpdateReader:
    """Turns the bodies of updates into vectors and their norms."""

    def __init__(
        self,
        blueprint: Blueprint,
        gauge: Gauge,
        receiver: CodecReceiver,
        allocate: Callable[[int], bytearray | memoryview],
        *,
        weighs: bool = False,
    ) -> None:
        """`weighs`: nodes say what their batches weigh."""
        self.weighs = weighs
        self._blueprint = blueprint
        self._gauge = gauge
        self._receiver = receiver
        self.allocate = allocate
        self.vector_bytes = blueprint.moving_bytes
        # No vector takes more, however it is encoded.
        self.body_bytes_max = receiver.body_bytes_max
        # Entries of the layout for which an update may have no gradient.
        self.trained = frozenset(blueprint.trained)

    def stream(self, spec: str, body_bytes: int) -> IncomingVector | None:
        """Where one large vector goes while it arrives; None if it must be complete to be decoded."""
        encoded = self._receiver.element_layout(spec, body_bytes)
        if encoded is None:
            return None
        memory = self.allocate(self.vector_bytes)
        if spec == NONE:
            return StoredVector(memory, self._blueprint, self._gauge)
        vector = Vector.over(torch.frombuffer(memory, dtype=torch.uint8), self._blueprint)
        return WidenedVector(vector, self._blueprint, self._gauge, body_bytes, encoded)

    def discard(self) -> IncomingVector:
        return DiscardedVector()

    def read(
        self, body: bytearray | memoryview, specs: Sequence[str], lengths: Sequence[int], count: int
    ) -> list[Checked]:
        """The `count` vectors of a complete body.

        Raises RemoteProtocolError if the body cannot be decoded.
        """
        if all(spec == NONE for spec in specs):
            self._receiver.check(NONE, self.vector_bytes)
            vectors = self._blueprint.vectors(body, count)
            return list(zip(vectors, self._gauge.norms(body, vectors), strict=True))
        view, at, vectors = memoryview(body), 0, []
        for spec, length in zip(specs, lengths, strict=True):
            raw = self._receiver.decode(spec, view[at : at + length])
            vectors.append(Vector.over(raw, self._blueprint))
            at += length
        return [(vector, self._gauge.norm(vector)) for vector in vectors]
