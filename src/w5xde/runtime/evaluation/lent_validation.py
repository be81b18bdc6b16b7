"""A validation that nodes measure: keeps the numbers of each batch, and reports their means at the end.

Decides nothing: the core says which answers count, and when a validation has ended.
"""

from __future__ import annotations

from collections.abc import Callable

from w5xde.callbacks.evaluation import Evaluation
from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.learn.train.validation_set import ValidationSet
from w5xde.message_types import MetricRows
from w5xde.runtime.evaluation.evaluator import EvaluationReports
from w5xde.runtime.evaluation.snapshots import ModelSnapshot, ModelSnapshots
from w5xde.runtime.evaluation.validation_batches import ValidationBatches


class LentValidation:
    """The lent validations of one run: fills the port `pipeline.ports.MeasuredSet`."""

    def __init__(
        self,
        validation: ValidationSet,
        batches: ValidationBatches,
        snapshots: ModelSnapshots,
        reports: EvaluationReports,
        epochs: Callable[[], int],
    ) -> None:
        """`epochs`: how many are complete."""
        self.batches = batches
        self._validation = validation
        self._snapshots = snapshots
        self._reports = reports
        self._epochs = epochs
        self._rows: dict[int, list[float]] = {}
        # The step and the epoch of the weights that nodes measured last, or could not measure.
        self.place = (-1, 0)

    def fits(self, rows: MetricRows) -> bool:
        """Whether each of these rows has a number for each metric."""
        return all(len(row) == len(self._validation.names) for row in rows)

    def keep(self, lease: Lease, rows: MetricRows) -> None:
        """Keep what a node measured."""
        self._rows.update(zip(range(*lease.span), rows, strict=True))

    def conclude(self, effect: ev.Conclude) -> None:
        """Report the result, or why there is none."""
        rows, self._rows = self._rows, {}
        self.place = (effect.step, self._epochs())
        if effect.failure:
            self._reports.failed(f"the evaluation of step {effect.step} failed: {effect.failure}")
            return
        means = self._validation.means([rows[number] for number in range(len(rows))])
        # No step is made before the core hears of the result, so that these are the weights of the step.
        self._snapshots.take(lambda taken: self._found(means, taken))

    def _found(self, means: dict[str, float], taken: ModelSnapshot | None) -> None:
        evaluation = Evaluation(means, *self.place)
        if taken is not None:
            evaluation.read = lambda: self._snapshots.weights(taken)
        self._reports.found(evaluation)

    def stop(self) -> None:
        self.batches.stop()
