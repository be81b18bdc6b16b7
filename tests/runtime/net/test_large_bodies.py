"""Large bodies on a connection: they wait when they are told to, and drain before the connection closes."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from tests.runtime.net.test_connection import pair
from w5xde.learn.model.route import LARGE_BYTES_MIN
from w5xde.messages import Answer, Beat, Params, Update
from w5xde.protocol.wire import encode
from w5xde.runtime.net.connection import Connection


def test_parting_while_the_last_words_drain_parts_once() -> None:
    """The peer reads slowly: what is queued drains through asyncio, and only then the connection closes."""

    async def story() -> None:
        wrong: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
        node, coordinator = await pair()
        node.connection._pause_reading()
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
    heard = encode(Update(1, [Answer(1, dropped=True)])) + encode(Update(1, [Answer(2)]), LARGE_BYTES_MIN)

    async def story() -> None:
        asked: list[int] = []
        node, coordinator = await pair()

        def admit(connection: Connection, message: Any, body_bytes: int) -> bool:
            asked.append(body_bytes)
            return False

        coordinator.connection._owner = dataclasses.replace(coordinator.connection._owner, admit=admit)
        transport = node.connection._transport
        assert transport is not None
        transport.write(heard + bytes(1000))
        await asyncio.wait_for(coordinator.heard.wait(), 5)
        assert asked == [LARGE_BYTES_MIN]
        coordinator.connection.go_on()
        coordinator.heard.clear()
        transport.write(bytes(LARGE_BYTES_MIN - 1000))
        await asyncio.wait_for(coordinator.heard.wait(), 5)
        assert [len(body) for _, body in coordinator.messages] == [0, LARGE_BYTES_MIN]
        node.connection.abort()
        await asyncio.wait_for(coordinator.lost.wait(), 5)

    asyncio.run(story())
