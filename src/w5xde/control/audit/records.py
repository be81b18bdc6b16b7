"""What a ledger's records claim, before anybody believes it: numbers that can be those of a run at all.

Kept as small as it was said: a line of sixty bytes that tells of thousands of batches takes no more than it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# As many batches as a step may have.
STEP_BATCHES_MAX = 65536
# As many steps as are ever applied as one stretch.
STRETCH_STEPS_MAX = 64
# How many of those that are wrong a sentence names.
NAMED_MAX = 20

Record = dict[str, Any]


@dataclass(slots=True)
class Applied:
    """A step that counts."""

    epoch: int
    first: int
    # (samples of a batch, how many such follow each other)
    sizes: list[tuple[int, int]]
    ends_epoch: bool
    shares: list[tuple[int, int, str, int]]
    count: int

    @classmethod
    def of(cls, record: Record, most: int) -> Applied:
        """What a record tells of; ValueError if its numbers cannot be those of a step of at most so many."""
        sizes = [(whole(size), whole(count)) for size, count in record["sizes"]]
        shares = [(whole(start), whole(stop), node, lease) for start, stop, node, lease in record["shares"]]
        count = sum(each for _, each in sizes)
        if not 0 < count <= most:
            raise ValueError(f"a step of {count} batches, where {most} is the most")
        if any(not start < stop <= count for start, stop, _, _ in shares) or len(shares) > count:
            raise ValueError(f"shares that are not of its {count} batches")
        epoch, first = whole(record["epoch"]), whole(record["first"])
        return cls(epoch, first, sizes, record["ends_epoch"], shares, count)

    def singly(self) -> list[Applied]:
        """The same if every batch was applied as a step of its own."""
        found = [
            Applied(
                self.epoch, self.first + i, [(self.samples(i, i + 1), 1)], False, [(0, 1, node, lease)], 1
            )
            for start, stop, node, lease in sorted(self.shares)
            for i in range(start, stop)
        ]
        found[-1].ends_epoch = self.ends_epoch
        return found

    def samples(self, start: int, stop: int) -> int:
        """How many samples its batches from `start` to `stop` have."""
        at = total = 0
        for size, count in self.sizes:
            total += size * max(0, min(stop, at + count) - max(start, at))
            at += count
        return total


def whole(number: Any) -> int:
    """The number, if it is one that counts something."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} counts nothing")
    return number


def named(numbers: set[Any]) -> str:
    """Numbers in a sentence, if there are many only the first."""
    first = sorted(numbers)[:NAMED_MAX]
    return f"{first}" if len(numbers) == len(first) else f"{first} and {len(numbers) - len(first)} more"
