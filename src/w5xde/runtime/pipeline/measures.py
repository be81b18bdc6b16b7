"""Measures: what nodes measured for a validation, from their answer to the core's verdict.

Like `updates` for vectors, without any: the numbers are in the answer itself. Decides nothing.
"""

from __future__ import annotations

from w5xde.control import events as ev
from w5xde.control.view import CoreView
from w5xde.message_types import MetricRows
from w5xde.messages import Answer
from w5xde.runtime.pipeline.ports import MeasuredSet


class Measures:
    """Keeps the numbers of answers on which the core has not decided."""

    def __init__(self, view: CoreView, validation: MeasuredSet | None) -> None:
        self._view = view
        self._validation = validation
        # By node and lease.
        self._undecided: dict[tuple[str, int], MetricRows] = {}

    def fit(self, answer: Answer) -> bool:
        """Whether an answer has a number of each metric for each batch of its lease, or need not have any."""
        if answer.dropped or answer.failure:
            return not answer.metrics
        lease = self._view.lease(answer.lease)
        is_complete = lease is None or lease.batches == len(answer.metrics)
        return is_complete and self._validation is not None and self._validation.fits(answer.metrics)

    def received(self, node: str, answer: Answer) -> ev.Event:
        """Keep the numbers of an answer, for the core to decide on."""
        self._undecided[node, answer.lease] = answer.metrics
        return ev.Measured(node, answer.lease)

    def keep(self, effect: ev.KeepMeasures) -> None:
        """The core has accepted an answer: its numbers count."""
        lease = effect.lease
        rows = self._undecided.pop((lease.node, lease.id))
        if self._validation is not None:
            self._validation.keep(lease, rows)

    def conclude(self, effect: ev.Conclude) -> None:
        if self._validation is not None:
            self._validation.conclude(effect)

    def look_at(self, node: str, lease: int) -> MetricRows | None:
        """The numbers of a lease on which the core has not decided."""
        return self._undecided.get((node, lease))

    def forget(self, node: str, lease: int) -> None:
        """The core has rejected an answer."""
        self._undecided.pop((node, lease), None)
