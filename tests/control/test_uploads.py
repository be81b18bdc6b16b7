"""Large updates come in one at a time, in the order in which they are added up, and none waits for ever."""

from __future__ import annotations

import pytest

from w5xde.control.uploads import (
    PATIENCE_SECONDS,
    PATIENCE_SECONDS_MAX,
    WAIT_SECONDS_MAX,
    Announced,
    UploadQueue,
)

SIZE = 1_000_000


def upload(*order: int, link: float = 0.0) -> Announced:
    return Announced(order, SIZE, link)


def test_one_comes_in_at_a_time_in_the_order_of_the_tree() -> None:
    queue: UploadQueue[str] = UploadQueue()
    assert queue.ask("first", upload(0, 0), 0.0)
    assert not queue.ask("last", upload(0, 2), 0.0)
    assert not queue.ask("middle", upload(0, 1), 0.0)
    assert queue.end("first", 0.1) == ["middle"]
    assert queue.end("middle", 0.2) == ["last"]


def test_a_slow_link_keeps_the_others_out_only_for_a_moment_and_none_waits_for_ever() -> None:
    queue: UploadQueue[str] = UploadQueue()
    queue.ask("slow", upload(0), 0.0)
    for name in ("second", "third", "fourth"):
        queue.ask(name, upload(1), 0.0)
    assert queue.tick(PATIENCE_SECONDS * 1.1) == ["second"]
    assert queue.waiting == ["third", "fourth"]
    assert queue.tick(WAIT_SECONDS_MAX * 1.1) == ["third", "fourth"]


def test_a_sender_that_is_lost_while_it_waits_leaves_its_turn_to_the_next() -> None:
    queue: UploadQueue[str] = UploadQueue()
    for number, name in enumerate(("arriving", "waiting", "following")):
        queue.ask(name, upload(number), 0.0)
    assert queue.end("waiting", 0.1) == []
    assert queue.end("arriving", 0.1) == ["following"]


def test_all_that_arrives_at_a_time_fits_into_the_budget_however_long_others_wait() -> None:
    queue: UploadQueue[int] = UploadQueue(budget_bytes=2.5 * SIZE)
    for number in range(4):
        queue.ask(number, upload(number), 0.0)
    assert queue.tick(100.0) == [1]
    assert queue.tick(200.0) == []
    assert queue.end(0, 201.0) == [2]
    assert queue.is_waiting(3)
    # A body that is larger than the budget comes alone, rather than never.
    assert UploadQueue[int](budget_bytes=1.0).ask(3, upload(0), 0.0)


@pytest.mark.parametrize(
    ("seconds", "patience"),
    [(0.01, PATIENCE_SECONDS), (0.2, 0.6), (0.9, PATIENCE_SECONDS_MAX), (1.1, PATIENCE_SECONDS)],
)
def test_a_link_that_is_known_to_be_fast_is_waited_for_longer(seconds: float, patience: float) -> None:
    queue: UploadQueue[str] = UploadQueue()
    assert queue.ask("first", upload(0, 0, link=SIZE / seconds), 0.0)
    assert not queue.ask("second", upload(0, 1), 0.0)
    assert queue.tick(patience - 0.01) == []
    assert queue.tick(patience + 0.01) == ["second"]
