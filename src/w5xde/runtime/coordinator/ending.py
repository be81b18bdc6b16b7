"""How a coordinator ends: with a checkpoint of just what it has decided."""

from __future__ import annotations

from w5xde.control.coordinator import CoordinatorCore
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.telemetry.meters import Meters


def keep_last(keeper: Journal, core: CoordinatorCore, version: int, meters: Meters, now: float) -> str:
    """A checkpoint of the end, if the learner's version is of the end; returns what to say if it fails."""
    cut = core.cut(now)
    if version != cut.version:
        return ""
    error = keeper.save_last(cut, meters.kept())
    if error:
        return f"the last checkpoint could not be written: {error}"
    core.progress.durable_steps = cut.progress.steps
    return ""
