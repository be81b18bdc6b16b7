"""Runs the user's callbacks. A callback that raises is not called again, and training goes on.

Knows nothing of when things happen: the coordinator and the node call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from w5xde.callbacks import Callback
from w5xde.learn.job.job import describe
from w5xde.runtime.telemetry.status import NodeReport, RunStatus


class CallbackRunner:
    """Calls every callback; `failed` gets a sentence about each callback that raises."""

    def __init__(self, callbacks: Iterable[Callback], failed: Callable[[str], None]) -> None:
        self._callbacks = list(callbacks)
        self._failed = failed

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def tell(self, method: Callable[[Callback], None]) -> None:
        """Call `method` with each callback."""
        for callback in list(self._callbacks):
            try:
                method(callback)
            except Exception as error:
                self._callbacks.remove(callback)
                self._failed(f"a callback failed and is not called again: {describe(error)}")

    def steps(self, applied: Iterable[tuple[int, list[float]]], status: Callable[[], RunStatus]) -> None:
        """Report applied steps: `(version before the first of them, loss of each)`.

        `status` is costly, so it is asked for only if there is a callback.
        """
        if self._callbacks:
            now = status()
            for version, losses in applied:
                for number, loss in enumerate(losses, version + 1):
                    self.tell(lambda callback, n=number, x=loss: callback.on_step(now, n, x))  # type: ignore[misc]

    def worked(self, report: NodeReport, batches: int, loss: float) -> None:
        """Report batches that this node computed."""
        self.tell(lambda callback: callback.on_work(report, batches, loss))
