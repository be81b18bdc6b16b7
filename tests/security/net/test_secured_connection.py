"""The same connection over TLS: large bodies arrive whole, memory comes back, and nothing goes past TLS."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from secrets import token_hex

from tests.runtime.net.test_connection import LARGE, Ears
from w5xde.config import Settings
from w5xde.control.pool.connection_limits import Doorman
from w5xde.messages import Beat, Params
from w5xde.protocol.session import COORDINATOR, NODE, WORKING
from w5xde.runtime.admission.identity import RunIdentity
from w5xde.runtime.net import tls
from w5xde.runtime.net.dialer import Route
from w5xde.runtime.net.listener import Door, places_of
from w5xde.ticket import Secret, Ticket

HERE = "127.0.0.1"


async def heard(ears: Ears, count: int) -> None:
    async with asyncio.timeout(20):
        while len(ears.messages) < count:
            ears.heard.clear()
            await ears.heard.wait()


class Coordinators:
    """A new pair of ears for each connection: one that looks comes first."""

    def __init__(self) -> None:
        self.all: list[Ears] = []

    def make(self, visit: object) -> object:
        self.all.append(Ears(COORDINATOR))
        return self.all[-1].connection


async def pair(identity: RunIdentity) -> tuple[Ears, Ears, Door]:
    node, there = Ears(NODE), Coordinators()
    door = Door(there.make, Doorman())
    door.context = tls.server_context(identity)
    door.listen(await places_of(HERE, 0), HERE, 0, "tcp")
    ticket = Ticket(((HERE, door.address[1]),), identity.fingerprint, bytes(8), Secret(bytes(16)))
    await Route(ticket, Settings(road="tcp")).dial(lambda: node.connection)
    coordinator = there.all[-1]
    await asyncio.wait_for(coordinator.opened.wait(), 5)
    assert len(there.all) == 2
    for ears in (node, coordinator):
        ears.connection.session.state = WORKING
    return node, coordinator, door


def test_large_bodies_arrive_whole_and_their_memory_comes_back(tmp_path: Path) -> None:
    identity = RunIdentity.load_or_create(token_hex(8), tmp_path / "state")

    async def story() -> None:
        node, coordinator, door = await pair(identity)
        kept = random.Random(1).randbytes(LARGE)
        bodies = [bytearray(kept) for _ in range(5)]
        returned = []

        def give_back(body: bytearray) -> None:
            # What the owner does with memory that is free again.
            body[:] = bytes(LARGE)
            returned.append(body)

        for number, body in enumerate(bodies):
            coordinator.connection.send(Params(number, whole=False), [body], lambda b=body: give_back(b))
            coordinator.connection.send(Beat())
        await heard(node, 10)
        assert [type(message) for message, _ in node.messages] == [Params, Beat] * 5
        assert all(body == kept for message, body in node.messages if isinstance(message, Params))
        assert len(returned) == 5
        # Never around TLS.
        assert coordinator.connection._direct is None
        assert coordinator.connection.stuck_since is None
        node.connection.abort()
        await asyncio.wait_for(coordinator.lost.wait(), 5)
        door.close()

    asyncio.run(story())


def test_a_body_that_must_wait_waits_and_then_comes(tmp_path: Path) -> None:
    identity = RunIdentity.load_or_create(token_hex(8), tmp_path / "state")

    async def story() -> None:
        node, coordinator, door = await pair(identity)
        asked = asyncio.Event()

        def admit(connection: object, message: object, count: int) -> bool:
            asked.set()
            return False

        node.connection._owner = dataclasses.replace(node.connection._owner, admit=admit)
        kept = random.Random(2).randbytes(LARGE)
        coordinator.connection.send(Params(1, whole=False), [kept])
        await asyncio.wait_for(asked.wait(), 5)
        before = node.connection.bytes_received
        for _ in range(50):
            await asyncio.sleep(0)
        assert node.connection.bytes_received == before < LARGE
        assert node.connection.frame_began is not None
        node.connection.go_on()
        await heard(node, 1)
        assert node.messages[0][1] == kept
        node.connection.close()
        await asyncio.wait_for(coordinator.lost.wait(), 5)
        door.close()

    asyncio.run(story())


def test_a_peer_that_takes_nothing_is_known_to_be_stuck(tmp_path: Path) -> None:
    identity = RunIdentity.load_or_create(token_hex(8), tmp_path / "state")

    async def story() -> None:
        node, coordinator, door = await pair(identity)
        transport = node.connection._transport
        assert transport is not None
        transport.pause_reading()
        for number in range(4):
            coordinator.connection.send(Params(number, whole=False), [bytes(LARGE)])
        await asyncio.sleep(0)
        assert coordinator.connection.stuck_since is not None
        transport.resume_reading()
        await heard(node, 4)
        assert coordinator.connection.stuck_since is None
        node.connection.abort()
        await asyncio.wait_for(coordinator.lost.wait(), 5)
        door.close()

    asyncio.run(story())
