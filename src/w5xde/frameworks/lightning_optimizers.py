"""What `configure_optimizers` returns, as one optimizer and the paces of its schedules.

Knows every form that Lightning allows, and refuses what a pool cannot step.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from w5xde.errors import JobError
from w5xde.frameworks.refusals import POOL
from w5xde.frameworks.schedules import Pace


def read_optimizers(found: Any, accumulation: int) -> tuple[Optimizer, list[Pace]]:
    """The optimizer, and its schedules; `accumulation`: how many batches Lightning counts in a step."""
    optimizers, schedules = _parts(found)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise JobError(
            f"configure_optimizers returned {_listed(optimizers)}",
            code="W5-294",
            why="a run steps one optimizer, from the mean of the gradients of all batches of a step",
            fix=f"return one optimizer, with parameter groups if need be; or {POOL}",
        )
    return optimizers[0], [_pace(each, accumulation) for each in schedules]


def _parts(found: Any) -> tuple[list[Any], list[Any]]:
    """The optimizers and the schedules in a result, which has one of six forms."""
    if isinstance(found, dict):
        return [found.get("optimizer")], [found["lr_scheduler"]] if "lr_scheduler" in found else []
    if isinstance(found, list | tuple):
        if len(found) == 2 and isinstance(found[0], list | tuple):
            schedules = found[1] if isinstance(found[1], list | tuple) else [found[1]]
            return list(found[0]), list(schedules)
        if found and all(isinstance(each, dict) for each in found):
            pairs = [_parts(each) for each in found]
            return [each for one, _ in pairs for each in one], [each for _, all_ in pairs for each in all_]
        return list(found), []
    return [found], []


def _listed(optimizers: list[Any]) -> str:
    names = ", ".join(type(each).__name__ for each in optimizers)
    return f"{len(optimizers)} optimizers ({names})" if len(optimizers) > 1 else names or "nothing"


def _pace(schedule: Any, accumulation: int) -> Pace:
    how = schedule if isinstance(schedule, dict) else {"scheduler": schedule}
    found = how.get("scheduler")
    if isinstance(found, ReduceLROnPlateau) or how.get("reduce_on_plateau"):
        raise JobError(
            f"configure_optimizers returned a {type(found).__name__}, which waits for a metric",
            code="W5-294",
            fix="use a schedule over steps or epochs, or a w5xde.Job with scheduler=…, which supports it",
        )
    if not isinstance(found, LRScheduler):
        raise JobError(
            f"configure_optimizers returned a {type(found).__name__} as a schedule",
            code="W5-294",
            fix="return one of torch.optim.lr_scheduler",
        )
    return Pace(found, how.get("interval", "epoch") == "epoch", int(how.get("frequency", 1)), accumulation)
