"""Rows of metrics: when they are due, the band of losses, the turns of nodes; and the trace of leases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from w5xde.callbacks.status import RunStatus
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import StepPlan
from w5xde.messages import Answer
from w5xde.runtime.durable.line_file import LineFile
from w5xde.runtime.telemetry.lease_trace import APPLIED, FAILED, TRACED_MAX, LeaseTrace
from w5xde.runtime.telemetry.loss_band import LossBand
from w5xde.runtime.telemetry.meters import Meters, NodeMeter
from w5xde.runtime.telemetry.metrics_rows import FIRST_SECONDS, DataAhead, MetricsRows
from w5xde.runtime.telemetry.node_facts import NodeFacts
from w5xde.tree import Span

VIEW: Any = SimpleNamespace(
    leases=[1, 2], accounts=SimpleNamespace(aside=[]), members=SimpleNamespace(parallel=2)
)


def rows_of(meters: Meters) -> MetricsRows:
    return MetricsRows(meters, NodeFacts(meters.nodes, lambda name: None, lambda name: 0), life=2)


def test_the_first_half_minute_has_four_rows_a_second_and_then_there_is_one() -> None:
    rows = rows_of(Meters())
    early = sum(rows.is_due(at / 100, at / 100) for at in range(1000))
    late = sum(rows.is_due(100 + at / 100, FIRST_SECONDS + at / 100) for at in range(1000))
    assert (early, late) == (40, 10)


def test_a_row_has_the_time_the_life_and_what_happened_since_the_last_one() -> None:
    meters = Meters()
    rows = rows_of(meters)
    for loss in (0.5, 0.3, 0.4):
        meters.stepped(loss)
    rows.tick(0.5, DataAhead(3, is_behind=True))
    rows.tick(0.1, DataAhead(4, is_behind=False))
    row = rows.row(RunStatus("mine", "sync", "", 1, step=3, durable_steps=1), VIEW, wall=1000.0)
    assert (row["time"], row["life"], row["leases"], row["batches_aside"]) == (1000.0, 2, 2, 0)
    assert (row["loss_min"], row["loss_max"], row["loss_last"]) == (0.3, 0.5, 0.4)
    assert (row["load"], row["data_ahead"], row["data_behind"]) == (0.3, 4, 0.5)
    assert row["durable_at"] == 1000.0
    later = rows.row(RunStatus("mine", "sync", "", 1, step=3, durable_steps=1), VIEW, wall=1007.0)
    assert (later["durable_at"], later["loss_min"], later["load"]) == (1000.0, None, 0.0)
    saved = rows.row(RunStatus("mine", "sync", "", 1, step=3, durable_steps=3), VIEW, wall=1009.0)
    assert saved["durable_at"] == 1009.0


def test_a_loss_that_is_no_number_is_in_no_band() -> None:
    band = LossBand()
    for loss in (1.0, float("nan")):
        band.add(loss)
    found = band.take()
    assert (found["loss_min"], found["loss_max"]) == (1.0, 1.0)
    assert found["loss_last"] != found["loss_last"]


def test_nodes_take_turns_and_one_that_left_is_told_of_once() -> None:
    meters = {name: NodeMeter(name, state="working") for name in "abcde"}
    facts = NodeFacts(meters, lambda name: None, lambda name: 7 if name == "e" else 0)
    seen = [sorted(facts.take(budget_bytes=800)) for _ in range(3)]
    assert seen == [["a", "b"], ["c", "d"], ["a", "e"]]
    meters["b"].state = "gone"
    told = [facts.take(budget_bytes=400_000) for _ in range(2)]
    assert told[0]["b"]["state"] == "gone"
    assert "b" not in told[1]
    assert told[1]["e"]["faults"] == 7


# --- the trace ------------------------------------------------------------------------------------


def lease(number: int) -> Lease:
    plan = StepPlan(index=4, epoch=1, first=8, sizes=(32, 32), ends_epoch=False)
    return Lease(number, "a", plan, Span(0, 2), version=4, granted_at=10.0, expected_at=20.0)


def test_a_lease_has_its_times_and_its_outcome() -> None:
    trace = LeaseTrace()
    trace.sent([lease(1)], 10.5)
    trace.answered([Answer(1, seconds=0.25, codec="lz4")], 11.0)
    trace.ended(1, APPLIED, 11.5)
    row = trace.take(12.0, 1012.0, lambda number: False)
    assert row is not None
    (found,) = row["leases"]
    assert {key: found[key] for key in ("lent", "sent", "answered", "ended")} == {
        "lent": 1010.0, "sent": 1010.5, "answered": 1011.0, "ended": 1011.5,
    }  # fmt: skip
    assert (found["outcome"], found["codec"], found["first"], found["last"]) == (APPLIED, "lz4", 8, 9)
    assert trace.take(13.0, 1013.0, lambda number: False) is None


def test_a_quick_run_is_sampled_and_says_so() -> None:
    trace = LeaseTrace()
    for number in range(1000):
        trace.sent([lease(number)], 10.0)
        trace.ended(number, APPLIED, 10.1)
    row = trace.take(11.0, 11.0, lambda number: False)
    assert row is not None
    assert (row["of"], len(row["leases"])) == (1000, TRACED_MAX)


def test_a_lease_that_is_no_longer_out_has_failed_and_one_that_is_stays() -> None:
    trace = LeaseTrace()
    trace.sent([lease(1), lease(2)], 10.0)
    row = trace.take(11.0, 11.0, lambda number: number == 2)
    assert row is not None
    assert [(each["lease"], each["outcome"]) for each in row["leases"]] == [(1, FAILED)]
    trace.ended(2, APPLIED, 12.0)
    later = trace.take(12.0, 12.0, lambda number: False)
    assert later is not None
    assert [each["lease"] for each in later["leases"]] == [2]


def test_a_full_file_makes_room_and_keeps_the_newest_lines(tmp_path: Any) -> None:
    file = LineFile(tmp_path / "trace.jsonl", limit_bytes=30)
    for number in range(9):
        file.write(f"line {number:03}")
    file.close()
    assert (tmp_path / "trace.jsonl").read_text().split("\n")[-2] == "line 008"
    assert (tmp_path / "trace.jsonl.1").read_text().startswith("line 00")
    assert len(list(tmp_path.iterdir())) == 2
