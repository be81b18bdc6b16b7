"""Peers: who may stay connected."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from w5xde.control.pool.connection_limits import ConnectionLimits
from w5xde.messages import PROTOCOL_VERSION, Hello, Layout, Rules, Welcome
from w5xde.protocol.wire import GREETING_LIMITS, Limits, encode
from w5xde.runtime.admission.gatekeeper import Admission
from w5xde.runtime.coordinator.peers import Peers
from w5xde.runtime.net.listener import Candidate
from w5xde.runtime.pipeline.peer import Peer


class Around:
    """A coordinator, a gatekeeper who knows local nodes alone, and a canary check without a canary."""

    def __init__(self) -> None:
        self.told: list[str] = []
        welcome = Welcome("run", 1, "", Layout([]), Rules("sync", 0, "fp32", 1, "stream"))
        self.peers = Peers(
            cast(Any, self),
            welcome=welcome,
            vector_bytes_max=0,
            configure=lambda sock: None,
            gatekeeper=cast(Any, self),
            canary_check=cast(Any, self),
        )

    def limits_of(self, peer: Peer) -> Limits:
        return GREETING_LIMITS

    def say(self, kind: str, text: str, node: str) -> None:
        self.told.append(text)

    def local_node(self, hello: Hello) -> Admission:
        return Admission(is_local=True)

    def canary(self, peer: Any) -> tuple[None, list[Any]]:
        return None, []


class Transport:
    """A transport that takes everything."""

    is_closed = False

    def get_extra_info(self, name: str) -> Any:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        """There is no buffer."""

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        """Nobody reads it."""

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close


def greet(around: Around, name: str) -> Transport:
    """A local node connects, is welcomed, and begins to build its model."""
    connection = around.peers.make_connection(Candidate("127.0.0.1", ConnectionLimits(), is_here=True))
    transport = Transport()
    connection.connection_made(cast(Any, transport))
    hello = encode(Hello(protocol=PROTOCOL_VERSION, package="0", name=name), 0)
    connection.get_buffer(len(hello))[: len(hello)] = hello
    connection.buffer_updated(len(hello))
    return transport


def test_a_local_node_that_is_banned_before_it_is_ready_must_go() -> None:
    """The core closes only nodes that are ready: it has not heard of others."""

    async def story() -> None:
        around = Around()
        good, bad = greet(around, "local-1"), greet(around, "local-2")
        around.peers.ban("local-2", "it is broken")
        assert [peer.name for peer in around.peers] == ["local-1"]
        assert (good.is_closed, bad.is_closed) == (False, True)
        assert around.told == ["local-2 did not join: it is broken"]

    asyncio.run(story())
