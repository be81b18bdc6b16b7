"""The evaluator: measures the model on a copy of its own, so that training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from w5xde.learn.layout import FlatModel
from w5xde.messages import Layout
from w5xde.runtime.actor import Actor


class Evaluator:
    """One evaluation at a time; one that is asked for while another runs is left out."""

    def __init__(
        self,
        evaluate: Callable[[nn.Module], dict[str, float]],
        copy_model: Callable[[], nn.Module],
        layout: Layout,
        found: Callable[[dict[str, float]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._evaluate = evaluate
        self._copy_model = copy_model
        self._layout = layout
        self._copy: FlatModel | None = None
        self._found = found
        self._failed = failed
        self._actor = Actor("w5xde-evaluator", self._went_wrong, inline=False)
        self.is_busy = False

    def measure(self, raw: memoryview) -> None:
        """Evaluate these parameters."""
        self.is_busy = True
        self._actor.call(lambda: self._measure(raw), self._measured)

    def _measure(self, raw: memoryview) -> dict[str, float]:
        if self._copy is None:
            self._copy = FlatModel(self._copy_model(), self._layout)
        self._copy.load(raw, whole=True)
        return self._evaluate(self._copy.module)

    def _measured(self, found: dict[str, float]) -> None:
        self.is_busy = False
        self._found(found)

    def _went_wrong(self, error: BaseException) -> None:
        self.is_busy = False
        self._failed(error)

    def stop(self) -> None:
        self._actor.stop()
