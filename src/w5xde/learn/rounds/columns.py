"""Columns: a node's part of a round. It makes steps with the job's optimizer, and gives their difference.

A column starts from the parameters of a version and from an optimizer's state that all nodes know, so that it
has the same result on any of them. What a node keeps between two columns is only a copy of what the
coordinator sent: its *replica*. Knows no leases and no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from w5xde.learn.job.job import BatchFailed, describe
from w5xde.learn.model.layout import FlatModel, Vector
from w5xde.learn.rounds.hand_over import HandOver
from w5xde.learn.rounds.replica import Replica, follow, replica_digest
from w5xde.learn.step.fast_optimizer import Stepper
from w5xde.learn.step.finite import Gauge
from w5xde.learn.train.trainer import Outcome, Task, Trainer
from w5xde.messages import Inner


class ColumnCancelled(Exception):
    """Nobody needs the column any more."""


@dataclass(frozen=True, slots=True)
class ColumnRules:
    """What every column of a run follows."""

    hand_over: HandOver
    make_optimizer: Callable[[], Optimizer]
    # The norm to which the gradient of each step is clipped; 0: it is not.
    clip_norm: float = 0.0


class Columns:
    """Computes columns on the model of a trainer, whose parameters are the replica."""

    def __init__(self, flat: FlatModel, trainer: Trainer, rules: ColumnRules) -> None:
        self._flat = flat
        self._trainer = trainer
        self._rules = rules
        # The layout of what columns give.
        self.vectors = self._vectors = rules.hand_over.vectors
        self._gauge = Gauge(self._vectors)
        self._start = flat.blueprint.new_vector(flat.state.device)
        self._parameters = [flat.tensors[entry] for entry in flat.blueprint.trained]
        # Never steps: shows which parameter is in which group, and the settings of each.
        self._settings = rules.make_optimizer()
        # How many groups the optimizer has: each has rates of its own.
        self.groups = len(self._settings.param_groups)
        # What the last round sent; None: there was none.
        self._last: Vector | None = None
        # The version of the replica; -1 if there is none, or it is not that of the coordinator.
        self.version = -1

    # --- the replica ------------------------------------------------------------------------------

    @property
    def digest(self) -> bytes:
        return replica_digest(self._flat.moving.raw)

    @property
    def is_whole(self) -> bool:
        """Whether all is there that a column starts from: what the last round sent may still be to come."""
        return self.version == 0 or (self.version > 0 and self._last is not None)

    def start_from(self, replica: Replica) -> None:
        """Compute the next column from this replica."""
        self._trainer.load(replica.state, whole=True)
        self._last = Vector.over(replica.last, self._vectors) if replica.last is not None else None

    def loaded(self, version: int) -> None:
        """The trainer was given the parameters of a version."""
        self.version = version
        self._last = None

    def follow(self, difference: Vector, after: int, version: int, digest: bytes, *, adds: bool) -> str:
        """Take what a round sent. Returns why the replica is not that of the coordinator, if it is not."""
        if self.version != (after if adds else version) or not after < version:
            self.version, was = -1, self.version
            return f"the difference from version {after} to {version} came to version {was}"
        if difference.raw.device != self._flat.state.device:
            difference = Vector.over(difference.raw.to(self._flat.state.device), self._vectors)
        if adds:
            follow(self._flat.moving, difference, self._vectors)
            self._trainer.reset_buffers()
            last = self._last.raw if self._last is not None else None
            self._rules.hand_over.accumulate(
                self._settings, self._parameters, last, difference.raw, version - after
            )
        self.version, self._last = version, difference
        if self.digest != digest:
            self.version = -1
            return f"the parameters of version {version} have another hash than the coordinator's"
        return ""

    # --- computing --------------------------------------------------------------------------------

    def compute(
        self, tasks: Sequence[Task], inner: Inner, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Outcome:
        """Make a step with each task. Returns the difference that they made, and the sum of their losses.

        Raises ColumnCancelled between two steps, if `is_cancelled` says so.
        """
        moving, start, trainer = self._flat.moving, self._start, self._trainer
        start.raw.copy_(moving.raw)
        trainer.keeps_buffers = True
        try:
            return self._compute(tasks, inner, is_cancelled)
        except ColumnCancelled:
            raise
        except (Exception, SystemExit) as error:
            raise error if isinstance(error, BatchFailed) else BatchFailed(describe(error)) from error
        finally:
            trainer.keeps_buffers = False
            moving.raw.copy_(start.raw)
            self._flat.reclaim()
            trainer.reset_buffers()

    def _compute(self, tasks: Sequence[Task], inner: Inner, is_cancelled: Callable[[], bool]) -> Outcome:
        rules, loss_sum = self._rules, 0.0
        optimizer = rules.make_optimizer()
        last = self._last.raw if self._last is not None else None
        rules.hand_over.restore(optimizer, self._parameters, last, inner)
        stepper = Stepper(optimizer, self._flat)
        for number, task in enumerate(tasks):
            if is_cancelled():
                raise ColumnCancelled
            _set_rates(optimizer, inner, number)
            found = self._trainer.compute(task)
            absent = frozenset(found.absent)
            with torch.no_grad():
                if rules.clip_norm:
                    stepper.clip(found.vector.parts, absent, rules.clip_norm)
                if not stepper.step(found.vector.parts, absent):
                    self._flat.gather()
            self._trainer.recycle(found.vector)
            loss_sum += found.loss_sum
        with torch.no_grad():
            return Outcome(self._difference(optimizer, len(tasks)), loss_sum, [])

    def _difference(self, optimizer: Optimizer, steps: int) -> Vector:
        difference = self._vectors.new_vector(self._flat.state.device)
        groups = self._vectors.moving_groups
        moves = zip(groups, difference.parts, self._flat.moving.parts, self._start.parts, strict=False)
        for group, part, now, before in moves:
            if group.dtype is torch.bool:
                part.copy_(now)
            else:
                torch.sub(now, before, out=part)
                # Equal means no difference, for infinities too (masks are often minus infinity).
                part.masked_fill_(now == before, 0)
        last = self._last.raw if self._last is not None else None
        self._rules.hand_over.summarize(optimizer, self._parameters, difference.raw, last, steps)
        if not self._gauge.is_finite(difference):
            raise BatchFailed("the steps of a column made numbers that are not finite")
        return difference


def _set_rates(optimizer: Optimizer, inner: Inner, number: int) -> None:
    """Set the learning rates, and the momenta if a schedule changes them, for one step of a column."""
    for place, group in enumerate(optimizer.param_groups):
        group["lr"] = inner.rates[number][place]
        if inner.momenta:
            momentum = inner.momenta[number][place]
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            else:
                group["momentum"] = momentum
