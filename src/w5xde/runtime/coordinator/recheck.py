"""Recheck: computes leases again on a thread of the coordinator and compares them with the nodes' answers.

It keeps the parameters and batches of every lease that will be verified from the moment they are sent until
the answer is verified, so no chosen answer passes for want of them. A node holds one or two leases at a time,
which bounds the parameters kept. Decides nothing: it reports its findings to the core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.learn.data.payload import Packed, unpack
from w5xde.learn.data.sources import MapSource
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.model.device import use_threads
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.step.sums import Contribution
from w5xde.learn.train.trainer import Task, alone_tasks
from w5xde.learn.train.validation_set import read_batch
from w5xde.learn.trust.recompute import (
    ColumnComputer,
    GradientComputer,
    LeaseComputer,
    LeasedWork,
    Opinion,
    Recomputer,
)
from w5xde.learn.trust.remeasure import Remeasurer
from w5xde.message_types import MetricRows
from w5xde.runtime.pipeline.peer import SentParams
from w5xde.runtime.pipeline.ports import SentLease
from w5xde.runtime.system.actor import Actor


class Recheck:
    """Verifies answers; `verified` is called with each result, and `is_outstanding` tells live leases."""

    def __init__(
        self,
        prepared: Prepared,
        settings: Settings,
        is_outstanding: Callable[[int], bool],
        failed: Callable[[BaseException], None],
        verified: Callable[[ev.Verified], None],
    ) -> None:
        self._prepared = prepared
        # Without --verify only sizes are compared: updates may be compressed with loss, or from a device
        # that draws other random numbers.
        self._is_exact = settings.verify > 0
        self._actor = Actor(
            "w5xde-recheck", failed, inline=False, prepare=lambda: use_threads(settings.threads)
        )
        self._is_outstanding = is_outstanding
        self._verified = verified
        # The parameters that each lease was sent with, and what it asks for.
        self._sent: dict[int, tuple[SentParams, SentLease]] = {}
        self._params: dict[SentParams, Replica] = {}
        self._recomputer: Recomputer | None = None
        self._remeasurer: Remeasurer | None = None

    def keep(self, sent: SentParams, params: Replica) -> None:
        """Keep these parameters: leases that will be verified are about to be sent with them."""
        self._forget()
        self._params[sent] = params

    def sent(self, sent: SentParams, lease: Lease, work: SentLease) -> None:
        """A lease that will be verified was sent, with parameters that are kept."""
        self._sent[lease.id] = (sent, work)

    def verify(self, lease: Lease, given: Contribution) -> None:
        """Compute the lease again and report how the answer compares."""
        sent, work = self._sent[lease.id]
        params = self._params[sent]
        self._actor.call(
            lambda: self._compare(lease, given, params, self._work(lease, work)),
            lambda opinion: self._done(lease, opinion),
        )

    def verify_measures(self, lease: Lease, rows: MetricRows) -> None:
        """Measure the batches of a validation lease again and report how the answer compares."""
        sent, work = self._sent[lease.id]
        params = self._params[sent]
        self._actor.call(
            lambda: self._remeasure(rows, params, self._validation_batches(lease, work)),
            lambda opinion: self._done(lease, opinion),
        )

    def _remeasure(self, rows: MetricRows, params: Replica, batches: list[tuple[int, int, Any]]) -> Opinion:
        if self._remeasurer is None:
            rules = self._prepared.rules
            self._remeasurer = Remeasurer(self._prepared.make_trainer(), rules.metrics, rules.precision)
        return self._remeasurer.check(rows, params, batches)

    def _validation_batches(self, lease: Lease, work: SentLease) -> list[tuple[int, int, Any]]:
        """The number, the samples and the value of each batch of a validation lease."""
        validation, found = self._prepared.validation, []
        for number, packed in zip(range(*lease.span), work.batches, strict=True):
            value = unpack(packed.item, _body(packed), types=self._prepared.source.recipe.types)
            if self._prepared.rules.data == "local" and validation is not None:
                value = read_batch(validation.source, value, number)
            found.append((number, packed.samples, value))
        return found

    def _done(self, lease: Lease, opinion: Opinion) -> None:
        self._sent.pop(lease.id, None)
        self._forget()
        self._verified(ev.Verified(lease.node, lease.id, *opinion))

    def _forget(self) -> None:
        """Drop leases that ended without an answer, and parameters that no lease needs."""
        self._sent = {number: sent for number, sent in self._sent.items() if self._is_outstanding(number)}
        needed = {sent for sent, _ in self._sent.values()}
        self._params = {sent: params for sent, params in self._params.items() if sent in needed}

    def _compare(self, lease: Lease, given: Contribution, params: Replica, work: LeasedWork) -> Opinion:
        recomputer = self._recomputer or self._new_recomputer()
        # A run that does not verify keeps no second model for what is rare there.
        self._recomputer = recomputer if self._is_exact else None
        check = recomputer.check if self._is_exact else recomputer.check_size
        return check(given.vector, params, work, given.weight)

    def _new_recomputer(self) -> Recomputer:
        prepared = self._prepared
        computer: LeaseComputer
        if prepared.rounds is not None:
            computer = ColumnComputer(prepared.make_columns(), prepared.rules.compress)
        else:
            computer = GradientComputer(prepared.make_trainer())
        return Recomputer(computer, prepared.rules.precision)

    def _work(self, lease: Lease, work: SentLease) -> LeasedWork:
        """What the node was lent."""
        step, values = lease.step, []
        places = step.places(lease.span)
        for place, packed in zip(places, work.batches, strict=True):
            source = self._prepared.source
            value = unpack(packed.item, _body(packed), types=source.recipe.types)
            if self._prepared.rules.data == "local" and isinstance(source, MapSource):
                value = source.read_indices(value, step.epoch, step.first + place)
            values.append((step.first + place, step.sizes[place], value))
        if work.rates is not None:
            return LeasedWork(alone_tasks(step.epoch, work.step, values), work.rates)
        task = Task(step.epoch, lease.span, step.count, step.samples, values, step=work.step)
        return LeasedWork([task], call=work.batches[0].call)

    def settle(self, done: Callable[[], None]) -> None:
        """Call `done` when nothing that was asked for so far is being computed any more."""
        self._actor.call(lambda: None, lambda _: done())

    def stop(self) -> None:
        self._actor.stop()


def _body(packed: Packed) -> bytearray:
    return bytearray(b"".join(packed.pieces))
