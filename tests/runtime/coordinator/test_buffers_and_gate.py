"""Buffers come back by themselves; large updates come in one at a time, and nobody is forgotten."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from tests.runtime.net.test_connection import Ears, pair
from w5xde.learn.model.buffers import POOLED_BYTES_MIN, Buffers
from w5xde.messages import Answer, Beat, Params, Update
from w5xde.protocol.session import COORDINATOR
from w5xde.protocol.wire import encode
from w5xde.runtime.coordinator.gate import PATIENCE_SECONDS, PATIENCE_SECONDS_MAX, WAIT_SECONDS_MAX, Gate
from w5xde.runtime.net.connection import Connection


class Door:
    """A connection, as far as the gate sees it."""

    def __init__(self) -> None:
        self.goes_on = False

    def go_on(self) -> None:
        self.goes_on = True


def doors(count: int) -> list[Any]:
    return [cast(Connection, Door()) for _ in range(count)]


def test_memory_is_used_again_once_nobody_holds_a_view_of_it() -> None:
    buffers = Buffers()
    view = buffers.take(POOLED_BYTES_MIN)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    place = tensor.data_ptr()
    del view
    other = torch.frombuffer(buffers.take(POOLED_BYTES_MIN), dtype=torch.uint8)
    assert other.data_ptr() != place
    del tensor
    assert torch.frombuffer(buffers.take(POOLED_BYTES_MIN), dtype=torch.uint8).data_ptr() == place


def test_memory_that_is_a_little_larger_does_and_comes_back_whole() -> None:
    buffers = Buffers()
    place = torch.frombuffer(buffers.take(2 * POOLED_BYTES_MIN), dtype=torch.uint8).data_ptr()
    smaller = torch.frombuffer(buffers.take(2 * POOLED_BYTES_MIN - 1000), dtype=torch.uint8)
    assert (smaller.data_ptr(), smaller.numel()) == (place, 2 * POOLED_BYTES_MIN - 1000)
    del smaller
    assert torch.frombuffer(buffers.take(2 * POOLED_BYTES_MIN), dtype=torch.uint8).data_ptr() == place


def test_memory_that_fits_nothing_any_more_is_let_go() -> None:
    buffers = Buffers()
    del (lent := [buffers.take(8 * POOLED_BYTES_MIN), buffers.take(8 * POOLED_BYTES_MIN)])[:]
    assert buffers.spare_bytes == 16 * POOLED_BYTES_MIN
    lent.append(buffers.take(POOLED_BYTES_MIN))
    assert buffers.spare_bytes == 0


@pytest.fixture
def busy_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_buffers_are_given_back_by_any_thread(busy_threads: None) -> None:
    buffers = Buffers()
    held: list[Any] = []
    is_over = False

    def drop() -> None:
        while not is_over:
            held.clear()

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for number in range(3000):
            held.insert(number, buffers.take(POOLED_BYTES_MIN))
    finally:
        is_over = True
        thread.join()


def test_one_comes_in_at_a_time_in_the_order_of_the_tree() -> None:
    gate = Gate()
    first, last, middle = doors(3)
    assert gate.ask(first, (0, 0), POOLED_BYTES_MIN, 0.0)
    assert not gate.ask(last, (0, 2), POOLED_BYTES_MIN, 0.0)
    assert not gate.ask(middle, (0, 1), POOLED_BYTES_MIN, 0.0)
    gate.done(first, 0.1)
    assert middle.goes_on
    assert not last.goes_on
    gate.done(middle, 0.2)
    assert last.goes_on


def test_a_slow_link_keeps_nobody_out_and_nobody_waits_for_ever() -> None:
    gate = Gate()
    slow, second, *others = doors(4)
    gate.ask(slow, (0,), POOLED_BYTES_MIN, 0.0)
    for connection in (second, *others):
        gate.ask(connection, (1,), POOLED_BYTES_MIN, 0.0)
    gate.tick(PATIENCE_SECONDS * 1.1)
    assert second.goes_on
    assert not any(each.goes_on for each in others)
    gate.tick(WAIT_SECONDS_MAX * 1.1)
    assert all(each.goes_on for each in others)


def test_one_who_dies_at_the_gate_leaves_it_to_the_next() -> None:
    gate = Gate()
    arriving, waiting, following = doors(3)
    gate.ask(arriving, (0,), POOLED_BYTES_MIN, 0.0)
    gate.ask(waiting, (1,), POOLED_BYTES_MIN, 0.0)
    gate.ask(following, (2,), POOLED_BYTES_MIN, 0.0)
    gate.done(waiting, 0.1)
    gate.done(arriving, 0.1)
    assert following.goes_on
    assert not waiting.goes_on


def test_what_arrives_at_a_time_fits_into_the_budget_however_long_others_wait() -> None:
    gate = Gate(budget_bytes=2.5 * POOLED_BYTES_MIN)
    several = doors(4)
    for number, connection in enumerate(several):
        gate.ask(connection, (number,), POOLED_BYTES_MIN, 0.0)
    gate.tick(100.0)
    gate.tick(200.0)
    assert [each.goes_on for each in several] == [False, True, False, False], (
        "the first was never kept waiting"
    )
    gate.done(several[0], 201.0)
    gate.tick(202.0)
    assert several[2].goes_on
    assert not several[3].goes_on
    # What is larger than the budget comes alone, rather than never.
    assert Gate(budget_bytes=1.0).ask(several[3], (0,), POOLED_BYTES_MIN, 0.0)


def test_small_updates_pass_by_the_gate() -> None:
    gate = Gate()
    large, small = doors(2)
    gate.ask(large, (0,), POOLED_BYTES_MIN, 0.0)
    assert gate.ask(small, (1,), 100, 0.0)
    assert gate.waiting == []


def test_parting_while_the_last_words_drain_parts_once() -> None:
    """The peer reads slowly: what is queued drains through asyncio, and only then the connection closes."""

    async def story() -> None:
        wrong: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
        node, coordinator = await pair()
        node.connection.transport.pause_reading()
        for version in range(5):
            coordinator.connection.send(Params(version, whole=False), [bytes(400 * 1024)] * 3)
        coordinator.connection.send(Beat())
        coordinator.connection.close()
        await asyncio.sleep(0)
        node.connection.go_on()
        await asyncio.wait_for(coordinator.lost.wait(), 10)
        await asyncio.wait_for(node.lost.wait(), 10)
        assert len(node.messages) == 6
        assert wrong == []

    asyncio.run(story())


def test_an_update_without_a_body_may_come_in_one_read_with_a_large_one() -> None:
    """The frames of a read are heard after the gate was asked about the body that begins in it."""
    heard = encode(Update(1, [Answer(1, dropped=True)])) + encode(Update(1, [Answer(2)]), POOLED_BYTES_MIN)

    async def story() -> None:
        asked: list[int] = []

        def admit(connection: Connection, message: Any, body_bytes: int) -> bool:
            asked.append(body_bytes)
            return False

        node, coordinator = await pair(coordinator=Ears(COORDINATOR, admit))
        transport = node.connection.transport
        transport.write(heard + bytes(1000))
        await asyncio.wait_for(coordinator.heard.wait(), 5)
        assert asked == [POOLED_BYTES_MIN]
        coordinator.connection.go_on()
        coordinator.heard.clear()
        transport.write(bytes(POOLED_BYTES_MIN - 1000))
        await asyncio.wait_for(coordinator.heard.wait(), 5)
        assert [len(body) for _, body in coordinator.messages] == [0, POOLED_BYTES_MIN]
        node.connection.abort()
        await asyncio.wait_for(coordinator.lost.wait(), 5)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("seconds", "patience"),
    [(0.01, PATIENCE_SECONDS), (0.2, 0.6), (0.9, PATIENCE_SECONDS_MAX), (1.1, PATIENCE_SECONDS)],
)
def test_a_link_that_is_known_to_be_quick_is_waited_for_longer(seconds: float, patience: float) -> None:
    gate = Gate()
    first, second = doors(2)
    assert gate.ask(first, (0, 0), POOLED_BYTES_MIN, 0.0, POOLED_BYTES_MIN / seconds)
    assert not gate.ask(second, (0, 1), POOLED_BYTES_MIN, 0.0)
    gate.tick(patience - 0.01)
    assert not second.goes_on
    gate.tick(patience + 0.01)
    assert second.goes_on
