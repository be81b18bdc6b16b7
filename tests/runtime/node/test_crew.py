"""A crew's words and totals: what several nodes say alike is said once, and what they did is added up."""

from __future__ import annotations

import dataclasses

import pytest

from w5xde.callbacks.status import CrewReport, NodeReport
from w5xde.errors import JobError, JoinError, TrainingError, W5xdeError
from w5xde.runtime.node.crew import gathered_text, told_error
from w5xde.runtime.node.crew_node import ToldError


@pytest.mark.parametrize(
    ("text", "names", "said"),
    [
        ("joined run as {} on cpu", ["desk"], "joined run as desk on cpu"),
        ("joined run as {} on cpu", ["desk", "desk-2"], "joined run as desk, desk-2 on cpu"),
        ("{} died", ["a", "b", "c", "d", "e"], "a, b, c and 2 more died"),
        ("lost the coordinator", ["a", "b"], "a, b: lost the coordinator"),
        ("lost the coordinator", ["a", "b", "c", "d", "e", "f"], "all 6 nodes: lost the coordinator"),
        ("the process has died", [""], "the process has died"),
    ],
)
def test_what_several_nodes_say_alike_is_one_line(text: str, names: list[str], said: str) -> None:
    assert gathered_text(text, names, 6) == said


def test_reports_are_added_up() -> None:
    reports = [
        NodeReport("desk", run="mine", batches=3, seconds_busy=1.5, loss=1.0, rejected=1, bytes_sent=5),
        NodeReport("desk-2", run="mine", batches=4, seconds_busy=0.5, loss=2.0, bytes_received=7),
        NodeReport("desk-3"),
    ]
    total = CrewReport.of("desk", reports)
    assert (total.name, total.run, total.title) == ("desk", "mine", "desk (2 nodes)")
    assert (total.batches, total.seconds_busy, total.loss, total.rejected) == (7, 2.0, 1.5, 1)
    assert (total.bytes_sent, total.bytes_received) == (5, 7)
    assert total.summary()["nodes"] == [dataclasses.asdict(report) for report in reports]
    # A node that was never welcome is not counted.
    assert CrewReport.of("desk", reports[:1]).title == "desk"
    assert CrewReport.of("desk", []).loss is None


@pytest.mark.parametrize("kind", [JoinError, JobError, TrainingError, W5xdeError])
def test_a_nodes_error_is_raised_as_what_it_was(kind: type[W5xdeError]) -> None:
    error = kind("it broke", code="W5-302", why="because", fix="mend it")
    again = told_error(ToldError.of(error))
    assert type(again) is kind
    assert again.lines() == error.lines()
    assert again.exit_code == error.exit_code


@pytest.mark.parametrize("name", ["Mapping", "harmless", "nothing", "MappingProxyType", "Any"])
def test_what_is_no_error_of_ours_is_a_plain_one(name: str) -> None:
    assert type(told_error(ToldError(name, "W5-700", "it broke", "", ""))) is W5xdeError
