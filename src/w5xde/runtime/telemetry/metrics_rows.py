"""Rows of metrics.jsonl: when one is due, and what it says. All that is shown of a run is in them first.

Knows no files and no clock: the run folder writes them, and views, callbacks and loggers read them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from w5xde.callbacks.status import RunStatus
from w5xde.control.view import CoreView
from w5xde.runtime.telemetry.meters import Meters
from w5xde.runtime.telemetry.node_facts import NodeFacts, states

# The first half minute of a run has four rows a second, so that a short run has a curve; then it has one,
# so that the file of a long run stays small enough to plot.
FIRST_SECONDS, FIRST_ROW_SECONDS, ROW_SECONDS = 30.0, 0.25, 1.0


class DataAhead(NamedTuple):
    """How far the loader is ahead: batches that are read and not lent, and whether a lease waits for one."""

    batches: int
    is_behind: bool


class MetricsRows:
    """Makes the rows of one life of a run."""

    def __init__(self, meters: Meters, nodes: NodeFacts, life: int) -> None:
        self._meters = meters
        self._nodes = nodes
        self._life = life
        self._next = 0.0
        # The steps that are durable, and since when.
        self._durable: tuple[int, float] | None = None
        # Since the last row: ticks, the sum of their loads, and those in which a lease waited for its data.
        self._ticks = 0
        self._load_sum = 0.0
        self._behind_ticks = 0
        self._data_ahead = 0

    def tick(self, load: float, data: DataAhead) -> None:
        """Note the share of a core that the coordinator used, and how far reading is ahead."""
        self._ticks += 1
        self._load_sum += load
        self._behind_ticks += data.is_behind
        self._data_ahead = data.batches

    def is_due(self, now: float, seconds: float) -> bool:
        """Whether a row is due after these seconds of training; if so, the next one is due later."""
        if now < self._next:
            return False
        self._next = now + (FIRST_ROW_SECONDS if seconds < FIRST_SECONDS else ROW_SECONDS)
        return True

    def row(self, status: RunStatus, view: CoreView, wall: float) -> dict[str, Any]:
        """The row at this time of day; it takes what was collected since the last row."""
        ticks = self._ticks or 1
        load, behind = self._load_sum / ticks, self._behind_ticks / ticks
        self._ticks, self._load_sum, self._behind_ticks = 0, 0.0, 0
        if self._durable is None or self._durable[0] != status.durable_steps:
            self._durable = (status.durable_steps, wall)
        return {
            "time": round(wall, 3),
            "life": self._life,
            **status.row(),
            "steps_total": status.steps_total,
            **self._meters.loss_band.take(),
            "durable_at": round(self._durable[1], 3),
            "load": round(load, 4),
            "data_ahead": self._data_ahead,
            "data_behind": round(behind, 3),
            "leases": len(view.leases),
            "parallel": view.members.parallel,
            "batches_aside": len(view.accounts.aside),
            "node_states": states(self._meters.nodes.values()),
            "node_facts": self._nodes.take(),
        }
