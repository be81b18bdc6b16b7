"""The evaluator: runs the evaluation of the job, on a copy of the model while training goes on.

Knows nothing of when to evaluate, or whether training waits: the core decides that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from w5xde.callbacks.evaluation import Evaluation
from w5xde.callbacks.weights import Weights
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.job.job import describe
from w5xde.learn.model.device import use_threads
from w5xde.learn.model.layout import FlatModel
from w5xde.runtime.evaluation.snapshots import ModelSnapshot, ModelSnapshots
from w5xde.runtime.system.actor import Actor


class EvaluationReports(Protocol):
    """Who hears of an evaluation that has ended: `record.EvaluationRecord`."""

    def found(self, evaluation: Evaluation) -> None: ...
    def failed(self, text: str) -> None:
        """There is no result; `text` says why."""


class Evaluator:
    """Runs one evaluation at a time; others that are asked for meanwhile follow."""

    def __init__(
        self,
        prepared: Prepared,
        snapshots: ModelSnapshots,
        reports: EvaluationReports,
        threads: int | None = None,
    ) -> None:
        """With `threads`, torch uses so many for each evaluation, so that its bits are always the same."""
        self._prepared = prepared
        self._snapshots = snapshots
        self._reports = reports
        self._copy: FlatModel | None = None
        prepare = None if threads is None else lambda: use_threads(threads)
        self._actor = Actor("w5xde-evaluator", self._failed, inline=False, prepare=prepare)
        self._is_busy = False
        # How many evaluations were asked for and have not begun.
        self._waiting = 0
        # The step and the epoch of the weights that are measured now, or were measured last; and their copy.
        self._place = (-1, 0)
        self._read: Callable[[], Weights] | None = None

    def measure(self) -> None:
        """Evaluate the model of this moment, or that of the moment when the evaluations before have ended."""
        if self._is_busy:
            # No snapshot waits in memory: the core keeps the model as it is, if it must not change meanwhile.
            self._waiting += 1
            return
        self._is_busy = True
        self._snapshots.take(self._begin)

    def _begin(self, taken: ModelSnapshot | None) -> None:
        if taken is None:
            self._next()
            self._reports.failed("the model is not evaluated: its last step failed")
            return
        self._place = (taken.step, taken.epoch)
        self._read = lambda: self._snapshots.weights(taken)
        self._actor.call(lambda: self._measure(taken.raw), self._measured)

    async def measure_last(self, step: int, epoch: int, threads: int) -> None:
        """Evaluate the trained model itself, after an evaluation under way, unless that one measured it.

        No thread may use the learner any more.
        """
        evaluate, learner = self._prepared.evaluate, self._prepared.learner
        if evaluate is None:
            return
        self._waiting = 0
        await self._actor.drain()
        if self._place == (step, epoch):
            return
        # A large model is only copied if a callback wants that, or if nodes would measure other weights.
        is_copied = self._prepared.validation is not None or not learner.route.is_large
        taken = None if not is_copied else self._snapshots.take_here(epoch)
        self._place = (step, epoch)
        self._read = lambda: self._snapshots.weights(taken or self._snapshots.take_here(epoch))

        def measure() -> dict[str, float]:
            use_threads(threads)
            if taken is not None and self._prepared.validation is not None:
                # In rounds mode it is the replica that nodes would measure.
                return self._measure(taken.raw)
            return evaluate(learner.flat.module)

        try:
            self._measured(await self._actor.result_of(measure))
        except (Exception, SystemExit) as error:
            self._failed(error)
        learner.flat.module.train()

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
        evaluation = Evaluation(found, *self._place)
        evaluation.read, self._read = self._read, None
        self._next()
        self._reports.found(evaluation)

    def _failed(self, error: BaseException) -> None:
        text = f"the evaluation of step {self._place[0]} failed: {describe(error)}"
        self._read = None
        self._next()
        self._reports.failed(text)

    def _next(self) -> None:
        """Begin the next evaluation, before training hears that one has ended, and goes on."""
        self._is_busy = False
        if self._waiting:
            self._waiting -= 1
            self.measure()

    def stop(self) -> None:
        self._actor.stop()
