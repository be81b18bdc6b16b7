"""The plan: which batches make the next step. Deterministic, resumable, the same whoever helps.

A step is `step_batches` consecutive batches of one epoch (fewer at its end); steps never span epochs. Where
each batch is a step of its own, several in a row can be planned as one stretch of steps.
Which samples a batch holds is the data source's business; here a batch is its index and its size.
Knows no samples, no shuffling and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Batches `first, first + 1, …` of an epoch, one size each: what one optimizer step is made of.

    Or, if they are `apart`, a stretch: each batch is a step of its own, and the plan's index is the first's.
    """

    index: int
    epoch: int
    first: int
    sizes: tuple[int, ...]
    ends_epoch: bool
    apart: bool = False

    @property
    def steps(self) -> int:
        """How many optimizer steps it plans."""
        return self.count if self.apart else 1

    @property
    def singly(self) -> list[StepPlan]:
        """The steps of a stretch, one by one; any other is what it is."""
        last = self.count - 1
        return (
            [
                StepPlan(self.index + i, self.epoch, self.first + i, (size,), self.ends_epoch and i == last)
                for i, size in enumerate(self.sizes)
            ]
            if self.apart
            else [self]
        )

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(epoch, batch) of each of its batches."""
        return [(self.epoch, self.first + i) for i in range(self.count)]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a plan stands: the next step's index, its epoch, and its first batch there."""

    index: int = 0
    epoch: int = 0
    first: int = 0


class Plan:
    """Hands out steps in order, up to the limits of the run."""

    def __init__(
        self,
        *,
        step_batches: int,
        epoch_limit: int | None,
        step_limit: int | None,
        samples: int | None,
        batch_size: int,
    ) -> None:
        self.step_batches = step_batches
        self._epoch_limit = epoch_limit
        self._step_limit = step_limit
        self._samples = samples
        self._batch_size = batch_size
        self._epoch = 0
        self._first = 0
        self._index = 0
        # A stream tells us its batches as it goes: sizes beyond the cursor, and 0 where an epoch ends.
        self._stream: deque[int] = deque()
        self._stream_epoch = 0
        # Steps that were handed out before a restart and are not applied.
        self._undone: deque[StepPlan] = deque()

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def facts(self) -> dict[str, int | None]:
        """What an audit must know to count again."""
        return {
            "step_batches": self.step_batches,
            "batch_size": self._batch_size,
            "samples": self._samples,
            "epoch_limit": self._epoch_limit,
            "step_limit": self._step_limit,
        }

    @property
    def cursor(self) -> Cursor:
        return Cursor(self._index, self._epoch, self._first)

    @property
    def undone(self) -> list[StepPlan]:
        """What `resume` was given and has not been handed out again."""
        return list(self._undone)

    def resume(self, cursor: Cursor, undone: Iterable[StepPlan]) -> None:
        """Go on from where another plan stood; a stream's batches are told from there on."""
        self._index, self._epoch, self._first = cursor.index, cursor.epoch, cursor.first
        self._stream_epoch = cursor.epoch
        # Whether these can be lent together again is for this life to know.
        self._undone = deque(single for step in undone for single in step.singly)

    def again(self, epoch: int, batch: int, samples: int) -> None:
        """Hand out one batch of the past as a step of its own, before anything else.

        Numbered from -1 downwards: it is none of the steps that were planned, and counts towards no limit.
        """
        index = min([0, *(step.index for step in self._undone)]) - 1
        self._undone.append(StepPlan(index, epoch, batch, (samples,), ends_epoch=False))

    @property
    def is_over(self) -> bool:
        """Whether no step will ever follow."""
        if self._undone:
            return False
        if self._step_limit is not None and self._index >= self._step_limit:
            return True
        return self._epoch_limit is not None and self._epoch >= self._epoch_limit

    @property
    def steps_total(self) -> int | None:
        """How many steps the whole run has, where that is known."""
        limits = [] if self._step_limit is None else [self._step_limit]
        if self._epoch_limit is not None and self._samples is not None:
            batches = -(-self._samples // self._batch_size)
            limits.append(self._epoch_limit * -(-batches // self.step_batches))
        return min(limits, default=None)

    def discovered(self, epoch: int, samples: int) -> None:
        """The stream gave a batch of this many samples, or with 0 its epoch ended."""
        if self._samples is not None or epoch != self._stream_epoch:
            raise ValueError(f"a batch of epoch {epoch} discovered in epoch {self._stream_epoch}")
        self._stream.append(samples)
        self._stream_epoch += samples == 0

    def next_step(self) -> StepPlan | None:
        """The next step, or None: the plan is over, or its data is not there yet."""
        return self._next(self.step_batches, apart=False)

    def next_stretch(self, most: int) -> StepPlan | None:
        """The same, but up to so many steps of one batch each, in one plan."""
        if self._step_limit is not None:
            most = min(most, self._step_limit - self._index)
        return self._next(most, apart=True)

    def _next(self, batches: int, *, apart: bool) -> StepPlan | None:
        if self._undone:
            return self._undone.popleft()
        if self.is_over:
            return None
        sizes, ends_epoch = self._sizes(batches)
        if not sizes:
            return None
        step = StepPlan(self._index, self._epoch, self._first, sizes, ends_epoch, apart)
        self._index += step.steps
        self._first += len(sizes)
        if ends_epoch:
            self._epoch += 1
            self._first = 0
        return step

    def _sizes(self, batches: int) -> tuple[tuple[int, ...], bool]:
        """Of the next so many batches of the epoch; and whether those are its last."""
        if self._samples is None:
            return self._stream_sizes(batches)
        left = self._samples - self._first * self._batch_size
        sizes: list[int] = []
        while left > 0 and len(sizes) < batches:
            sizes.append(min(self._batch_size, left))
            left -= sizes[-1]
        return tuple(sizes), left <= 0

    def _stream_sizes(self, batches: int) -> tuple[tuple[int, ...], bool]:
        # One batch more than the step must be known, or the last step of an epoch could not tell that it is.
        ahead = list(islice(self._stream, batches + 1))
        if 0 in ahead:
            sizes = ahead[: ahead.index(0)]
            for _ in range(len(sizes) + 1):
                self._stream.popleft()
            return tuple(sizes), True
        if len(ahead) <= self.step_batches:
            return (), False
        return tuple(self._stream.popleft() for _ in range(min(batches, len(ahead) - 1))), False
