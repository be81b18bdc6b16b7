"""Schedules at the pace of a loop of a framework: when they move, and what a checkpoint keeps of them."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from w5xde.frameworks.schedules import Pace, PacedSchedules
from w5xde.specs.planned_run import PlannedRun


def run(samples: int | None, *, step_batches: int) -> PlannedRun:
    return PlannedRun.of(
        samples=samples, batch_size=1, step_batches=step_batches, epoch_limit=3, step_limit=None
    )


def made(pace: Pace, planned: PlannedRun) -> PacedSchedules:
    return PacedSchedules(pace.schedule.optimizer, [pace], planned)


def halving() -> StepLR:
    return StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), 1, 0.5)


@pytest.mark.parametrize(
    ("by_epoch", "frequency", "batches_per_step", "samples", "step_batches", "expected"),
    [
        # Seven batches an epoch, two a step: four steps, of which the last has one batch.
        (True, 1, 2, 7, 2, [4, 8, 12]),
        (True, 2, 2, 7, 2, [8]),
        (False, 1, 2, 7, 2, list(range(1, 13))),
        # After batches 3, 6 of an epoch: only 6 ends a step; and the last batch is the seventh.
        (False, 3, 2, 7, 2, [3, 7, 11]),
        (False, 7, 2, 7, 2, [4, 8, 12]),
        # Two devices with one batch each: the loop of each counts one batch a step, and four in an epoch.
        (False, 2, 1, 7, 2, [2, 4, 6, 8, 10, 12]),
        # A stream has no end that is known.
        (False, 3, 1, None, 1, [3, 6, 9, 12]),
    ],
)
def test_a_schedule_moves_after_the_same_batches_as_in_its_loop(
    by_epoch: bool,
    frequency: int,
    batches_per_step: int,
    samples: int | None,
    step_batches: int,
    expected: list[int],
) -> None:
    pace = Pace(halving(), by_epoch, frequency, batches_per_step)
    planned = run(samples, step_batches=step_batches)
    assert [step for step in range(1, 13) if pace.is_due(step, planned)] == expected


def stepped(schedule: PacedSchedules, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
    return rates


def test_a_checkpoint_keeps_the_place_of_every_schedule() -> None:
    planned = run(4, step_batches=2)
    whole = made(Pace(halving(), True, 1, 2), planned)
    expected = stepped(whole, 6)
    first = made(Pace(halving(), True, 1, 2), planned)
    assert stepped(first, 3) == expected[:3] == [1.0, 0.5, 0.5]
    second = made(Pace(halving(), True, 1, 2), planned)
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert stepped(second, 3) == expected[3:]
