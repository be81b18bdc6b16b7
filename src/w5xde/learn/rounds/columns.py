"""Columns: a node's part of a round. It makes steps with the job's optimizer, and gives their difference.

A column starts from the parameters of a version and from an optimizer's state that all nodes know, so that it
has the same result on any of them. What a node keeps between two columns is only a copy of what the
coordinator sent: its *replica*. Knows no leases and no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from w5xde.learn.model.layout import Vector
from w5xde.learn.rounds.hand_over import HandOver
from w5xde.learn.rounds.replica import Replica, move_replica, replica_digest
from w5xde.learn.step.fast_optimizer import Stepper
from w5xde.learn.step.local_steps import StepsCancelled, TemporarySteps
from w5xde.learn.train.trainer import Outcome, Task, Trainer
from w5xde.message_types import StepRates


@dataclass(frozen=True, slots=True)
class ColumnRules:
    """What every column of a run follows."""

    hand_over: HandOver
    make_optimizer: Callable[[], Optimizer]
    # The norm to which the gradient of each step is clipped; 0: it is not.
    clip_norm: float = 0.0


class Columns:
    """Computes columns on the model of a trainer, whose parameters are the replica."""

    def __init__(self, trainer: Trainer, rules: ColumnRules) -> None:
        flat = self._flat = trainer.flat
        self._trainer = trainer
        self._rules = rules
        # The layout of what columns give.
        self.vectors = rules.hand_over.vectors
        self._steps = TemporarySteps(trainer, self.vectors)
        self._parameters = [flat.tensors[entry] for entry in flat.blueprint.trained]
        # Never steps: shows which parameter is in which group, and the settings of each.
        self._settings = rules.make_optimizer()
        # How many groups the optimizer has: each has rates of its own.
        self.groups = len(self._settings.param_groups)
        # The bytes of what the last round sent; None: there was none.
        self._last: Tensor | None = None
        # The version of the replica; -1 if there is none, or it is not that of the coordinator.
        self.version = -1

    # --- the replica ------------------------------------------------------------------------------

    @property
    def digest(self) -> bytes:
        return replica_digest(self._flat.moving.raw, self._last)

    @property
    def is_whole(self) -> bool:
        """Whether all is there that a column starts from: what the last round sent may still be to come."""
        return self.version == 0 or (self.version > 0 and self._last is not None)

    def start_from(self, replica: Replica) -> None:
        """Compute the next column from this replica."""
        self._trainer.load(replica.state, whole=True)
        self._last = replica.last

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
            difference = Vector.over(difference.raw.to(self._flat.state.device), self.vectors)
        if adds:
            move_replica(self._flat.moving, difference, self.vectors)
            self._trainer.reset_buffers()
            self._rules.hand_over.accumulate(
                self._settings, self._parameters, self._last, difference.raw, version - after
            )
        self.version, self._last = version, difference.raw
        if self.digest != digest:
            self.version = -1
            return f"the replica of version {version} has another hash than the coordinator's"
        return ""

    # --- computing --------------------------------------------------------------------------------

    def compute(
        self, tasks: Sequence[Task], rates: StepRates, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Outcome:
        """Make a step with each task. Returns the difference that they made, and the sum of their losses.

        Raises StepsCancelled between two steps, if `is_cancelled` says so.
        """
        rules, steps = self._rules, self._steps
        with steps.begin():
            optimizer, loss_sum = rules.make_optimizer(), 0.0
            rules.hand_over.restore(optimizer, self._parameters, self._last, rates)
            stepper = Stepper(optimizer, self._flat)
            for number, task in enumerate(tasks):
                if is_cancelled():
                    raise StepsCancelled
                _set_rates(optimizer, rates, number)
                loss_sum += steps.make(stepper, task, rules.clip_norm)

            def summarize(difference: Vector) -> None:
                parameters, raw = self._parameters, difference.raw
                rules.hand_over.summarize(optimizer, parameters, raw, self._last, len(tasks))

            return Outcome(steps.difference(summarize), loss_sum, [])


def _set_rates(optimizer: Optimizer, rates: StepRates, number: int) -> None:
    """Set the learning rates, and the momenta if a schedule changes them, for one step of a column."""
    for place, group in enumerate(optimizer.param_groups):
        group["lr"] = rates.of_steps[number][place]
        if rates.momenta:
            momentum = rates.momenta[number][place]
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            else:
                group["momentum"] = momentum
