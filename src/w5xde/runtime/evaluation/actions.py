"""What callbacks ask of their run: to stop, to read weights, to keep the best. Decides nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from w5xde.callbacks.evaluation import Evaluation
from w5xde.callbacks.weights import Weights
from w5xde.control import events as ev
from w5xde.runtime.evaluation.best import BestWeights
from w5xde.runtime.evaluation.snapshots import ModelSnapshot, ModelSnapshots
from w5xde.runtime.telemetry.callback_runner import CallbackRunner

STOPPED = "stopped by a callback"


class RunActions:
    """Carries out what callbacks ask, on the event loop of the run."""

    def __init__(
        self,
        callbacks: CallbackRunner,
        snapshots: ModelSnapshots,
        best: BestWeights,
        dispatch: Callable[[ev.Event], None],
    ) -> None:
        self._callbacks = callbacks
        self._snapshots = snapshots
        self._best = best
        self._dispatch = dispatch
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        # The epoch of the trained model, once no thread uses the learner any more.
        self.last_epoch: int | None = None

    def stop(self, reason: str) -> None:
        self._on_loop(self._dispatch, ev.Stop(f"{STOPPED}: {reason}" if reason else STOPPED))

    def read_weights(self, found: Callable[[Weights], None]) -> None:
        self._on_loop(self._read_weights, found)

    def _read_weights(self, found: Callable[[Weights], None]) -> None:
        def taken(snapshot: ModelSnapshot | None) -> None:
            if snapshot is not None:
                self._callbacks.guard(lambda: found(self._snapshots.weights(snapshot)))

        if self.last_epoch is None:
            self._snapshots.take(taken)
        else:
            taken(self._snapshots.take_here(self.last_epoch))

    def save_best(self, evaluation: Evaluation, metric: str) -> None:
        self._best.save(evaluation.weights(), metric, evaluation[metric])

    def _on_loop(self, function: Callable[[Any], None], argument: Any) -> None:
        """Call it now if this is the event loop; a thread of the user's lets the loop call it."""
        if threading.get_ident() == self._thread:
            function(argument)
        else:
            self._loop.call_soon_threadsafe(function, argument)
