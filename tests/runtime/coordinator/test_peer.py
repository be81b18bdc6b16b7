"""Who keeps us waiting is parted with; who only seems to, because we were not there, is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from w5xde.runtime.coordinator.peer import (
    GREETING_SECONDS,
    SLOW_BYTES_PER_SECOND,
    SLOW_SECONDS,
    STUCK_SECONDS,
    Peer,
    Watch,
)


@dataclass
class Line:
    """As much of a connection as is looked at."""

    stuck_since: float | None = None
    frame_began: int | None = None
    bytes_received: int = 0


def peer(line: Line, *, is_ready: bool = True) -> Peer:
    return Peer(cast(Any, line), cast(Any, None), is_ready=is_ready)


def test_a_node_that_keeps_up_hears_no_complaint() -> None:
    line = Line()
    node = peer(line)
    for second in range(100):
        line.frame_began = second * 10
        line.bytes_received += 20
        assert node.complaint(float(second), 0.0) == ""


def test_a_node_that_builds_its_model_must_beat() -> None:
    node = peer(Line(), is_ready=False)
    assert node.complaint(GREETING_SECONDS, 0.0) == ""
    assert "said nothing" in node.complaint(GREETING_SECONDS + 1, 0.0)


def test_a_node_that_takes_nothing_is_parted_with() -> None:
    node = peer(Line(stuck_since=100.0))
    assert node.complaint(100.0 + STUCK_SECONDS, 0.0) == ""
    assert "took nothing" in node.complaint(101.0 + STUCK_SECONDS, 0.0)


def test_a_frame_that_trickles_is_parted_with_and_a_slow_one_is_not() -> None:
    for rate, is_cut in (
        (1, True),
        (SLOW_BYTES_PER_SECOND - 100, True),
        (SLOW_BYTES_PER_SECOND + 100, False),
    ):
        line = Line(frame_began=0)
        node, said = peer(line), ""
        for second in range(0, 60, 2):
            line.bytes_received = second * rate
            said = said or node.complaint(float(second), 0.0)
        assert ("it sent less than" in said) == is_cut, rate


def test_a_coordinator_that_was_stopped_blames_nobody() -> None:
    line = Line(stuck_since=10.0, frame_began=0)
    node = peer(line)
    assert node.complaint(10.0, 0.0) == ""
    watch, woke = Watch(), 10_000.0
    assert [watch.awake_since(now) for now in (10.0, 12.0, 14.0, woke, woke + 2)] == [
        10.0,
        10.0,
        10.0,
        woke,
        woke,
    ]
    assert node.complaint(woke, woke) == ""
    assert node.complaint(woke + SLOW_SECONDS - 1, woke) == ""
    assert node.complaint(woke + SLOW_SECONDS + 1, woke) != ""
