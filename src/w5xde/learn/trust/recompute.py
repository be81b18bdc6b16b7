"""Recompute an update on the coordinator and compare: bit for bit, within rounding, or by size alone.

On machines of one kind the bits are the same. Unlike machines differ by rounding: the usual difference is
learned from pairs that agree, and an update is wrong only far outside of it, and only if our own result
repeats bit for bit. Knows no leases, nodes or sockets.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.job.job import BatchFailed
from w5xde.learn.model.layout import Blueprint, Vector
from w5xde.learn.rounds.columns import Columns
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.step.finite import Gauge, can_hold_nan
from w5xde.learn.train.trainer import Task, Trainer
from w5xde.message_types import Call, StepRates

# Relative differences that any machine's rounding may cause; beyond them, this many times the usual
# difference between pairs that agree is still accepted.
ROUNDING = {"fp32": 1e-3, "bf16": 3e-2}
FAR_FACTOR = 20.0
# No rounding is as large as this: beyond it an update is wrong, whatever was learned.
DIFFERENCE_MAX = 0.2
# How fast the usual difference follows new ones: slowly, so that one node cannot lead it far.
FOLLOW = 1.05
# Compute this often before a node is blamed.
OWN_TRIES = 3
# An update more than this many times as large as our own is wrong, whatever random numbers it drew.
SIZE_FACTOR = 4.0


class Opinion(NamedTuple):
    """What is wrong with an update, or why the coordinator cannot tell; both empty if it is right."""

    wrong: str = ""
    unknown: str = ""


class LeasedWork(NamedTuple):
    """What a lease asks for: one task; in rounds mode a task for each step of a column, and the rates.

    In a pool also the call of which it is a part.
    """

    tasks: list[Task]
    rates: StepRates | None = None
    call: Call | None = None


class Recomputed(NamedTuple):
    """An update as it arrives from a node, and what its batches weigh, if the job weighs batches."""

    vector: Vector
    weight: float | None = None


class LeaseComputer(Protocol):
    """Computes leases as a node does, on a model of its own."""

    @property
    def vectors(self) -> Blueprint:
        """The layout of its updates."""

    def compute(self, params: Replica, work: LeasedWork) -> Recomputed:
        """The update for this work. Raises BatchFailed."""


class GradientComputer:
    """Computes gradients."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.vectors = trainer.blueprint

    def compute(self, params: Replica, work: LeasedWork) -> Recomputed:
        self._trainer.load(params.state, whole=True)
        self._trainer.take_call(work.call)
        (task,) = work.tasks
        outcome = self._trainer.compute(task)
        return Recomputed(outcome.vector, outcome.weight)


class ColumnComputer:
    """Computes columns of rounds, and rounds them as the codec of nodes does."""

    def __init__(self, columns: Columns, codec: str) -> None:
        self._columns = columns
        self._pipeline = parse(codec)
        self.vectors = columns.vectors

    def compute(self, params: Replica, work: LeasedWork) -> Recomputed:
        if work.rates is None:
            raise ValueError("a column without rates")
        self._columns.start_from(params)
        raw = self._columns.compute(work.tasks, work.rates).vector.raw
        arrived = self.vectors.new_vector()
        groups = self.vectors.moving_groups
        self._pipeline.unpack(self._pipeline.pack(raw, groups), arrived.raw, groups)
        return Recomputed(arrived)


class Recomputer:
    """Computes leases again. Only one thread may use it at a time."""

    def __init__(self, computer: LeaseComputer, precision: str) -> None:
        self._computer = computer
        self._blueprint = computer.vectors
        self._gauge = Gauge(computer.vectors)
        self._rounding = ROUNDING[precision]
        # A running median of the differences between pairs that agree.
        self._usual_difference = 0.0
        # The usual norm of a gradient: a difference is not measured relative to one that is almost zero.
        self._usual_norm = 0.0

    @property
    def tolerance(self) -> float:
        return min(DIFFERENCE_MAX, max(self._rounding, FAR_FACTOR * self._usual_difference))

    def check(self, given: Vector, params: Replica, work: LeasedWork, weight: float | None = None) -> Opinion:
        """Compare an update for this work, computed on these parameters, with our own, number by number.

        `weight` is what its node says that the batches weigh, if the job weighs batches.
        """
        compute = self._computer.compute
        try:
            own, own_weight = compute(params, work)
            if not self._is_near(own_weight, weight):
                return _other_weight(weight, own_weight)
            if own.is_same(given):
                return Opinion()
            for _ in range(OWN_TRIES - 1):
                if not compute(params, work).vector.is_same(own):
                    return Opinion(unknown="it comes out differently each time that it is computed here")
        except BatchFailed as error:
            return Opinion(unknown=f"it cannot be computed here: {error}")
        name, difference = self._difference(own, given)
        if difference > self.tolerance:
            wrong = f"it differs by {difference:.2g} of its size, most in {name}"
            return Opinion(f"{wrong} ({self.tolerance:.2g} is rounding)")
        usual = self._usual_difference or difference
        self._usual_difference = usual * (FOLLOW if difference > usual else 1 / FOLLOW)
        return Opinion()

    def check_size(
        self, given: Vector, params: Replica, work: LeasedWork, weight: float | None = None
    ) -> Opinion:
        """Compare only the sizes: for updates that lost precision on the way, or drew other numbers."""
        norm, own = self._gauge.norm(given), 0.0
        try:
            for _ in range(OWN_TRIES):
                found = self._computer.compute(params, work)
                if not self._is_near(found.weight, weight):
                    return _other_weight(weight, found.weight)
                own = max(own, self._gauge.norm(found.vector))
                if norm <= SIZE_FACTOR * own:
                    return Opinion()
        except BatchFailed as error:
            return Opinion(unknown=f"it cannot be computed here: {error}")
        return Opinion(f"its norm is {norm:.3g}, and {own:.3g} if computed here")

    def _is_near(self, ours: float | None, theirs: float | None) -> bool:
        """Whether two weights differ by rounding alone, if batches are weighed."""
        if ours is None or theirs is None:
            return ours is theirs
        return math.isclose(ours, theirs, rel_tol=self._rounding)

    def _difference(self, ours: Vector, theirs: Vector) -> tuple[str, float]:
        """Return the entry that differs most, and the relative difference of the two updates."""
        worst, most = "", -1.0
        gaps = size = 0.0
        entries = self._blueprint.layout.entries
        for group, mine, other in zip(self._blueprint.moving_groups, ours.parts, theirs.parts, strict=True):
            if not can_hold_nan(group.dtype):
                if not torch.equal(mine, other):
                    return entries[group.entries[0]].name, math.inf
                continue
            at = 0
            for i in group.entries:
                count = math.prod(entries[i].shape)
                a, b = mine[at : at + count], other[at : at + count]
                at += count
                gap = _square(a - b)
                gaps += gap
                size += max(_square(a), _square(b))
                if gap > most:
                    worst, most = entries[i].name, gap
        norm = math.sqrt(size)
        self._usual_norm = max(0.99 * self._usual_norm, norm if gaps < size else 0.0)
        return worst, math.sqrt(gaps) / max(norm, 1e-3 * self._usual_norm, 1e-30)


def _other_weight(theirs: float | None, ours: float | None) -> Opinion:
    return Opinion(f"its batches weigh {theirs}, and {ours} if weighed here")


def _square(part: torch.Tensor) -> float:
    wide = torch.view_as_real(part).double() if part.is_complex() else part.double()
    return float((wide * wide).sum())
