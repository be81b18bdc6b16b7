"""Runs the user's callbacks. One that raises is only told of the end from then on, and training goes on.

Knows nothing of when things happen: the coordinator and the node call it.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from w5xde.callbacks import Callback
from w5xde.callbacks.ready import require_metrics
from w5xde.callbacks.status import NodeReport, RunStatus
from w5xde.learn.job.job import describe

NOT_AGAIN = "is not called again, but for on_end"


class CallbackRunner:
    """Calls every callback; `failed` gets a sentence about each callback that raises."""

    def __init__(self, callbacks: Iterable[Callback], failed: Callable[[str], None]) -> None:
        self._all = list(callbacks)
        # Without those that have failed.
        self._callbacks = list(self._all)
        self._failed = failed

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def tell(self, method: Callable[[Callback], None]) -> None:
        """Call `method` with each callback that has not failed."""
        for callback in list(self._callbacks):
            self._call(callback, method, NOT_AGAIN)

    def end(self, status: RunStatus, summary: dict[str, Any]) -> None:
        """Tell each callback that the run is over, also those that have failed: they may have files open."""
        for callback in self._all:
            self._call(callback, lambda each: each.on_end(status, summary), "was told of the end")

    def _call(self, callback: Callback, method: Callable[[Callback], None], otherwise: str) -> None:
        try:
            method(callback)
        except (Exception, SystemExit) as error:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
            self._tell_failure(f"the callback {type(callback).__name__} failed and {otherwise}", error)

    def require_metrics(self, metrics: Iterable[str]) -> None:
        """Refuse callbacks that evaluations with these metrics cannot serve."""
        require_metrics(self._all, metrics)

    @property
    def decide(self) -> bool:
        """Whether a callback decides by evaluations how the run goes on."""
        return any(callback.decides for callback in self._all)

    @property
    def reads_evaluations(self) -> bool:
        """Whether a callback hears of evaluations, and may want the weights that they measured."""
        return any(type(callback).on_evaluate is not Callback.on_evaluate for callback in self._callbacks)

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of the callbacks, by name."""
        states: dict[str, Any] = {}

        def keep(name: str, callback: Callback) -> None:
            state = callback.state_dict()
            if state:
                # As it will be read back; and refused now if it cannot be written.
                states[name] = msgspec.json.decode(msgspec.json.encode(state))

        for name, callback in self._named():
            if callback in self._callbacks:
                self._call(callback, lambda each, name=name: keep(name, each), NOT_AGAIN)  # type: ignore[misc]
        return states

    def resume(self, states: dict[str, Any]) -> None:
        """Give the callbacks back what a checkpoint has kept of them."""
        for name, callback in self._named():
            state = states.get(name)
            if isinstance(state, dict):
                self._call(callback, lambda each, kept=state: each.load_state_dict(kept), NOT_AGAIN)  # type: ignore[misc]

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Every callback with the name of its class, and a number if there are several of one class."""
        seen: Counter[str] = Counter()
        for callback in self._all:
            name = type(callback).__name__
            seen[name] += 1
            yield (name if seen[name] == 1 else f"{name} {seen[name]}"), callback

    def guard(self, function: Callable[[], None]) -> None:
        """Call a function that a callback left to be called later."""
        try:
            function()
        except (Exception, SystemExit) as error:
            self._tell_failure("a function of a callback failed", error)

    def _tell_failure(self, what: str, error: BaseException) -> None:
        text = f"{what}: {describe(error)}"
        # Here and not by the view: a program may show none, and must hear of its own mistake.
        print(f"w5xde: {text}", file=sys.stderr)
        traceback.print_exception(error)
        self._failed(text)

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
