"""Counted batches: which of an epoch's are applied, kept as spans, so that a claim costs nothing by its size.

A ledger may claim anything: a line of sixty bytes that applies a billion batches must not take a billion
places here. Knows nothing of records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice


class Counted:
    """The batches of one epoch that count: spans without overlap, and of each the step that applied it."""

    def __init__(self) -> None:
        # (first, one past the last, step), in order.
        self._spans: list[tuple[int, int, int]] = []

    def add(self, start: int, stop: int, step: int) -> tuple[int, int] | None:
        """Count a span. If some of it counts already: (the first such batch, its step); the rest counts."""
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
        """Steps from this one on count no more."""
        self._spans = [span for span in self._spans if span[2] < step]

    def missing(self, count: int, also: Iterable[int] = ()) -> Iterator[int]:
        """The batches below `count` that do not count and are not among these, in order, one by one."""
        known = set(also)
        for start, stop in self._gaps(0, count, 0):
            yield from (batch for batch in range(start, stop) if batch not in known)

    def is_whole(self, also: Iterable[int]) -> bool:
        """Whether they and these are all batches from the first to the last, without a hole."""
        others = set(also)
        last = max([*others, *(stop - 1 for _, stop, _ in self._spans[-1:])], default=-1)
        return next(islice(self.missing(last + 1, others), 1), None) is None

    def _gaps(self, start: int, stop: int, at: int) -> Iterator[tuple[int, int]]:
        """What no span covers between `start` and `stop`, from the span `at` on."""
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
    """The same spans in order, those that touch made one; those that overlap stay apart."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
