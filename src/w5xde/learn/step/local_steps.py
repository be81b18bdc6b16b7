"""Local steps: a node makes optimizer steps of its own on its model, gives their difference, and undoes them.

`TemporarySteps` is the part that stretches (async mode) and columns (rounds mode, `learn/rounds`) share. In a
stretch the node's optimizer keeps its state from one stretch to the next, and the coordinator never sees it;
stretches are meant for small models without buffers that move, where a message takes longer than a batch.
Knows no leases and no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from w5xde.learn.job.job import BatchFailed, describe
from w5xde.learn.model.cumulative_averages import CumulativeAverages
from w5xde.learn.model.layout import Blueprint, Vector
from w5xde.learn.step.fast_optimizer import Stepper
from w5xde.learn.step.finite import Gauge
from w5xde.learn.train.trainer import Outcome, Task, Trainer
from w5xde.messages import TRAINED


class StepsCancelled(Exception):
    """Nobody needs the steps any more."""


class TemporarySteps:
    """Makes steps on the model of a trainer, and restores the model afterwards."""

    def __init__(self, trainer: Trainer, vectors: Blueprint) -> None:
        """`vectors` is the layout of differences: that of the model, perhaps with more behind it."""
        flat = self._flat = trainer.flat
        self._trainer = trainer
        self._vectors = vectors
        self._gauge = Gauge(vectors)
        self._start = flat.blueprint.new_vector(flat.state.device)
        self._averages = CumulativeAverages(flat.module, flat.blueprint)
        # Where the buffers begin among the parts of a vector.
        self._buffers = sum(group.role == TRAINED for group in flat.blueprint.moving_groups)

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Let steps be made until the block ends. An error in the block becomes BatchFailed."""
        moving, trainer = self._flat.moving, self._trainer
        self._start.raw.copy_(moving.raw)
        trainer.keeps_buffers = True
        try:
            yield
        except (BatchFailed, StepsCancelled):
            raise
        except (Exception, SystemExit) as error:
            raise BatchFailed(describe(error)) from error
        finally:
            trainer.keeps_buffers = False
            moving.raw.copy_(self._start.raw)
            self._flat.reclaim()
            trainer.reset_buffers()

    def make(self, stepper: Stepper, task: Task, clip_norm: float = 0.0) -> float:
        """Make one step with the gradient of a task, clipped if a norm is given. Returns the task's loss."""
        found = self._trainer.compute(task)
        absent = frozenset(found.absent)
        with torch.no_grad():
            if clip_norm:
                stepper.clip(found.vector.parts, absent, clip_norm)
            if not stepper.step(found.vector.parts, absent):
                self._flat.gather()
        self._trainer.recycle(found.vector)
        return found.loss_sum

    @torch.no_grad()
    def difference(self, complete: Callable[[Vector], None] = lambda vector: None) -> Vector:
        """What the steps since `begin` have changed. `complete` writes what else belongs into the vector."""
        found = self._vectors.new_vector(self._flat.state.device)
        # What the layout has behind that of the model is for `complete`.
        for part, now, before in zip(found.parts, self._flat.moving.parts, self._start.parts, strict=False):
            if part.dtype is torch.bool:
                part.copy_(now)
            else:
                torch.sub(now, before, out=part)
                # Equal means no difference, for infinities too (masks are often minus infinity).
                part.masked_fill_(now == before, 0)
        self._averages.make_sums(found.parts[self._buffers :], self._start.parts[self._buffers :])
        complete(found)
        if not self._gauge.is_finite(found):
            raise BatchFailed("the node's own steps made numbers that are not finite")
        return found


class LocalSteps:
    """A node's own optimizer, for stretches."""

    def __init__(self, trainer: Trainer, make_optimizer: Callable[[], Optimizer]) -> None:
        self._flat = trainer.flat
        self._make_optimizer = make_optimizer
        self._steps = TemporarySteps(trainer, trainer.blueprint)
        self._begin()

    def _begin(self) -> None:
        """Begin with an optimizer that has made no step."""
        self._stepper = Stepper(self._make_optimizer(), self._flat)

    def compute(self, tasks: Sequence[Task]) -> Outcome:
        """Make a step with each task. Returns the difference that all of them made, and the sum of losses."""
        try:
            with self._steps.begin():
                loss_sum = sum([self._steps.make(self._stepper, task) for task in tasks])
                weights = [task.weight for task in tasks if task.weight is not None]
                weight = sum(weights) if weights else None
                return Outcome(self._steps.difference(), loss_sum, [], weight=weight)
        except BatchFailed:
            # Its state may contain what made the steps fail.
            self._begin()
            raise
