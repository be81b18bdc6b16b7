"""What becomes of an evaluation's result: it is counted, logged, written down, and passed to callbacks.

A schedule that a metric steps is stepped first. Knows nothing of how the result was found. The core hears
last that an evaluation has ended: until then a callback can stop the run before another step begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from w5xde.callbacks.evaluation import Evaluation
from w5xde.callbacks.status import RunStatus
from w5xde.control import events as ev
from w5xde.runtime.telemetry.callback_runner import CallbackRunner
from w5xde.runtime.telemetry.meters import Meters


class RowRecorder(Protocol):
    """Writes rows of metrics: `coordinator.recorder.Recorder`."""

    def write(self, status: RunStatus) -> None: ...


class EvaluatedRun(Protocol):
    """The run whose model is evaluated: the coordinator."""

    meters: Meters
    recorder: RowRecorder
    # Shows a sentence, and writes it to the ledger with its facts.
    log: Callable[..., None]

    @property
    def is_over(self) -> bool: ...
    def status(self) -> RunStatus: ...
    def dispatch(self, event: ev.Event) -> None: ...


class MetricSchedule(Protocol):
    """A schedule that a metric steps: `metric_stepper.MetricStepper`."""

    def step(self, evaluation: Evaluation, done: Callable[[list[float]], None]) -> None:
        """Step the schedule where the learner lives; `done` gets the learning rates."""


class EvaluationRecord:
    """Records the results of one run's evaluations."""

    def __init__(
        self,
        run: EvaluatedRun,
        callbacks: CallbackRunner,
        schedule: MetricSchedule | None = None,
    ) -> None:
        self._run = run
        self._callbacks = callbacks
        self._schedule = schedule

    def found(self, evaluation: Evaluation) -> None:
        # A run that is over is saved as it is; if it is resumed, it measures this step again.
        if self._schedule is None or self._run.is_over:
            self._record(evaluation)
        else:
            self._schedule.step(evaluation, lambda rates: self._stepped(evaluation, rates))

    def _stepped(self, evaluation: Evaluation, rates: list[float]) -> None:
        run = self._run
        before, run.meters.learning_rates = run.meters.learning_rates, rates
        if rates != before:
            shown = [", ".join(f"{rate:g}" for rate in dict.fromkeys(each)) for each in (before, rates)]
            text = f"the learning rate is reduced from {shown[0]} to {shown[1]}, after step {evaluation.step}"
            run.log("learning rate", text, version=evaluation.step, before=before, after=rates)
        self._record(evaluation)

    def _record(self, evaluation: Evaluation) -> None:
        run = self._run
        run.meters.evaluation = evaluation
        facts = {"step": evaluation.step, "epoch": evaluation.epoch, "metrics": dict(evaluation)}
        run.log("evaluated", f"evaluation of step {evaluation.step}: {evaluation}", **facts)
        status = run.status()
        # At once: rows that are written by the second would leave out evaluations that follow each other.
        run.recorder.write(status)
        self._callbacks.tell(lambda callback: callback.on_evaluate(status, evaluation))
        # The weights that were measured are kept no longer than that.
        evaluation.read = None
        run.dispatch(ev.Evaluated())

    def failed(self, text: str) -> None:
        self._run.log("evaluation failed", text)
        self._run.dispatch(ev.Evaluated())
