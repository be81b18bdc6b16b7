"""The plan: which batches make the next step. Deterministic and resumable; does not depend on the nodes.

A step is `step_batches` consecutive batches of one epoch (fewer at its end); steps never span epochs. Where
each batch is a step of its own, several in a row can be planned as one stretch, which one node makes with an
optimizer of its own. In rounds mode several steps in a row are planned as one round, whose columns nodes make
with optimizers of their own: column k has the k-th batch of each step.
A batch is its index and its size: knows no samples, no shuffling and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from w5xde.specs.planned_run import planned_steps
from w5xde.specs.round_lengths import RoundLengths
from w5xde.tree import Span

# The epoch of validation batches, and the index of a validation of version 0; of others it is smaller.
VALIDATION_EPOCH = -1
_VALIDATION_INDEX = -(1 << 40)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The batches `first, first + 1, …` of an epoch that make one optimizer step, with the size of each.

    A validation is planned like a step, and no step is made of it. If `apart`, it is a stretch: each batch is
    a step of its own, made by a node, and `index` is the first step's. If it has `columns`, it is a round: as
    many batches as it has columns make a step, and `index` is the first step's.
    """

    index: int
    epoch: int
    first: int
    sizes: tuple[int, ...]
    ends_epoch: bool
    apart: bool = False
    columns: int = 0

    @property
    def validates(self) -> bool:
        """Whether its batches are those of a validation set, which nodes only measure."""
        return self.epoch == VALIDATION_EPOCH

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""
        if self.columns:
            return len(self.sizes) // self.columns
        return len(self.sizes) if self.apart else 1

    @property
    def split(self) -> list[StepPlan]:
        """The steps of a stretch, one by one; a single step as it is."""
        if not self.apart:
            return [self]
        last = len(self.sizes) - 1
        return [
            StepPlan(self.index + i, self.epoch, self.first + i, (size,), self.ends_epoch and i == last)
            for i, size in enumerate(self.sizes)
        ]

    @property
    def count(self) -> int:
        """The number of leaves of its tree: the batches of a step, or the columns of a round."""
        return self.columns or len(self.sizes)

    @property
    def leaf_batches(self) -> int:
        """The number of batches in a leaf of its tree."""
        return self.steps if self.columns else 1

    def places(self, span: Span) -> Sequence[int]:
        """The places in `sizes` of the batches of these leaves, in the order in which a node needs them."""
        if not self.columns:
            return range(span.start, span.stop)
        rows = range(0, len(self.sizes), self.columns)
        return [row + column for column in range(span.start, span.stop) for row in rows]

    def samples_of(self, span: Span) -> int:
        """The number of samples in these leaves."""
        return sum([self.sizes[place] for place in self.places(span)])

    def keys_of(self, span: Span) -> list[tuple[int, int]]:
        """The (epoch, batch) of each batch of these leaves, in the order in which a node needs them."""
        return [(self.epoch, self.first + place) for place in self.places(span)]

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    @property
    def keys(self) -> list[tuple[int, int]]:
        """The (epoch, batch) of each batch."""
        return [(self.epoch, self.first + i) for i in range(len(self.sizes))]


def validation_plan(version: int, sizes: tuple[int, ...]) -> StepPlan:
    """All batches of a validation set, to be measured on this version."""
    return StepPlan(_VALIDATION_INDEX - version, VALIDATION_EPOCH, 0, sizes, ends_epoch=False)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place of the next step: its index, its epoch, and its first batch in that epoch."""

    index: int = 0
    epoch: int = 0
    first: int = 0


class Plan:
    """Plans steps in order, up to the limits of the run."""

    def __init__(
        self,
        *,
        step_batches: int,
        epoch_limit: int | None,
        step_limit: int | None,
        samples: int | None,
        batch_size: int,
        rounds: RoundLengths | None = None,
    ) -> None:
        """`rounds`: how many steps each round has, in rounds mode."""
        self.step_batches = step_batches
        self.rounds = rounds
        self._epoch_limit = epoch_limit
        self._step_limit = step_limit
        self._samples = samples
        self._batch_size = batch_size
        self.cursor = Cursor()
        self._resumed_at = 0
        # The sizes of a stream's batches beyond the cursor, as far as they are known; 0 where an epoch ends.
        self._stream: deque[int] = deque()
        self._stream_epoch = 0
        # Steps that were planned before and not applied.
        self._undone: deque[StepPlan] = deque()

    @property
    def epoch(self) -> int:
        return self.cursor.epoch

    @property
    def facts(self) -> dict[str, int | str | None]:
        """The facts that an audit needs to count again."""
        lengths = {} if self.rounds is None else {"round_lengths": str(self.rounds)}
        return {
            "step_batches": self.step_batches,
            "batch_size": self._batch_size,
            "samples": self._samples,
            "epoch_limit": self._epoch_limit,
            "step_limit": self._step_limit,
            **lengths,
        }

    @property
    def undone(self) -> list[StepPlan]:
        """The steps given to `resume` or `split` that `next_step` has not returned yet."""
        return list(self._undone)

    def resume(self, cursor: Cursor, undone: Iterable[StepPlan]) -> None:
        """Continue from an earlier life's place; a stream's batches are discovered from there on."""
        self.cursor = cursor
        self._resumed_at = cursor.index
        self._stream_epoch = cursor.epoch
        # Split: this life may not plan stretches.
        self._undone = deque(single for step in undone for single in step.split)

    def split(self, stretch: StepPlan) -> None:
        """Plan the steps of a stretch again, one by one, before anything else."""
        self._undone.extendleft(reversed(stretch.split))

    def retry_batch(self, epoch: int, batch: int, samples: int) -> None:
        """Plan a batch that was set aside as a step of its own, before anything else.

        Its index counts from -1 downwards: it is not one of the planned steps, and counts towards no limit.
        """
        index = min([0, *(step.index for step in self._undone)]) - 1
        columns = 0 if self.rounds is None else 1
        self._undone.append(StepPlan(index, epoch, batch, (samples,), ends_epoch=False, columns=columns))

    @property
    def is_over(self) -> bool:
        """Whether no step follows."""
        if self._undone:
            return False
        if self._step_limit is not None and self.cursor.index >= self._step_limit:
            return True
        return self._epoch_limit is not None and self.epoch >= self._epoch_limit

    @property
    def steps_total(self) -> int | None:
        """The number of steps of the whole run, if known."""
        return planned_steps(
            samples=self._samples,
            batch_size=self._batch_size,
            step_batches=self.step_batches,
            epoch_limit=self._epoch_limit,
            step_limit=self._step_limit,
        )

    def number_of(self, step: StepPlan) -> int:
        """How many steps are planned before this one.

        For a batch that was set aside in an earlier life, and is tried again: before this life.
        """
        return step.index if step.index >= 0 else self._resumed_at

    def discovered(self, epoch: int, samples: int) -> None:
        """Note that the stream has a batch of this many samples; 0: its epoch has ended."""
        if self._samples is not None or epoch != self._stream_epoch:
            raise ValueError(f"a batch of epoch {epoch} discovered in epoch {self._stream_epoch}")
        self._stream.append(samples)
        self._stream_epoch += samples == 0

    def next_step(self) -> StepPlan | None:
        """Return the next step, or in rounds mode the next round.

        None if the plan is over, or if its batches are not discovered yet.
        """
        if self.rounds is not None:
            return self._next_round(self.rounds)
        return self._next(self.step_batches, apart=False)

    def next_stretch(self, most: int) -> StepPlan | None:
        """Return a stretch of at most `most` steps of one batch each; None as in `next_step`."""
        if self._step_limit is not None:
            most = min(most, self._step_limit - self.cursor.index)
        return self._next(most, apart=True)

    def _next_round(self, lengths: RoundLengths) -> StepPlan | None:
        """Return the next round.

        A round ends with its epoch at the latest. A last step of the epoch that has fewer batches is a round
        of its own, with fewer columns.
        """
        if self._undone:
            return self._undone.popleft()
        if self.is_over:
            return None
        steps = lengths.at(self.cursor.index)
        if self._step_limit is not None:
            steps = min(steps, self._step_limit - self.cursor.index)
        columns = self.step_batches
        sizes, ends_epoch = self._peek_sizes(steps * columns, whole=True)
        if len(sizes) > columns and len(sizes) % columns:
            sizes, ends_epoch = sizes[: len(sizes) // columns * columns], False
        if not sizes:
            return None
        self._skip_sizes(len(sizes), ends_epoch=ends_epoch)
        return self._advance(sizes, ends_epoch=ends_epoch, columns=min(columns, len(sizes)))

    def _next(self, batches: int, *, apart: bool) -> StepPlan | None:
        if self._undone:
            return self._undone.popleft()
        if self.is_over:
            return None
        sizes, ends_epoch = self._peek_sizes(batches, whole=False)
        if not sizes:
            return None
        self._skip_sizes(len(sizes), ends_epoch=ends_epoch)
        return self._advance(sizes, ends_epoch=ends_epoch, apart=apart)

    def _advance(
        self, sizes: tuple[int, ...], *, ends_epoch: bool, apart: bool = False, columns: int = 0
    ) -> StepPlan:
        """Return the step of these batches, and move the cursor behind it."""
        index, epoch, first = self.cursor.index, self.cursor.epoch, self.cursor.first
        step = StepPlan(index, epoch, first, sizes, ends_epoch, apart, columns)
        place = (epoch + 1, 0) if ends_epoch else (epoch, first + len(sizes))
        self.cursor = Cursor(index + step.steps, *place)
        return step

    def _peek_sizes(self, batches: int, *, whole: bool) -> tuple[tuple[int, ...], bool]:
        """Return the sizes of the epoch's next batches, and whether they end it.

        Of a stream perhaps fewer than asked for, if that many are not discovered yet; or, if `whole`, none.
        """
        if self._samples is None:
            return self._peek_stream(batches, whole=whole)
        size = self._batch_size
        left = range(self.cursor.first * size, self._samples, size)
        return tuple(min(size, self._samples - at) for at in left[:batches]), len(left) <= batches

    def _peek_stream(self, batches: int, *, whole: bool) -> tuple[tuple[int, ...], bool]:
        # One batch beyond the step must be known: the epoch may end right after the step.
        ahead = list(islice(self._stream, batches + 1))
        if 0 in ahead:
            return tuple(ahead[: ahead.index(0)]), True
        if len(ahead) <= (batches if whole else self.step_batches):
            return (), False
        return tuple(ahead[: min(batches, len(ahead) - 1)]), False

    def _skip_sizes(self, count: int, *, ends_epoch: bool) -> None:
        """Forget the batches of a stream that were planned, and the end of their epoch."""
        if self._samples is None:
            for _ in range(count + ends_epoch):
                self._stream.popleft()
