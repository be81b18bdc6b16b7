"""Sums of updates: puts the updates of each open step together until the step is complete.

Batches of one step are added in the canonical tree over batch numbers, never in the order of arrival: float
addition is not associative, and one seed must give the same bits. Knows no optimizer and no leases' rules:
the core decides which updates count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from w5xde.learn.model.layout import Blueprint, Vector
from w5xde.learn.step.finite import Gauge
from w5xde.messages import MOVING
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


class Total(NamedTuple):
    """The sum of a whole step; `batches` counts those that were set aside, too."""

    batches: int
    contribution: Contribution


class StepNotFinite(ArithmeticError):
    """A step would leave numbers that are not finite.

    If it `is_rolled_back`, the state and the version are what they were before it.
    """

    def __init__(self, what: str, *, is_rolled_back: bool) -> None:
        super().__init__(what)
        self.is_rolled_back = is_rolled_back


class PlannedStep(Protocol):
    """A step of the plan; if it is `apart`, a stretch, each of whose batches is an optimizer step."""

    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def apart(self) -> bool: ...
    @property
    def sizes(self) -> Sequence[int]: ...


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
    def shares(self) -> Sequence[tuple[int, int, str, int]]: ...


class StepSums(Protocol):
    """What collects the updates of open steps: `TreeSums`, or `RobustSums` with `--robust`."""

    def add(self, lease: Leased, given: list[Contribution], staleness: int) -> None:
        """Take the update of a lease: one contribution, or one for each batch of a stretch."""

    def leave_empty(self, step: PlannedStep, spans: Iterable[Span]) -> None:
        """No update will come for these batches: they were set aside."""

    def drop(self, step: int) -> None:
        """Forget what was collected for this step."""

    def totals(self, step: Decided) -> list[Total]:
        """The sum of a complete step, or of a stretch each of its steps, in the order to apply them.

        Raises StepNotFinite if a sum is not finite.
        """


class TreeSums:
    """Adds in the canonical tree."""

    def __init__(self, blueprint: Blueprint, gauge: Gauge) -> None:
        self._gauge = gauge
        # Places, in a vector's parts, of the buffers that move by the mean of their changes.
        self._averaged = [
            i
            for i, group in enumerate(blueprint.moving_groups)
            if group.role == MOVING and (group.dtype.is_floating_point or group.dtype.is_complex)
        ]
        # Of a stretch, and of a step of one batch: contributions by batch. No tree is needed.
        self._single: dict[int, dict[int, Contribution]] = {}
        # A batch that was set aside has its place in the tree, with None in it.
        self._trees: dict[int, PairwiseTree[Contribution | None]] = {}

    def add(self, lease: Leased, given: list[Contribution], staleness: int) -> None:
        step, first = lease.step, lease.span.start
        if step.apart or step.count == 1:
            kept = self._single.setdefault(step.index, {})
            for place, contribution in enumerate(given, first):
                self._average_buffers(contribution.vector, staleness + place)
                kept[place] = contribution
            return
        self._average_buffers(given[0].vector, staleness)
        self._tree(step).put(lease.span, given[0])

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
            for i in self._averaged:
                vector.parts[i].div_(staleness + 1)

    def leave_empty(self, step: PlannedStep, spans: Iterable[Span]) -> None:
        if step.apart or step.count == 1:
            return  # there is no sum with a gap in it
        for span in spans:
            tree = self._tree(step)
            tree.put(span, None)
            if tree.is_complete and all(value is None for _, value in tree):
                del self._trees[step.index]  # every batch was set aside: this step is never applied

    def drop(self, step: int) -> None:
        self._single.pop(step, None)
        self._trees.pop(step, None)

    def totals(self, step: Decided) -> list[Total]:
        index = step.plan.index
        kept = self._single.pop(index, None)
        if kept is not None:
            return [self._total(index + place, 1, kept[place]) for place in sorted(kept)]
        tree = self._trees.pop(index)
        contribution = tree.take(Span(0, tree.count))
        if contribution is None:
            raise ValueError(f"no update came for step {index}")
        return [self._total(index, tree.count, contribution)]

    def _total(self, step: int, batches: int, contribution: Contribution) -> Total:
        # Buffers are not part of the norm, and their sums may overflow.
        is_tame = contribution.norm < TAME_NORM and (batches == 1 or not self._averaged)
        if not is_tame and not self._gauge.is_finite(contribution.vector):
            raise StepNotFinite(f"the gradient of step {step + 1} is not finite", is_rolled_back=True)
        return Total(batches, contribution)


def _merge(left: Contribution | None, right: Contribution | None) -> Contribution | None:
    if left is None or right is None:
        return left or right
    return Contribution(
        left.vector.add_(right.vector),
        left.absent & right.absent,
        left.loss_sum + right.loss_sum,
        left.norm + right.norm,
    )
