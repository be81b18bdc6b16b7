"""Answers to validation leases on their way to the core: numbers for every batch, or none, and no vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from tests.runtime.pipeline.test_updates import Line, Surroundings
from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import validation_plan
from w5xde.message_types import MetricRows
from w5xde.messages import Answer, Update
from w5xde.runtime.pipeline.peer import Peer, SentWork
from w5xde.runtime.pipeline.updates import UNFIT, Updates
from w5xde.runtime.telemetry.meters import Meters
from w5xde.tree import Span

LEASE = Lease(7, "a", validation_plan(3, (4, 4, 4)), Span(0, 2), 3, 0.0, 1.0)


class Measured(Surroundings):
    """A run that measures two metrics, of which one lease of two batches is outstanding."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, MetricRows] = {}
        self.leases[7] = LEASE
        ports = replace(self.updates._ports, validation=cast(Any, self))
        self.updates = Updates(ports, cast(Any, self), Meters(), self.told.append, one_by_one=False)

    def fits(self, rows: MetricRows) -> bool:
        return all(len(row) == 2 for row in rows)

    def keep(self, lease: Lease, rows: MetricRows) -> None:
        self.kept[lease.id] = rows

    def receive(self, answer: Answer, body: bytes = b"") -> None:
        node = Peer(cast(Any, Line()), cast(Any, None), name="a", is_ready=True)
        node.works.append(SentWork([7], 2, 0.0, validates=True))
        self.updates.received(node, Update(3, [answer]), bytearray(body))


def test_numbers_are_kept_once_the_core_accepts_them() -> None:
    around = Measured()
    around.receive(Answer(7, metrics=[[1.0, 2.0], [3.0, float("nan")]]))
    assert around.told == [ev.Measured("a", 7)]
    assert not around.kept
    around.updates.measures.keep(ev.KeepMeasures(LEASE))
    assert around.kept[7][0] == [1.0, 2.0]
    assert around.updates.measures.look_at("a", 7) is None


def test_numbers_that_the_core_rejects_are_forgotten() -> None:
    around = Measured()
    around.receive(Answer(7, metrics=[[1.0, 2.0], [3.0, 4.0]]))
    around.updates.reject(ev.Reject("a", 7, "somebody else was sooner"))
    assert around.updates.measures.look_at("a", 7) is None


def test_failures_and_dropped_leases_have_no_numbers() -> None:
    around = Measured()
    around.receive(Answer(7, failure="half a batch"))
    around.receive(Answer(7, dropped=True))
    assert around.told == [ev.Failed("a", 7, "half a batch"), ev.Dropped("a", 7, 2)]


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (Answer(7), b""),
        (Answer(7, metrics=[[1.0, 2.0]]), b""),
        (Answer(7, metrics=[[1.0, 2.0]] * 3), b""),
        (Answer(7, metrics=[[1.0], [2.0]]), b""),
        (Answer(7, metrics=[[1.0, 2.0], [3.0, 4.0, 5.0]]), b""),
        (Answer(7, metrics=[[1.0, 2.0], [3.0, 4.0]]), bytes(8)),
        (Answer(7, failure="no", metrics=[[1.0, 2.0], [3.0, 4.0]]), b""),
        (Answer(8, metrics=[[1.0, 2.0], [3.0, 4.0]]), b""),
    ],
    ids=["none", "too few", "too many", "too short", "too long", "a vector", "failed", "another lease"],
)
def test_a_node_whose_numbers_do_not_fit_is_evicted(answer: Answer, body: bytes) -> None:
    around = Measured()
    around.receive(answer, body)
    assert around.evicted == [UNFIT]
    assert around.told == []


def test_numbers_of_a_lease_that_has_ended_are_told_and_the_core_fences_them() -> None:
    around = Measured()
    around.leases.clear()
    around.receive(Answer(7, metrics=[[1.0, 2.0]]))
    assert around.told == [ev.Measured("a", 7)]
    assert not around.evicted
