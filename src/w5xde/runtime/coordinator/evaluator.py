"""The evaluator: runs the evaluation of the job on a copy of the model while training goes on.

Knows nothing of when to evaluate: callers decide that.
"""

from __future__ import annotations

from collections.abc import Callable

from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.model.layout import FlatModel
from w5xde.runtime.system.actor import Actor


class Evaluator:
    """Runs one evaluation at a time, and ignores requests while one is running."""

    def __init__(
        self,
        prepared: Prepared,
        found: Callable[[dict[str, float]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._prepared = prepared
        self._copy: FlatModel | None = None
        self._found = found
        self._failed = failed
        self._actor = Actor("w5xde-evaluator", self._went_wrong, inline=False)
        self._is_busy = False

    def measure(self, learner: Actor) -> None:
        """Evaluate the model of this moment; `learner` is the actor that owns the model."""
        # Requests do not queue up: the next one will see a newer model anyway.
        if self._prepared.evaluate is not None and not self._is_busy:
            self._is_busy = True
            learner.call(
                lambda: self._prepared.learner.snapshot(whole=True),
                lambda raw: self._actor.call(lambda: self._measure(raw), self._measured),
            )

    def measure_last(self) -> None:
        """Evaluate the trained model itself, here and now."""
        evaluate, module = self._prepared.evaluate, self._prepared.learner.flat.module
        if evaluate is None:
            return
        try:
            self._found(evaluate(module))
        except Exception as error:
            self._failed(error)
        module.train()

    def _measure(self, raw: memoryview) -> dict[str, float]:
        if self._prepared.evaluate is None:
            raise ValueError("there is nothing to evaluate by")
        if self._copy is None:
            layout = self._prepared.learner.flat.blueprint.layout
            self._copy = FlatModel(self._prepared.copy_model(), layout)
        self._copy.load(raw, whole=True)
        return self._prepared.evaluate(self._copy.module)

    def _measured(self, found: dict[str, float]) -> None:
        self._is_busy = False
        self._found(found)

    def _went_wrong(self, error: BaseException) -> None:
        self._is_busy = False
        self._failed(error)

    def stop(self) -> None:
        self._actor.stop()
