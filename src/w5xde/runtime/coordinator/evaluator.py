"""The evaluator: runs the evaluation of the job, on a copy of the model while training goes on.

Knows nothing of when to evaluate: callers decide that.
"""

from __future__ import annotations

from collections.abc import Callable

from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.job.job import describe
from w5xde.learn.model.device import use_threads
from w5xde.learn.model.layout import FlatModel
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.telemetry.meters import Meters


class Evaluator:
    """Runs one evaluation at a time, and ignores requests while one is running."""

    def __init__(
        self,
        prepared: Prepared,
        meters: Meters,
        say: Callable[..., None],
        found: Callable[[dict[str, float]], None],
    ) -> None:
        self._prepared = prepared
        self._meters = meters
        self._say = say
        self._found = found
        self._copy: FlatModel | None = None
        self._actor = Actor("w5xde-evaluator", self._failed, inline=False)
        self._is_busy = False
        self._is_forgotten = False

    def measure(self, learner: Actor) -> None:
        """Evaluate the model of this moment; `learner` is the actor that owns the model."""
        # Requests do not queue up: the next one will see a newer model anyway.
        if self._prepared.evaluate is not None and not self._is_busy:
            self._is_busy = True
            learner.call(
                lambda: self._prepared.learner.snapshot(whole=True),
                lambda raw: self._actor.call(lambda: self._measure(raw), self._measured),
            )

    def forget(self) -> None:
        """Drop the result of an evaluation under way: the model has changed since it began."""
        self._is_forgotten = True

    async def measure_last(self, threads: int) -> None:
        """Evaluate the trained model itself, after an evaluation under way."""
        evaluate, module = self._prepared.evaluate, self._prepared.learner.flat.module
        if evaluate is None:
            return

        def measure() -> dict[str, float]:
            use_threads(threads)
            return evaluate(module)

        self._is_forgotten = False
        try:
            self._measured(await self._actor.result_of(measure))
        except (Exception, SystemExit) as error:
            self._failed(error)
        module.train()

    def _measure(self, raw: memoryview) -> dict[str, float]:
        if self._prepared.evaluate is None:
            raise ValueError("the job has no evaluate function")
        learner = self._prepared.learner
        copy = self._copy or FlatModel(self._prepared.copy_model(), learner.flat.blueprint.layout)
        # Of a large model no copy waits in memory for the next evaluation.
        self._copy = None if learner.route.is_large else copy
        copy.load(raw, whole=True)
        return self._prepared.evaluate(copy.module)

    def _measured(self, found: dict[str, float]) -> None:
        self._is_busy = False
        if self._is_forgotten:
            return
        self._meters.evaluation = found
        shown = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        self._say("evaluated", f"evaluation: {shown}", metrics=found)
        self._found(found)

    def _failed(self, error: BaseException) -> None:
        self._is_busy = False
        if not self._is_forgotten:
            self._say("evaluation failed", f"the evaluation failed: {describe(error)}")

    def stop(self) -> None:
        self._actor.stop()
