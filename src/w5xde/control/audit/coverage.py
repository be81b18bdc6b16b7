"""Coverage: which batches of an epoch are applied, kept as spans.

A forged ledger may claim anything: a line of sixty bytes that applies a billion batches must not take memory
for a billion numbers. Knows nothing of records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice


class Coverage:
    """The applied batches of one epoch: spans without overlap, each with the step that applied it."""

    def __init__(self) -> None:
        # (first, one past the last, step), in order.
        self._spans: list[tuple[int, int, int]] = []

    def add(self, start: int, stop: int, step: int) -> tuple[int, int] | None:
        """Add a span. If part of it is applied already, add the rest; return (first such batch, its step)."""
        at = bisect_left(self._spans, (start,))
        if at and self._spans[at - 1][1] > start:
            at -= 1
        before = self._spans[at] if at < len(self._spans) and self._spans[at][0] < stop else None
        if before is None:
            self._spans.insert(at, (start, stop, step))
            return None
        for gap_start, gap_stop in list(self._gaps(start, stop, at)):
            self._spans.insert(bisect_left(self._spans, (gap_start,)), (gap_start, gap_stop, step))
        return max(start, before[0]), before[2]

    def forget_from(self, step: int) -> None:
        """Remove the batches that steps from this one on applied."""
        self._spans = [span for span in self._spans if span[2] < step]

    def missing(self, count: int, also: Iterable[int] = ()) -> Iterator[int]:
        """Yield the batches below `count` that are neither applied nor in `also`, in order."""
        known = set(also)
        for start, stop in self._gaps(0, count, 0):
            yield from (batch for batch in range(start, stop) if batch not in known)

    def is_whole(self, also: Iterable[int]) -> bool:
        """Whether the applied batches and `also` have no hole from the first batch to their last."""
        others = set(also)
        last = max([*others, *(stop - 1 for _, stop, _ in self._spans[-1:])], default=-1)
        return next(islice(self.missing(last + 1, others), 1), None) is None

    def _gaps(self, start: int, stop: int, at: int) -> Iterator[tuple[int, int]]:
        """Yield the gaps between `start` and `stop`, from the span with the index `at` on."""
        while at < len(self._spans) and start < stop:
            first, last, _ = self._spans[at]
            if first >= stop:
                break
            if first > start:
                yield start, first
            start = max(start, last)
            at += 1
        if start < stop:
            yield start, stop


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort spans and join those that touch; spans that overlap stay separate."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
