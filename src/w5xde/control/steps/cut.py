"""The cut: everything the core must remember of a run, at one moment between two steps, as plain data.

A checkpoint holds a cut together with the weights and the optimizer of the very same steps. What was lent
at that moment is not in it: leases end with the coordinator that gave them, and their batches are undone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from w5xde.control.steps.plan import Cursor, StepPlan


@dataclass(slots=True)
class Progress:
    """How far the run is: plain counts, for views and summaries."""

    steps: int = 0
    epochs: int = 0
    batches: int = 0
    samples: int = 0
    # How many of the steps survive a crash.
    durable_steps: int = 0
    # How many had fewer nodes than their robust mean needs.
    degraded_steps: int = 0
    # Batches in answers that the coordinator computed again, and in those that it chose and could not.
    verified_batches: int = 0
    unverified_batches: int = 0


@dataclass(frozen=True, slots=True)
class Aside:
    """A batch that failed wherever it was tried, and took part in nothing."""

    epoch: int
    batch: int
    samples: int
    reason: str
    nodes: tuple[str, ...] = ()


@dataclass(slots=True)
class Accounts:
    """Epochs begun and not complete: their applied batches, their size once known, and what is set aside."""

    applied: dict[int, int] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    aside: list[Aside] = field(default_factory=list)
    # Complete are all epochs before the first one, and of the others these.
    complete_until: int = 0
    complete_also: list[int] = field(default_factory=list)

    def apply(self, step: StepPlan, batches: int) -> None:
        """This many batches of a step are applied."""
        self.applied[step.epoch] = self.applied.get(step.epoch, 0) + batches
        if step.ends_epoch:
            self.batches[step.epoch] = step.first + step.count

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
        """The epoch is complete."""
        self.applied.pop(epoch, None)
        del self.batches[epoch]
        self.complete_also.append(epoch)
        while self.complete_until in self.complete_also:
            self.complete_also.remove(self.complete_until)
            self.complete_until += 1

    def completed_since(self, before: Accounts) -> list[int]:
        """Epochs that are complete now and were not then."""
        now = [*range(before.complete_until, self.complete_until), *self.complete_also]
        return sorted(epoch for epoch in now if not before.is_complete(epoch))

    def copy(self) -> Accounts:
        return Accounts(
            dict(self.applied),
            dict(self.batches),
            list(self.aside),
            self.complete_until,
            list(self.complete_also),
        )


@dataclass(slots=True)
class UsualNorms:
    """The usual norms of updates, by the size of their span: medians, or the first norms until then."""

    # An update this many times as large as usual is doubted.
    factor: float
    medians: dict[int, float] = field(default_factory=dict)
    first: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cut:
    """The core's part of a checkpoint: after `version` steps, nothing of a step half done."""

    version: int
    progress: Progress
    cursor: Cursor
    # Steps handed out and not applied at this moment.
    undone: tuple[StepPlan, ...]
    accounts: Accounts
    # Seconds of training so far, in all lives of the coordinator.
    seconds: float = 0.0
    # None in checkpoints that were written before norms were kept.
    usual_norms: UsualNorms | None = None
