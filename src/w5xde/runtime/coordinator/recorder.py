"""The recorder: writes rows of metrics and the trace of leases into the run folder, and passes rows on.

`runtime/telemetry` decides when a row is due, and makes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from w5xde.callbacks.status import RunStatus
from w5xde.control.view import CoreView
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.runtime.telemetry.callback_runner import CallbackRunner
from w5xde.runtime.telemetry.meters import Meters
from w5xde.runtime.telemetry.metrics_rows import DataAhead, MetricsRows
from w5xde.runtime.telemetry.node_facts import ConnectedNode, NodeFacts


class Recorder:
    """Records one life of a run."""

    def __init__(
        self,
        view: CoreView,
        meters: Meters,
        find: Callable[[str], ConnectedNode | None],
        folder: RunFolder,
        callbacks: CallbackRunner,
    ) -> None:
        """`find` returns the node of a name, if it is connected."""
        self._view = view
        self._trace = meters.trace
        self._folder = folder
        self._callbacks = callbacks
        # Views, which get each row.
        self.followers: list[Callable[[dict[str, Any]], None]] = []
        self._rows = MetricsRows(meters, NodeFacts(meters.nodes, find, view.faults), view.leases.incarnation)

    def tick(self, now: float, load: float, data: DataAhead, status: Callable[[], RunStatus]) -> None:
        """Note the load and the data that are read ahead; write a row and the trace if they are due."""
        self._rows.tick(load, data)
        if not self._view.has_started or not self._rows.is_due(now, self._view.seconds(now)):
            return
        self.write(status())
        trace = self._trace.take(now, time.time(), lambda lease: self._view.lease(lease) is not None)
        if trace is not None:
            self._folder.trace(trace)

    def write(self, status: RunStatus) -> None:
        """Write a row, and pass it to callbacks."""
        row = self._rows.row(status, self._view, time.time())
        self._folder.metrics(row)
        for follower in self.followers:
            follower(row)
        self._callbacks.tell(lambda callback: callback.on_metrics(status, row))
