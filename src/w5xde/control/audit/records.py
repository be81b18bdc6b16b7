"""Reads step records of a ledger that may be forged: refuses numbers that no run can have.

Keeps a step as compactly as its record: a line of sixty bytes that names thousands of batches takes no more
memory than that. Knows nothing of other records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from w5xde.specs.round_lengths import ROUND_STEPS_MAX

# The most batches that a step may have.
STEP_BATCHES_MAX = 65536
# The most steps that are applied as one stretch.
STRETCH_STEPS_MAX = 64
# How many wrong numbers a sentence names.
NAMED_MAX = 20

Record = dict[str, Any]


@dataclass(slots=True)
class AppliedStep:
    """A step that counts."""

    epoch: int
    first: int
    # (samples of a batch, number of such batches in a row)
    sizes: list[tuple[int, int]]
    ends_epoch: bool
    shares: list[tuple[int, int, str, int]]
    count: int

    @classmethod
    def of(cls, record: Record, most: int) -> AppliedStep:
        """Read a `step` record; ValueError if no step of at most `most` batches has these numbers."""
        sizes = [(whole(size), whole(count)) for size, count in record["sizes"]]
        shares = [(whole(start), whole(stop), node, lease) for start, stop, node, lease in record["shares"]]
        count = sum(each for _, each in sizes)
        if not 0 < count <= most:
            raise ValueError(f"a step of {count} batches, where {most} is the most")
        if any(not start < stop <= count for start, stop, _, _ in shares) or len(shares) > count:
            raise ValueError(f"shares that are not of its {count} batches")
        epoch, first = whole(record["epoch"]), whole(record["first"])
        return cls(epoch, first, sizes, record["ends_epoch"], shares, count)

    @classmethod
    def of_round(cls, record: Record, columns_max: int, steps_max: int) -> list[AppliedStep]:
        """Read the `step` record of a round, as the steps that it is made of; ValueError as in `of`.

        Its shares are columns: each has one batch of every step.
        """
        columns = whole(record["columns"])
        if not 0 < columns <= columns_max:
            raise ValueError(f"a round of {columns} columns, where {columns_max} is the most")
        batches = cls.of(record, columns * steps_max)
        if batches.count % columns or any(stop > columns for _, stop, _, _ in batches.shares):
            raise ValueError(f"a round of {batches.count} batches in {columns} columns")
        steps = [
            cls(
                batches.epoch,
                batches.first + start,
                batches.sizes_of(start, start + columns),
                False,
                batches.shares,
                columns,
            )
            for start in range(0, batches.count, columns)
        ]
        steps[-1].ends_epoch = batches.ends_epoch
        return steps

    def sizes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the sizes of its batches from `start` to `stop`."""
        at, found = 0, []
        for size, count in self.sizes:
            inside = min(stop, at + count) - max(start, at)
            if inside > 0:
                found.append((size, inside))
            at += count
        return found

    def split(self) -> list[AppliedStep]:
        """Return the steps of a stretch, in which every batch is a step of its own."""
        found = [
            AppliedStep(
                self.epoch, self.first + i, [(self.samples(i, i + 1), 1)], False, [(0, 1, node, lease)], 1
            )
            for start, stop, node, lease in sorted(self.shares)
            for i in range(start, stop)
        ]
        found[-1].ends_epoch = self.ends_epoch
        return found

    def samples(self, start: int, stop: int) -> int:
        """Count the samples of its batches from `start` to `stop`."""
        return sum(size * count for size, count in self.sizes_of(start, stop))


def steps_of(record: Record, batches_max: int) -> list[AppliedStep]:
    """Read the `step` record of a run with so many batches a step: a round as its steps, or one step.

    That one may be a stretch. ValueError as in `AppliedStep.of`.
    """
    if "columns" in record:
        return AppliedStep.of_round(record, batches_max, ROUND_STEPS_MAX)
    is_apart = record.get("apart") is True
    return [AppliedStep.of(record, STRETCH_STEPS_MAX if is_apart else batches_max)]


def whole(number: Any) -> int:
    """Return a count; ValueError if it is not a whole number of at least 0."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} counts nothing")
    return number


def named(numbers: set[Any]) -> str:
    """Write numbers for a sentence; of many only the first."""
    first = sorted(numbers)[:NAMED_MAX]
    return f"{first}" if len(numbers) == len(first) else f"{first} and {len(numbers) - len(first)} more"
