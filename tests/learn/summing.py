"""Leases and steps for tests of sums: as much of them as `StepSums` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from w5xde.control.steps.plan import StepPlan
from w5xde.learn.step.sums import Contribution, PlannedStep, StepSums, Total
from w5xde.tree import Span


def planned(index: int, sizes: Sequence[int], *, columns: int = 0) -> StepPlan:
    """A step of batches of these sizes, or a round of so many columns."""
    return StepPlan(index, 0, 0, tuple(sizes), ends_epoch=False, columns=columns)


class Lent(NamedTuple):
    """A lease of some batches of a step."""

    id: int
    step: PlannedStep
    span: Span


class Complete(NamedTuple):
    """A step whose updates are all there."""

    plan: PlannedStep
    shares: Sequence[tuple[int, int, str, int]] = ()
    rate: float = 1.0


def fold(
    sums: StepSums, index: int, count: int, span: Span, given: Contribution, staleness: int = 0
) -> Complete:
    """Add an update for some batches of a step; returns the step."""
    step = planned(index, [1] * count)
    sums.add(Lent(0, step, span), given, staleness)
    return Complete(step)


def whole_step(sums: StepSums, index: int, given: Contribution, staleness: int = 0) -> list[Total]:
    """The sum of a step of one batch."""
    return [sums.total(fold(sums, index, 1, Span(0, 1), given, staleness))]
