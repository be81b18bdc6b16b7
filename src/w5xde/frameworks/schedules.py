"""Schedules that move once an epoch, or every few batches, for an optimizer that steps as the run is planned.

Knows no framework. Counts steps, and gets the length of the run passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from w5xde.specs.planned_run import PlannedRun


@dataclass(slots=True)
class Pace:
    """A schedule, and when it moves: after every `frequency` epochs, or batches, of its framework's loop."""

    schedule: LRScheduler
    by_epoch: bool
    frequency: int
    # How many batches the framework's loop, which may have several devices, counts in one step.
    batches_per_step: int

    def is_due(self, step: int, run: PlannedRun) -> bool:
        """Whether the schedule moves after this step, counted from 1."""
        if run.epoch_steps is None or run.epoch_batches is None:
            return not self.by_epoch and step * self.batches_per_step % self.frequency == 0
        epoch, place = divmod(step - 1, run.epoch_steps)
        is_last = place + 1 == run.epoch_steps
        if self.by_epoch:
            return is_last and (epoch + 1) % self.frequency == 0
        seen = -(-run.epoch_batches * self.batches_per_step // run.step_batches)
        batches = seen if is_last else (place + 1) * self.batches_per_step
        return batches % self.frequency == 0


class PacedSchedules(LRScheduler):
    """Several schedules of one optimizer, each at its own pace, as one that is stepped after every step."""

    def __init__(self, optimizer: Optimizer, paces: Sequence[Pace], run: PlannedRun) -> None:
        # Not that of the base class: it would set learning rates of its own.
        self.optimizer = optimizer
        self.last_epoch = 0
        self._paces = list(paces)
        self._run = run

    def step(self, epoch: int | None = None) -> None:
        """An optimizer step was made."""
        self.last_epoch += 1
        for pace in self._paces:
            if pace.is_due(self.last_epoch, self._run):
                pace.schedule.step()

    def get_last_lr(self) -> list[float | Tensor]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "schedules": [p.schedule.state_dict() for p in self._paces]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        for pace, state in zip(self._paces, state_dict["schedules"], strict=True):
            pace.schedule.load_state_dict(state)
