"""The canonical pairwise tree over the batches of a step, and the seed of each batch.

Float addition is not associative, so one seed gives the same bits only if gradients are always added
in the same tree. The batch index alone fixes the tree: a span of batches `[start, stop)` splits at the
largest power of two below its length. A node that computes a subtree (an *aligned* span) may send one
sum for all of it, and the bits of the total stay the same.

Knows no tensors: the values are whatever `merge` accepts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Span(NamedTuple):
    """Batches `start` up to, not including, `stop` of one step."""

    start: int
    stop: int

    @property
    def count(self) -> int:  # type: ignore[override]  # the number of batches: replaces the method of tuples
        return self.stop - self.start

    def holds(self, other: Span) -> bool:
        """Whether every batch of the other span is in this one."""
        return self.start <= other.start and other.stop <= self.stop

    def meets(self, other: Span) -> bool:
        """Whether the spans have a batch in common; if both are aligned, one then holds the other."""
        return self.start < other.stop and other.start < self.stop


def halves(span: Span) -> tuple[Span, Span]:
    """The two children of an aligned span of at least two batches."""
    middle = span.start + (1 << ((span.count - 1).bit_length() - 1))
    return Span(span.start, middle), Span(middle, span.stop)


def sibling(span: Span, count: int) -> tuple[Span, Span] | None:
    """`(parent, the parent's other child)` of an aligned span in a step of `count` batches; None at the root.

    A span at the end of the step may be its own parent on the next level, if the step ends there: such levels
    are skipped.
    """
    size = 1 << (span.count - 1).bit_length() if span.count > 1 else 1
    while True:
        size *= 2
        start = span.start & ~(size - 1)
        parent = Span(start, min(start + size, count))
        if parent == span:
            if parent == (0, count):
                return None
            continue
        left, right = halves(parent)
        return parent, right if left == span else left


def is_aligned(span: Span, count: int) -> bool:
    """Whether the span is a node of the tree over `count` batches."""
    if not 0 <= span.start < span.stop <= count:
        return False
    size = 1 << (span.count - 1).bit_length()
    return span.start % size == 0 and span.stop == min(span.start + size, count)


class PairwiseTree(Generic[T]):
    """Collects values for aligned spans of one step, and merges siblings as soon as it has both."""

    def __init__(self, count: int, merge: Callable[[T, T], T]) -> None:
        self.count = count
        self._merge = merge
        self._values: dict[Span, T] = {}

    @property
    def is_complete(self) -> bool:
        """Whether one value covers all batches of the step."""
        return Span(0, self.count) in self._values

    def covers(self, span: Span) -> bool:
        """Whether the values held here include every batch of the span."""
        if not self._values:
            return False
        at = span.start
        while at < span.stop:
            held = next((s for s in self._values if s.start <= at < s.stop), None)
            if held is None:
                return False
            at = held.stop
        return True

    def put(self, span: Span, value: T) -> list[T]:
        """Add the value of a span that is not yet covered; return the values of parts that it replaces."""
        values = self._values
        superfluous = [values.pop(held) for held in list(values) if span.holds(held)] if values else []
        while True:
            above = sibling(span, self.count) if span.count < self.count else None
            if above is None or above[1] not in values:
                values[span] = value
                return superfluous
            parent, other = above
            neighbour = values.pop(other)
            value = (
                self._merge(neighbour, value) if other.start < span.start else self._merge(value, neighbour)
            )
            span = parent

    def get(self, span: Span) -> T | None:
        """The value of exactly this span, if it is here."""
        return self._values.get(span)

    def take(self, span: Span) -> T:
        """Remove and return the value of exactly this span."""
        return self._values.pop(span)

    def __iter__(self) -> Iterator[tuple[Span, T]]:
        return iter(sorted(self._values.items()))


def batch_seed(run_seed: int, epoch: int, batch: int) -> int:
    """The seed, of 63 bits, with which any process reads and computes this batch."""
    digest = hashlib.blake2b(struct.pack("<qqq", run_seed, epoch, batch), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
