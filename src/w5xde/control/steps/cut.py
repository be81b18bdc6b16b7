"""The cut: the core's state between two steps, as plain data for a checkpoint.

A checkpoint holds a cut together with the weights and the optimizer state of the same steps. A cut has no
leases: they end with the coordinator that gave them, and their steps are in `undone`. Knows no files.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

from w5xde.control.steps.plan import Cursor, StepPlan


@dataclass(slots=True)
class Progress:
    """The counts of a run so far, for views and summaries."""

    steps: int = 0
    epochs: int = 0
    batches: int = 0
    samples: int = 0
    # In rounds mode.
    rounds: int = 0
    # Steps that survive a crash.
    durable_steps: int = 0
    # Steps with fewer nodes than their robust mean needs.
    degraded_steps: int = 0
    # Batches in answers that the coordinator computed again, and in those that it chose and could not.
    verified_batches: int = 0
    unverified_batches: int = 0
    # Evaluations that were due and skipped, and how long training has waited for others.
    evaluations_skipped: int = 0
    evaluation_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Aside:
    """A batch that failed on every node that tried it, and that no step contains."""

    epoch: int
    batch: int
    samples: int
    reason: str
    nodes: tuple[str, ...] = ()


@dataclass(slots=True)
class Accounts:
    """Which epochs are complete; of the others their applied batches, their size once known, and failures."""

    applied: dict[int, int] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    aside: list[Aside] = field(default_factory=list)
    # All epochs before `complete_until` are complete, and those in `complete_also`.
    complete_until: int = 0
    complete_also: list[int] = field(default_factory=list)

    def apply(self, step: StepPlan, batches: int) -> None:
        """Count this many applied batches of a step."""
        self.applied[step.epoch] = self.applied.get(step.epoch, 0) + batches
        if step.ends_epoch:
            self.batches[step.epoch] = step.first + len(step.sizes)

    def aside_of(self, epoch: int) -> list[Aside]:
        return [aside for aside in self.aside if aside.epoch == epoch]

    def is_over(self, epoch: int) -> bool:
        """Whether every batch of the epoch is applied or set aside."""
        batches = self.batches.get(epoch)
        if batches is None:
            return False
        return self.applied.get(epoch, 0) + len(self.aside_of(epoch)) == batches

    def is_complete(self, epoch: int) -> bool:
        return epoch < self.complete_until or epoch in self.complete_also

    def close(self, epoch: int) -> None:
        """Mark the epoch as complete."""
        self.applied.pop(epoch, None)
        del self.batches[epoch]
        self.complete_also.append(epoch)
        while self.complete_until in self.complete_also:
            self.complete_also.remove(self.complete_until)
            self.complete_until += 1

    def completed_since(self, before: Accounts) -> list[int]:
        """Return the epochs that are complete now and were not in `before`."""
        now = [*range(before.complete_until, self.complete_until), *self.complete_also]
        return sorted(epoch for epoch in now if not before.is_complete(epoch))

    def copy(self) -> Accounts:
        return deepcopy(self)


@dataclass(slots=True)
class UsualNorms:
    """The usual norms of updates, by the size of their span: medians, or the first norms until then."""

    # An update this many times as large as usual is doubted.
    factor: float
    medians: dict[int, float] = field(default_factory=dict)
    first: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluatedUntil:
    """How far evaluations have come: all that were due up to this step and this epoch."""

    steps: int = 0
    epochs: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """The core's part of a checkpoint, after `version` steps."""

    version: int
    progress: Progress
    cursor: Cursor
    # Steps that are planned and not applied.
    undone: tuple[StepPlan, ...]
    accounts: Accounts
    # Seconds of training, in all lives of the coordinator.
    seconds: float = 0.0
    # None in checkpoints that were written before norms were kept.
    usual_norms: UsualNorms | None = None
    # In rounds mode, if it is known: how many steps each round has.
    round_lengths: str | None = None
    # None in checkpoints that were written before it was kept.
    evaluated: EvaluatedUntil | None = None
