"""All that a coordinator does about evaluations: measures, records results, and keeps the best weights.

Connects the other modules of this package. Decides nothing: the core and callbacks do.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from w5xde.callbacks.status import Best, RunControl
from w5xde.control import events as ev
from w5xde.control.view import CoreView
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.job.job import describe
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.runtime.evaluation.actions import RunActions
from w5xde.runtime.evaluation.best import BestWeights
from w5xde.runtime.evaluation.evaluator import Evaluator
from w5xde.runtime.evaluation.lent_validation import LentValidation
from w5xde.runtime.evaluation.metric_stepper import MetricStepper
from w5xde.runtime.evaluation.record import EvaluatedRun, EvaluationRecord
from w5xde.runtime.evaluation.snapshots import ModelSnapshots
from w5xde.runtime.evaluation.validation_batches import ValidationBatches
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.telemetry.callback_runner import CallbackRunner


class HurriedEnd(Protocol):
    """The end of a run, for which there may be little time."""

    # Set when nothing may be waited for any more.
    hurried: asyncio.Event

    def cut_short(self) -> None:
        """Something that belongs to the end was left out."""


class Evaluations:
    """The evaluations of one run. `start` before anything else."""

    def __init__(
        self,
        run: EvaluatedRun,
        prepared: Prepared,
        folder: RunFolder,
        journal: Journal,
        callbacks: CallbackRunner,
    ) -> None:
        self._run = run
        self._prepared = prepared
        self._folder = folder
        self._journal = journal
        self._callbacks = callbacks
        # What nodes measure, if they do.
        self.lent: LentValidation | None = None

    def start(self, learner: Actor, writer: Actor, view: CoreView, threads: int) -> None:
        """Set the threads to use: that of the learner, and that which writes files.

        `threads`: how many of torch's threads compute an evaluation whose bits must always be the same.
        """
        run, callbacks = self._run, self._callbacks
        self._threads = threads
        snapshots = ModelSnapshots(self._prepared.learner, learner, lambda: view.progress)
        self._best = BestWeights(self._folder, self._journal, writer, lambda text: run.log("storage", text))
        self._actions = RunActions(callbacks, snapshots, self._best, run.dispatch)
        metric = self._prepared.plateau_metric
        schedule = MetricStepper(self._prepared.learner, learner, metric) if metric else None
        record = EvaluationRecord(run, callbacks, schedule)
        validation, rounds = self._prepared.validation, self._prepared.rounds
        fixed = threads if view.holds_for_evaluations or validation is not None else None
        measured = snapshots
        if validation is not None and rounds is not None:
            # Nodes measure their replica, so the coordinator does too.
            state = lambda: rounds.replica().state  # noqa: E731
            measured = ModelSnapshots(self._prepared.learner, learner, lambda: view.progress, state)
        self._evaluator = Evaluator(self._prepared, measured, record, fixed)
        if validation is not None:
            is_local = self._prepared.rules.data == "local"
            batches = ValidationBatches(validation, self._broke, is_local=is_local)
            self.lent = LentValidation(validation, batches, measured, record, lambda: view.progress.epochs)

    def _broke(self, error: BaseException) -> None:
        self._run.dispatch(ev.Broke(f"a validation batch cannot be read: {describe(error)}"))

    @property
    def control(self) -> RunControl:
        """What callbacks can ask of the run."""
        return self._actions

    @property
    def best(self) -> Best | None:
        return self._best.best

    def measure(self) -> None:
        """Evaluate the model of this moment, or of that when the evaluations before have ended."""
        self._evaluator.measure()

    async def conclude(self, step: int | None, epoch: int, end: HurriedEnd) -> dict[str, Any]:
        """Evaluate the trained model, of this step and epoch, unless there is none (None) or no time.

        Returns what the summary says. No thread may use the learner any more.
        """
        self._actions.last_epoch = epoch
        if step is not None and (self.lent is None or self.lent.place != (step, epoch)):
            await self._measure_last(step, epoch, end)
        await self._best.finish()
        return {"best": self._best.facts()}

    async def _measure_last(self, step: int, epoch: int, end: HurriedEnd) -> None:
        if self._prepared.evaluate is None:
            return
        if end.hurried.is_set():
            end.cut_short()
            return
        measuring = asyncio.ensure_future(self._evaluator.measure_last(step, epoch, self._threads))
        hurried = asyncio.ensure_future(end.hurried.wait())
        await asyncio.wait([measuring, hurried], return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if measuring.done():
            await measuring
        else:
            measuring.cancel()
            end.cut_short()

    def stop(self) -> None:
        self._evaluator.stop()
        if self.lent is not None:
            self.lent.stop()
