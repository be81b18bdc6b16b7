"""Local steps: a node makes an optimizer step of its own with each batch, and gives the difference they made.

The node's optimizer keeps its state from one stretch to the next; the coordinator never sees it. Each stretch
starts from the version's parameters and leaves them as they were. Meant for small models without buffers that
move, where a message takes longer than a batch. Knows no leases and no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from w5xde.learn.job.job import BatchFailed, describe
from w5xde.learn.model.layout import FlatModel, Vector
from w5xde.learn.step.fast_optimizer import Stepper
from w5xde.learn.step.finite import Gauge
from w5xde.learn.train.trainer import Outcome, Task, Trainer


class LocalSteps:
    """A node's own optimizer, on the model of its trainer."""

    def __init__(self, flat: FlatModel, trainer: Trainer, make_optimizer: Callable[[], Optimizer]) -> None:
        self._flat = flat
        self._trainer = trainer
        self._make_optimizer = make_optimizer
        blueprint = flat.blueprint
        self._gauge = Gauge(blueprint)
        self._start = blueprint.new_vector(flat.state.device)
        self._begin()

    def _begin(self) -> None:
        """Begin with an optimizer that has made no step."""
        self._stepper = Stepper(self._make_optimizer(), self._flat)

    def compute(self, tasks: Sequence[Task]) -> Outcome:
        """Make a step with each task. Returns the difference that all of them made, and the sum of losses."""
        moving, start = self._flat.moving, self._start
        start.raw.copy_(moving.raw)
        loss_sum = 0.0
        try:
            for task in tasks:
                found = self._trainer.compute(task)
                with torch.no_grad():
                    if not self._stepper.step(found.vector.parts, frozenset(found.absent)):
                        self._flat.gather()
                self._trainer.recycle(found.vector)
                loss_sum += found.loss_sum
            return Outcome(self._difference(), loss_sum, [])
        except (Exception, SystemExit) as error:
            # Its state may contain what made the steps fail.
            self._begin()
            raise error if isinstance(error, BatchFailed) else BatchFailed(describe(error)) from error
        finally:
            moving.raw.copy_(start.raw)

    def _difference(self) -> Vector:
        difference = self._flat.blueprint.new_vector(self._flat.state.device)
        with torch.no_grad():
            for part, now, before in zip(
                difference.parts, self._flat.moving.parts, self._start.parts, strict=True
            ):
                torch.sub(now, before, out=part)
        if not self._gauge.is_finite(difference):
            raise BatchFailed("the node's own steps made numbers that are not finite")
        return difference
