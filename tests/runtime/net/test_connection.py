"""Connections: signs of life, what is sent when, and when memory may be used again."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import weakref
from collections.abc import Callable
from typing import cast

import pytest

from w5xde.config import Settings
from w5xde.control.pool.connection_limits import ConnectionLimits
from w5xde.errors import JoinError, UsageError
from w5xde.message_types import PROBE_BYTES_MAX
from w5xde.messages import Beat, Bye, Hello, Message, Params, Ready, Update
from w5xde.protocol.session import COORDINATOR, NODE, WORKING
from w5xde.protocol.wire import Body, Limits, encode
from w5xde.runtime.net.connection import Connection, Owner
from w5xde.runtime.net.dialer import Dialer
from w5xde.runtime.net.listener import Listener, resolve_addresses
from w5xde.ticket import Secret, Ticket

LARGE = 8 * 1024 * 1024


class OpenConnection(Connection):
    """A connection whose transport a test can use: to write half a frame, or to read nothing for a while."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    @property
    def is_direct(self) -> bool:
        """Whether it has written past asyncio."""
        return self._direct is not None


class Ears:
    """Records everything that a connection reports; `admit` decides whether a body may come now."""

    def __init__(self, side: str, admit: Callable[[Connection, Message, int], bool] | None = None) -> None:
        self.messages: list[tuple[Message, bytes]] = []
        self.signs = 0
        self.opened = asyncio.Event()
        self.lost = asyncio.Event()
        self.heard = asyncio.Event()
        owner = Owner(
            opened=lambda connection: self.opened.set(),
            heard=self._heard,
            lost=lambda connection, reason: self.lost.set(),
            alive=self._alive,
        )
        if admit is not None:
            owner = dataclasses.replace(owner, admit=admit)
        self.connection = OpenConnection(side, owner, Limits(1 << 20, LARGE))

    def _heard(self, connection: Connection, message: Message, body: Body) -> None:
        self.messages.append((message, bytes(body)))
        self.heard.set()

    def _alive(self) -> None:
        self.signs += 1


async def listen(ears: Ears, host: str, road: str = "auto") -> Listener:
    places = await resolve_addresses(host, 0)
    door = Listener(lambda visit: ears.connection, ConnectionLimits())
    door.listen(places, host, 0, road)
    return door


async def dial(ears: Ears, host: str, port: int, road: str = "auto") -> Connection:
    ticket = Ticket(((host, port),), b"", bytes(8), Secret(bytes(16)), is_clear=True)
    return await Dialer(ticket, Settings(road=road)).dial(lambda: ears.connection)


async def pair(road: str = "tcp", coordinator: Ears | None = None) -> tuple[Ears, Ears]:
    """A node and a coordinator, connected and past their greeting."""
    node, coordinator = Ears(NODE), coordinator or Ears(COORDINATOR)
    door = await listen(coordinator, "127.0.0.1", road)
    await dial(node, "127.0.0.1", door.address[1], road)
    await asyncio.wait_for(coordinator.opened.wait(), 5)
    door.close()
    for ears in (node, coordinator):
        ears.connection.session.state = WORKING
    return node, coordinator


def test_bytes_of_an_unfinished_body_are_a_sign_of_life() -> None:
    """A gradient over a slow link takes longer than silence is forgiven."""

    async def story() -> None:
        node, coordinator = await pair()
        frame = encode(Params(1, whole=False), 1000) + bytes(1000)
        transport = coordinator.connection.transport
        transport.write(frame[:-1])
        while node.connection.bytes_received < len(frame) - 1:
            await asyncio.wait_for(asyncio.sleep(0), 5)
        assert node.signs > 0
        assert not node.messages
        transport.write(frame[-1:])
        await asyncio.wait_for(node.heard.wait(), 5)
        assert node.messages[0][1] == bytes(1000)
        node.connection.abort()
        await asyncio.wait_for(coordinator.lost.wait(), 5)

    asyncio.run(story())


def test_a_large_body_is_given_back_only_when_nothing_of_it_waits_any_more() -> None:
    async def story() -> None:
        node, coordinator = await pair()
        body = bytearray(b"a" * LARGE)
        returned = asyncio.Event()

        def sent() -> None:
            body[:] = b"b" * LARGE  # what the owner does with memory that is free again
            returned.set()

        coordinator.connection.send(Params(1, whole=False), [body], sent)
        assert not returned.is_set()
        await asyncio.wait_for(node.heard.wait(), 10)
        await asyncio.wait_for(returned.wait(), 10)
        assert node.messages[0][1] == b"a" * LARGE
        node.connection.abort()
        await asyncio.wait_for(coordinator.lost.wait(), 5)

    asyncio.run(story())


def test_a_held_message_travels_with_the_next_one_in_order() -> None:
    async def story() -> None:
        node, coordinator = await pair()
        coordinator.connection.send(Params(1, whole=False), [b"x"], hold=True)
        coordinator.connection.send(Beat())
        while len(node.messages) < 2:
            node.heard.clear()
            await asyncio.wait_for(node.heard.wait(), 5)
        assert [type(message) for message, _ in node.messages] == [Params, Beat]
        node.connection.abort()
        await asyncio.wait_for(coordinator.lost.wait(), 5)

    asyncio.run(story())


def test_a_peer_that_breaks_the_table_is_parted_with() -> None:
    async def story() -> None:
        node, coordinator = await pair()
        node.connection.session.state = "checking"
        node.connection.send(Ready("x"))
        await asyncio.wait_for(coordinator.lost.wait(), 5)
        assert not coordinator.messages

    asyncio.run(story())


def test_a_host_that_cannot_be_is_told_by_both_sides() -> None:
    async def story() -> None:
        with pytest.raises(JoinError, match=r"nothing answers at no-such-host\.invalid:5") as unknown:
            await dial(Ears(NODE), "no-such-host.invalid", 5)
        assert unknown.value.code == "W5-103"
        for host in ("a..b", "no-such-host.invalid"):
            with pytest.raises(UsageError, match=f"cannot listen on {host}") as nowhere:
                await listen(Ears(COORDINATOR), host)
            assert nowhere.value.code == "W5-110"

    asyncio.run(story())


def test_nobody_listening_is_told_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        async def story() -> None:
            with pytest.raises(JoinError, match="Connection refused") as caught:
                await dial(Ears(NODE), "127.0.0.1", port)
            assert "w5xde serve" in caught.value.fix

        asyncio.run(story())


def test_every_message_of_the_greeting_fits_its_limit() -> None:
    longest = Hello(
        protocol=1, package="x" * 200, name="n" * 64, run="r" * 200, device="d" * 200, torch="t" * 200,
        machine="m" * 200, ticket=b"t" * 64, credential=b"c" * 64, looks=True,
        probe=PROBE_BYTES_MAX,
    )  # fmt: skip
    assert len(encode(longest)) < 4096


def test_on_one_machine_the_shorter_road_is_taken_and_tcp_if_it_is_asked_for() -> None:
    async def story() -> None:
        families = {}
        for road in ("auto", "tcp"):
            node, coordinator = await pair(road)
            families[road] = node.connection.transport.get_extra_info("socket").family
            coordinator.connection.send(Params(1, whole=False), [bytes(LARGE)])
            await asyncio.wait_for(node.heard.wait(), 10)
            assert node.messages[0][1] == bytes(LARGE)
            node.connection.abort()
            await asyncio.wait_for(coordinator.lost.wait(), 5)
        assert families == {"auto": socket.AF_UNIX, "tcp": socket.AF_INET}

    asyncio.run(story())


def test_without_the_shorter_road_a_node_comes_by_tcp() -> None:
    async def story() -> None:
        node, coordinator = Ears(NODE), Ears(COORDINATOR)
        door = await listen(coordinator, "127.0.0.1", "tcp")
        await dial(node, "127.0.0.1", door.address[1], "auto")
        await asyncio.wait_for(coordinator.opened.wait(), 5)
        door.close()
        node.connection.abort()
        await asyncio.wait_for(coordinator.lost.wait(), 5)

    asyncio.run(story())


def test_what_came_before_a_body_is_heard_before_the_body_is_let_in() -> None:
    """Or what is said first could be taken for what is about to come."""
    order: list[str] = []

    def admit(connection: Connection, message: Message, body_bytes: int) -> bool:
        order.append("admitted")
        return True

    owner = Owner(
        opened=lambda connection: None,
        heard=lambda connection, message, body: order.append("heard"),
        lost=lambda connection, reason: None,
        alive=lambda: None,
        admit=admit,
    )
    connection = Connection(NODE, owner, Limits(1 << 20, LARGE))
    connection.session.state = WORKING
    data = encode(Beat()) + encode(Params(1, whole=False), LARGE)
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))
    assert order == ["heard", "admitted"]


def test_a_reset_is_told_in_words() -> None:
    reasons: list[str] = []
    owner = Owner(
        opened=lambda connection: None,
        heard=lambda connection, message, body: None,
        lost=lambda connection, reason: reasons.append(reason),
        alive=lambda: None,
    )
    Connection(NODE, owner).connection_lost(ConnectionResetError(104, "Connection reset by peer"))
    Connection(NODE, owner).connection_lost(None)
    assert reasons == ["the connection closed (Connection reset by peer)", "the connection closed"]


@pytest.mark.parametrize("road", ["tcp", "auto"])
def test_a_peer_that_dies_while_much_is_sent_to_it_makes_no_noise(
    road: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        node, coordinator = await pair(road)
        theirs = node.connection.transport
        assert theirs is not None
        theirs.abort()
        await asyncio.wait_for(node.lost.wait(), 5)
        # Many pieces that asyncio writes, before it had a chance to tell that the peer is gone.
        returned: list[int] = []
        for number in range(20):
            pieces = [bytes(200 * 1024)] * 10
            coordinator.connection.send(
                Params(1, whole=False), pieces, lambda number=number: returned.append(number)
            )
        await asyncio.wait_for(coordinator.lost.wait(), 5)
        assert sorted(returned) == list(range(20))

    asyncio.run(story())
    assert caplog.messages == []


# --- shared memory --------------------------------------------------------------------------------


class Elsewhere:
    """Memory that a peer shares; every body in it has one byte."""

    def offset_of(self, piece: memoryview) -> int | None:
        return None

    def body_at(self, offset: int, count: int) -> Body:
        return bytearray(1)


def test_a_body_in_shared_memory_that_crosses_our_goodbye_does_not_lose_it() -> None:
    async def story() -> None:
        node, coordinator = await pair()
        coordinator.connection.share(Elsewhere())
        coordinator.connection.send(Params(1, whole=False), [bytes(LARGE)])
        node.connection.transport.pause_reading()
        coordinator.connection.send(Bye("enough", finished=False))
        coordinator.connection.close()
        # The node has not read the goodbye yet.
        received = coordinator.connection.bytes_received
        node.connection.transport.write(encode(Update(0, []), LARGE, 4096))
        while coordinator.connection.bytes_received == received:
            await asyncio.wait_for(asyncio.sleep(0), 5)
        node.connection.transport.resume_reading()
        await asyncio.wait_for(coordinator.lost.wait(), 10)
        await asyncio.wait_for(node.lost.wait(), 10)
        assert [type(message) for message, _ in node.messages] == [Params, Bye]
        assert (coordinator.messages, coordinator.connection.fault) == ([], "")

    asyncio.run(story())


def test_a_peer_that_shares_nothing_breaks_the_protocol_with_such_a_body() -> None:
    async def story() -> None:
        node, coordinator = await pair()
        node.connection.transport.write(encode(Update(0, []), LARGE, 4096))
        await asyncio.wait_for(coordinator.lost.wait(), 10)
        assert coordinator.connection.fault == "W5-120"
        node.connection.abort()
        await asyncio.wait_for(node.lost.wait(), 10)

    asyncio.run(story())


def test_a_lost_connection_keeps_no_shared_memory() -> None:
    """Connections and their owners refer to each other, so that they are collected late."""

    async def story() -> None:
        node, coordinator = await pair()
        memory = Elsewhere()
        gone = weakref.ref(memory)
        coordinator.connection.share(memory)
        del memory
        node.connection.abort()
        await asyncio.wait_for(coordinator.lost.wait(), 5)
        assert gone() is None

    asyncio.run(story())


@pytest.mark.parametrize("road", ["tcp", "unix"])
def test_the_last_message_reaches_a_peer_that_is_sending(road: str) -> None:
    """If we closed at once, the peer's next write would fail before it has read what we said."""

    async def story() -> None:
        node, coordinator = await pair(road)
        coordinator.connection.send(Bye("you are banned", finished=False))
        coordinator.connection.close()
        await asyncio.sleep(0)
        # Nothing was read meanwhile: these writes come before the goodbye is heard.
        for _ in range(2):
            node.connection.transport.write(encode(Update(0, []), 0))
        await asyncio.wait_for(node.heard.wait(), 5)
        assert [type(message) for message, _ in node.messages] == [Bye]
        await asyncio.wait_for(coordinator.lost.wait(), 5)
        assert not coordinator.messages

    asyncio.run(story())


@pytest.mark.parametrize(("road", "is_told"), [("tcp", True), ("unix", False)])
def test_the_link_is_told_between_machines_alone(road: str, is_told: bool) -> None:
    """Without a known link no codec is tried: inside one machine a copy is faster than any of them."""

    async def story() -> None:
        node, coordinator = await pair(road)
        coordinator.connection.send(Params(1, whole=False), [bytes(LARGE)])
        await asyncio.wait_for(node.heard.wait(), 10)
        assert node.connection.link > 0
        assert (node.connection.reported_link > 0) is is_told
        node.connection.abort()
        await asyncio.wait_for(coordinator.lost.wait(), 5)

    asyncio.run(story())
