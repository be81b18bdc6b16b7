"""A connection that keeps the coordinator waiting is closed; not if the coordinator itself stood still."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde.control.pool.patience import (
    GREETING_SECONDS,
    SLOW_BYTES_PER_SECOND,
    SLOW_SECONDS,
    STUCK_SECONDS,
    Patience,
    Signs,
    Wakefulness,
)


@dataclass
class Line:
    """What a connection shows."""

    stuck_since: float | None = None
    frame_began: int | None = None
    bytes_received: int = 0


class Watched:
    """A connection that is looked at now and then."""

    def __init__(self, line: Line, *, is_ready: bool = True) -> None:
        self._line = line
        self._is_ready = is_ready
        self._patience = Patience()

    def complaint(self, now: float, awake_since: float) -> str:
        line = self._line
        signs = Signs(self._is_ready, 0.0, line.stuck_since, line.frame_began, line.bytes_received)
        return self._patience.complaint(signs, now, awake_since)


def peer(line: Line, *, is_ready: bool = True) -> Watched:
    return Watched(line, is_ready=is_ready)


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
    wakefulness, woke = Wakefulness(), 10_000.0
    assert [wakefulness.awake_since(now) for now in (10.0, 12.0, 14.0, woke, woke + 2)] == [
        10.0,
        10.0,
        10.0,
        woke,
        woke,
    ]
    assert node.complaint(woke, woke) == ""
    assert node.complaint(woke + SLOW_SECONDS - 1, woke) == ""
    assert node.complaint(woke + SLOW_SECONDS + 1, woke) != ""
