"""The evaluator: measures the model on a copy, while training goes on, and the trained model at the end."""

from __future__ import annotations

from collections.abc import Callable

from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.job.job import describe
from w5xde.learn.model.device import use_threads
from w5xde.learn.model.layout import FlatModel
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.telemetry.meters import Meters


class Evaluator:
    """One evaluation at a time; one that is asked for while another runs is left out."""

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
        """Evaluate the model as it is now; `learner` makes the calls of the thread that owns it."""
        # One that takes longer than an epoch is not queued up: the next one sees a newer model.
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
        if self._copy is None:
            layout = self._prepared.learner.flat.blueprint.layout
            self._copy = FlatModel(self._prepared.copy_model(), layout)
        self._copy.load(raw, whole=True)
        return self._prepared.evaluate(self._copy.module)

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
