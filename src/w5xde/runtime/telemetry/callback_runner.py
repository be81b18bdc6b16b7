"""The audience: callbacks of the user's. One that fails is not called again, and ends no training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from w5xde.callbacks import Callback
from w5xde.learn.job.job import describe
from w5xde.runtime.telemetry.status import NodeReport, RunStatus

if TYPE_CHECKING:
    from w5xde.runtime.coordinator.steps import Applied


class Audience:
    """Tells every callback what happens; `failed` is told of those that raise."""

    def __init__(self, callbacks: Iterable[Callback], failed: Callable[[str], None]) -> None:
        self._callbacks = list(callbacks)
        self._failed = failed

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def tell(self, call: Callable[[Callback], None]) -> None:
        for callback in list(self._callbacks):
            try:
                call(callback)
            except Exception as error:
                self._callbacks.remove(callback)
                self._failed(f"a callback failed and is not called again: {describe(error)}")

    def steps(self, applied: list[Applied], status: Callable[[], RunStatus]) -> None:
        """Tell of each step; how far the run is needs to be found out only if somebody hears it."""
        if self._callbacks:
            now = status()
            for each in applied:
                for number, loss in enumerate(each.losses, each.step.version + 1):
                    self._step(now, number, loss)

    def _step(self, status: RunStatus, number: int, loss: float) -> None:
        self.tell(lambda callback: callback.on_step(status, number, loss))

    def worked(self, report: NodeReport, batches: int, loss: float) -> None:
        """Tell of what this node computed."""
        self.tell(lambda callback: callback.on_work(report, batches, loss))
