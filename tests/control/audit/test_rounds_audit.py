"""The audit of rounds: an honest ledger is clean, and every lie about a round is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.control.audit.test_auditor import audited
from tests.control.driver import Driver
from w5xde.control import events as ev
from w5xde.control.ledger_records import Record, RecordBuilder
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.plan import Plan
from w5xde.specs.round_lengths import RoundLengths


class Written(Driver):
    """A driver that keeps the ledger."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, CoreSettings("rounds"))
        self.builder = RecordBuilder()
        self.builder.add({"kind": "start", "incarnation": 1, "plan": plan.facts | {"mode": "rounds"}})

    def handle(self, event: ev.Event) -> list[ev.Effect]:
        effects = super().handle(event)
        self.builder.saw(event, effects)
        return effects


@pytest.fixture(scope="module")
def honest() -> list[Record]:
    plan = Plan(
        step_batches=3,
        epoch_limit=2,
        step_limit=None,
        samples=50,
        batch_size=2,
        rounds=RoundLengths.parse("grow:2:4"),
    )
    driver = Written(plan)
    driver.join("a", "b")
    driver.run()
    return [*driver.builder.drain(), {"kind": "stop", "reason": "all steps done", "error": ""}]


def rounds(records: list[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "step"]


def test_an_honest_ledger_is_clean_and_counts_batches_and_steps(honest: list[Record]) -> None:
    found = audited(honest)
    assert found.violations == []
    assert (found.steps, found.batches, found.samples, found.epochs) == (18, 50, 100, 2)
    assert sum(node.batches for node in found.nodes.values()) == 50


def longer(record: Record) -> None:
    record["sizes"][0][1] += 3


def without_a_column(record: Record) -> None:
    record["shares"] = record["shares"][1:]


def of_another_node(record: Record) -> None:
    record["shares"][0][2] = "nobody"


def of_fewer_columns(record: Record) -> None:
    record["columns"] = 2


def of_no_columns(record: Record) -> None:
    record["columns"] = 0


def as_a_step(record: Record) -> None:
    del record["columns"]


def earlier(record: Record) -> None:
    record["first"] -= 3


LIES: dict[str, Callable[[Record], None]] = {
    "a round with more steps than planned": longer,
    "a column that nobody computed": without_a_column,
    "a column of a node that has none": of_another_node,
    "other columns": of_fewer_columns,
    "no columns": of_no_columns,
    "a round told as a step": as_a_step,
    "batches that were applied before": earlier,
}


@pytest.mark.parametrize("lie", LIES)
def test_every_lie_about_a_round_is_found(lie: str, honest: list[Record]) -> None:
    records: Any = copy.deepcopy(honest)
    for record in records:
        if record["kind"] == "step":
            record["shares"] = [list(share) for share in record["shares"]]
    LIES[lie](rounds(records)[2])
    assert audited(records).violations


def test_a_run_that_chose_longer_rounds_says_so_first(honest: list[Record]) -> None:
    records = copy.deepcopy(honest)
    records[0]["plan"]["round_lengths"] = "grow:2:2"
    assert audited(records).violations
    chosen = {"kind": "round lengths", "text": "", "round_lengths": "grow:2:4"}
    assert audited([records[0], chosen, *records[1:]]).violations == []


def test_a_forged_round_takes_no_memory_for_what_it_claims(honest: list[Record]) -> None:
    records = copy.deepcopy(honest)
    rounds(records)[0]["sizes"] = [[2, 10**9]]
    assert any("not a proper" in each for each in audited(records).violations)
