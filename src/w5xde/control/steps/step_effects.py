"""What is done to the sum of a step: an answer is added, the step is made, undone or begun again.

Users find these among all others in `control/events.py`. Knows no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from w5xde.control.steps.leases import Lease
from w5xde.control.steps.open_step import Share
from w5xde.control.steps.plan import StepPlan
from w5xde.tree import Span


@dataclass(slots=True)
class Fold:
    """Add the answer to this lease to its step.

    `staleness`: how many updates of the model were decided since the version that it was computed on.
    """

    lease: Lease
    staleness: int = 0


@dataclass(slots=True)
class Step:
    """Step the optimizer, or for a stretch add the steps that a node made: every batch is in, or set aside.

    `shares`: which node computed which batches, or which columns of a round. `rate`: a factor on the learning
    rate of this step alone, or on the difference that a stretch makes.
    """

    plan: StepPlan
    version: int
    shares: list[Share]
    rate: float = 1.0

    @property
    def steps(self) -> int:
        """The number of versions that it makes."""
        return self.plan.steps

    @property
    def samples(self) -> int:
        """The number of samples that take part: those of batches that were set aside do not."""
        if sum([stop - start for start, stop, _, _ in self.shares]) == self.plan.count:
            return self.plan.samples
        return sum(self.plan.samples_of(Span(start, stop)) for start, stop, _, _ in self.shares)

    @property
    def batches(self) -> int:
        """The number of batches that take part."""
        return sum([stop - start for start, stop, _, _ in self.shares]) * self.plan.leaf_batches


@dataclass(slots=True)
class Undone:
    """An event: the learner rolled this step back: numbers were not finite, or the optimizer raised.

    `is_final`: the run ends with it. Without a reason: the learner did not try this step, because it rolled
    an earlier one back.
    """

    step: Step
    reason: str = ""
    is_final: bool = False


@dataclass(slots=True)
class SetAside:
    """Leave the place of this batch, or column, in the step's tree empty: it failed on each of `nodes`.

    If it `is_all`, a call of a pool is given up: nothing of it is applied. The version grows all the same,
    because the caller may change the parameters before the next call.
    """

    plan: StepPlan
    span: Span
    reason: str
    nodes: list[str]
    is_all: bool = False


@dataclass(slots=True)
class Reopen:
    """Forget all sums of this step: it has changed nothing, and its batches are lent again.

    `empty`: the batches that were set aside, whose places in the tree stay empty.
    """

    plan: StepPlan
    version: int
    empty: list[Span]
