"""The audience: callbacks of the user's. One that fails is not called again, and ends no training."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from w5xde.callbacks import Callback
from w5xde.learn.job import describe


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
