"""Schedules that a metric steps (`ReduceLROnPlateau`): which metric it is, and when it counts.

Such a schedule is stepped by the result of an evaluation, and not by optimizer steps. Knows no evaluations.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from w5xde.config import Settings
from w5xde.errors import JobError, UsageError

# The metric of a schedule that wants the smallest, if there are several and none is named.
LOSS = "loss"


def is_stepped_by_metric(scheduler: Any) -> bool:
    return isinstance(scheduler, ReduceLROnPlateau)


def choose_metric(scheduler: Any, metrics: list[str], settings: Settings) -> str:
    """The metric that steps a schedule; empty if the schedule needs none. Refuses what cannot work."""
    named = settings.plateau_metric
    if not isinstance(scheduler, ReduceLROnPlateau):
        if named is not None:
            raise UsageError(
                f"plateau-metric {named} is for ReduceLROnPlateau, and the job has another schedule",
                code="W5-264",
                fix="leave out --plateau-metric",
            )
        return ""
    if not metrics:
        raise JobError(
            "ReduceLROnPlateau needs a metric, and the job has no evaluation",
            code="W5-228",
            fix="let the job evaluate:  Job(…, evaluate=lambda model: {'loss': …}), or use a schedule over"
            " steps",
        )
    _require_every_evaluation(settings)
    if named is None:
        is_smallest = scheduler.mode == "min"
        named = metrics[0] if len(metrics) == 1 else LOSS if is_smallest and LOSS in metrics else None
    if named not in metrics:
        what = "by which metric is the learning rate reduced?" if named is None else f"there is no {named!r}"
        raise UsageError(
            f"{what} The evaluation returns {', '.join(sorted(metrics))}",
            code="W5-264",
            fix=f"name one of them:  --plateau-metric {min(metrics)}",
        )
    return named


def _require_every_evaluation(settings: Settings) -> None:
    """Refuse settings under which the rate would depend on timing, or on a crash."""
    if settings.evaluate == "skip":
        raise UsageError(
            "ReduceLROnPlateau needs every evaluation, and with --evaluate skip some are left out",
            code="W5-264",
            fix="leave out --evaluate skip",
        )
    if settings.durability == "step":
        raise UsageError(
            "ReduceLROnPlateau cannot be used with --durability step: the step log has no metrics",
            code="W5-264",
            fix="use --durability checkpoint; a run that crashes redoes the steps since its checkpoint",
        )
