"""Sums of updates: puts the updates of each open step together until the step is complete.

Batches of one step are added in the canonical tree over batch numbers, never in the order of arrival: float
addition is not associative, and one seed must give the same bits. Knows no optimizer and no leases' rules:
the core decides which updates count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from w5xde.learn.model.cumulative_averages import CumulativeAverages
from w5xde.learn.model.layout import Blueprint, DtypeGroup, Vector
from w5xde.learn.step.finite import Gauge
from w5xde.messages import MOVING, TRAINED
from w5xde.tree import PairwiseTree, Span

# Sums of gradients below this norm are finite, and so are their squares, in float32 and wider.
TAME_NORM = 1e15


class Contribution(NamedTuple):
    """An update for a span of batches: its vector, the trained entries without a gradient, its loss."""

    vector: Vector
    absent: frozenset[int]
    loss_sum: float
    # An upper bound of the norm of its gradients, if its numbers are known to be finite; else infinity.
    norm: float = math.inf
    # The squared norm of each batch's gradient before its weight, if the node reported them.
    squares: tuple[float, ...] = ()
    # The sum of the weights of its batches, if the job weighs batches; then the loss is summed by weight too.
    weight: float | None = None

    def mean_loss(self, samples: int) -> float:
        """The mean loss of its batches, which have so many samples; 0 if they weigh nothing."""
        if self.weight is None:
            return self.loss_sum / samples
        return self.loss_sum / self.weight if self.weight else 0.0


class Total(NamedTuple):
    """The sum of a whole step; `batches` counts those that were set aside, too.

    `rate`: a factor on the learning rate of this one step. If `is_stretch`, a node has made a step with each
    of the batches, and the vector is the difference that they made: it is added, times the rate.
    For a round of `round_steps` steps, the vector is the mean difference of its columns, which `batches`
    counts.
    """

    batches: int
    contribution: Contribution
    rate: float = 1.0
    is_stretch: bool = False
    # The squared norm of the sum's gradients, if its contribution has those of all batches; else None.
    square: float | None = None
    round_steps: int = 0

    @property
    def steps(self) -> int:
        """The number of versions that it makes."""
        return self.round_steps or (self.batches if self.is_stretch else 1)


class StepNotFinite(ArithmeticError):
    """A step would leave numbers that are not finite. `Learner.is_whole` tells whether it was rolled back."""


class PlannedStep(Protocol):
    """A step of the plan; if it is `apart`, a stretch, with each of whose batches a node makes a step.

    If it has `columns`, it is a round, and `count` is their number.
    """

    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def apart(self) -> bool: ...
    @property
    def columns(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def samples(self) -> int: ...
    def samples_of(self, span: Span) -> int: ...


class Leased(Protocol):
    """The batches `span` of a step, lent under a number."""

    @property
    def id(self) -> int: ...
    @property
    def step(self) -> PlannedStep: ...
    @property
    def span(self) -> Span: ...


class Decided(Protocol):
    """A step whose updates are complete; shares are (first batch, last batch + 1, node, lease)."""

    @property
    def plan(self) -> PlannedStep: ...
    @property
    def rate(self) -> float: ...
    @property
    def shares(self) -> Sequence[tuple[int, int, str, int]]: ...


class StepSums(Protocol):
    """What collects the updates of open steps: `TreeSums`, or `RobustSums` with `--robust`."""

    def add(self, lease: Leased, given: Contribution, staleness: int) -> None:
        """Take the update of a lease."""

    def leave_empty(self, step: PlannedStep, spans: Iterable[Span]) -> None:
        """No update will come for these batches: they were set aside."""

    def drop(self, step: int) -> None:
        """Forget what was collected for this step."""

    def total(self, step: Decided) -> Total:
        """The sum of a complete step. Raises StepNotFinite if it is not finite."""


class TreeSums:
    """Adds in the canonical tree."""

    def __init__(
        self, blueprint: Blueprint, gauge: Gauge, averages: CumulativeAverages | None = None
    ) -> None:
        """`averages` are buffers of which updates carry sums, not changes."""
        self._gauge = gauge
        self._groups = blueprint.moving_groups
        self._trained = frozenset(blueprint.trained)
        self._averages = averages
        # Where the buffers begin among a vector's parts.
        self._buffers = sum(group.role == TRAINED for group in blueprint.moving_groups)
        # Places, in a vector's parts, of the buffers that move by the mean of their changes.
        self._averaged = [
            i
            for i, group in enumerate(blueprint.moving_groups)
            if group.role == MOVING and (group.dtype.is_floating_point or group.dtype.is_complex)
        ]
        # The whole of a stretch, or of a step of one batch. No tree is needed.
        self._single: dict[int, Contribution] = {}
        # A batch that was set aside has its place in the tree, with None in it.
        self._trees: dict[int, PairwiseTree[Contribution | None]] = {}

    def add(self, lease: Leased, given: Contribution, staleness: int) -> None:
        self._average_buffers(given.vector, staleness)
        if lease.step.columns:
            given = weigh_column(lease, given, self._groups)
        given = clear_weightless(given, self._groups)
        if _is_single(lease.step):
            self._single[lease.step.index] = given
        else:
            self._tree(lease.step).put(lease.span, given)

    def _tree(self, step: PlannedStep) -> PairwiseTree[Contribution | None]:
        tree = self._trees.get(step.index)
        if tree is None:
            tree = self._trees[step.index] = PairwiseTree(step.count, _merge)
        return tree

    def _average_buffers(self, vector: Vector, staleness: int) -> None:
        """`staleness` other steps saw the same buffers: these move by the mean of all their changes.

        Each change in full would move the buffers the same way again and again, and past the right value:
        from sixteen steps on a running variance swings further each time, until it is below zero.
        """
        if staleness:
            buffers = vector.parts[self._buffers :]
            sums = self._averages.values(buffers) if self._averages is not None else []
            for i in self._averaged:
                vector.parts[i].div_(staleness + 1)
            if self._averages is not None:
                self._averages.write(buffers, sums)

    def leave_empty(self, step: PlannedStep, spans: Iterable[Span]) -> None:
        if _is_single(step):
            return  # there is no sum with a gap in it
        for span in spans:
            tree = self._tree(step)
            tree.put(span, None)
            if tree.is_complete and all(value is None for _, value in tree):
                del self._trees[step.index]  # every batch was set aside: this step is never applied

    def drop(self, step: int) -> None:
        self._single.pop(step, None)
        self._trees.pop(step, None)

    def total(self, step: Decided) -> Total:
        plan = step.plan
        contribution = self._single.pop(plan.index, None)
        if not _is_single(plan):
            tree = self._trees.pop(plan.index)
            contribution = tree.take(Span(0, tree.count))
        if contribution is None:
            raise ValueError(f"no update came for step {plan.index}")
        if plan.columns:
            contribution = complete_mean(step, contribution, self._groups)
        if contribution.weight is not None:
            if contribution.weight and not _is_single(plan):
                contribution = divide_by_weight(contribution, plan, self._groups)
            contribution = complete_weighted(step, contribution, self._trained)
        # Buffers are not part of the norm, and their sums may overflow.
        is_tame = contribution.norm < TAME_NORM and (plan.count == 1 or not self._averaged)
        if not is_tame and not self._gauge.is_finite(contribution.vector):
            raise StepNotFinite(f"the gradient of step {plan.index + 1} is not finite")
        is_measured = len(contribution.squares) >= max(2, plan.count)
        square = self._gauge.norm(contribution.vector) ** 2 if is_measured else None
        return Total(plan.count, contribution, step.rate, plan.apart, square, round_steps_of(plan))


def round_steps_of(plan: PlannedStep) -> int:
    """The number of steps in a round; 0 if this is none."""
    return plan.steps if plan.columns else 0


def weigh_column(lease: Leased, given: Contribution, groups: Sequence[DtypeGroup]) -> Contribution:
    """Weigh the difference of a column by its samples, so that the sum of all columns is their mean.

    Buffers are not weighed: they move by the mean over columns, as they do by that over batches.
    """
    weight = lease.step.samples_of(lease.span) / lease.step.samples
    _scale(given.vector, weight, groups)
    return given._replace(norm=given.norm * weight)


def complete_mean(step: Decided, total: Contribution, groups: Sequence[DtypeGroup]) -> Contribution:
    """The mean of the columns that are there, if others were set aside."""
    plan = step.plan
    samples = sum(plan.samples_of(Span(start, stop)) for start, stop, _, _ in step.shares)
    if samples == plan.samples:
        return total
    _scale(total.vector, plan.samples / samples, groups)
    return total._replace(norm=total.norm * plan.samples / samples)


def clear_weightless(given: Contribution, groups: Sequence[DtypeGroup]) -> Contribution:
    """Leave no gradient in an update whose batches weigh nothing: nothing else would bound it."""
    if given.weight != 0:
        return given
    _scale(given.vector, 0.0, groups)
    return given._replace(norm=0.0)


def divide_by_weight(given: Contribution, plan: PlannedStep, groups: Sequence[DtypeGroup]) -> Contribution:
    """The weighted mean of batches whose gradients were each multiplied by weight over samples of the step.

    Batches that were set aside do not count. Buffers move by the mean over batches, whatever these weigh.
    """
    factor = plan.samples / (given.weight or 1.0)
    _scale(given.vector, factor, groups)
    return given._replace(norm=given.norm * factor)


def complete_weighted(step: Decided, mean: Contribution, trained: frozenset[int]) -> Contribution:
    """The weighted mean of a whole step, with its loss as a sum over samples, as that of other steps.

    If all batches of the step weigh nothing, no parameter has a gradient, and the optimizer moves none.
    """
    samples = sum(step.plan.samples_of(Span(start, stop)) for start, stop, _, _ in step.shares)
    absent = mean.absent if mean.weight else trained
    return mean._replace(absent=absent, loss_sum=samples * mean.mean_loss(samples))


def _scale(vector: Vector, factor: float, groups: Sequence[DtypeGroup]) -> None:
    for group, part in zip(groups, vector.parts, strict=True):
        if group.role != MOVING:
            part.mul_(factor)


def _is_single(step: PlannedStep) -> bool:
    """Whether one update makes the whole step."""
    return step.apart or step.count == 1


def _merge(left: Contribution | None, right: Contribution | None) -> Contribution | None:
    if left is None or right is None:
        return left or right
    return Contribution(
        left.vector.add_(right.vector),
        left.absent & right.absent,
        left.loss_sum + right.loss_sum,
        left.norm + right.norm,
        left.squares + right.squares if left.squares and right.squares else (),
        None if left.weight is None or right.weight is None else left.weight + right.weight,
    )
