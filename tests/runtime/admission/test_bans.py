"""Bans go by the names that nodes have in the run, and reach local nodes too."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from tests.security.admission.test_register import NOW, admit
from w5xde.config import Settings
from w5xde.errors import StorageError
from w5xde.messages import Hello
from w5xde.runtime.admission.bans import Bans
from w5xde.runtime.admission.gatekeeper import Admission, Gatekeeper
from w5xde.runtime.admission.register import TicketRegister
from w5xde.runtime.net import listener


def hello(name: str) -> Hello:
    return Hello(protocol=1, package="0", name=name)


class Place:
    """A coordinator that only writes down what it is told."""

    def __init__(self, folder: Path) -> None:
        self.gatekeeper = Gatekeeper(folder, "0" * 16, Settings())
        self.gatekeeper.guard([listener.ListenAddress(socket.AF_INET, "127.0.0.1")])
        self.gatekeeper.open("127.0.0.1", 5555)
        # Connected nodes: id -> name.
        self.present: dict[bytes, str] = {}
        self.told: list[str] = []
        self._news = asyncio.Event()
        self.bans = Bans(
            self.gatekeeper,
            lambda: list(self.present),
            lambda node_id, reason: self._hear(f"{self.present[node_id]} must go: {reason}"),
            lambda kind, text: self._hear(f"{kind}: {text}"),
            lambda error: self._hear(f"trouble: {error.what}"),
        )

    def name(self, wanted: str, admission: Admission) -> str:
        return self.bans.assign_name(hello(wanted), admission, ())

    def _hear(self, text: str) -> None:
        self.told.append(text)
        self._news.set()

    async def until_told(self, count: int) -> list[str]:
        while len(self.told) < count:
            self._news.clear()
            await self._news.wait()
        return self.told


def test_a_ban_reaches_a_node_by_its_name_in_the_run(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        register = TicketRegister(tmp_path)
        ticket = register.new(NOW, lifetime_seconds=None)
        ids = [admit(register, ticket, address=f"10.0.0.{at}").node_id for at in range(3)]
        names = [place.name("lab", Admission(node_id)) for node_id in ids]
        place.present[ids[0]] = "lab"
        place.bans.ban("lab", "it lies")
        assert await place.until_told(1) == ["lab must go: this node is banned from the run: it lies"]
        place.present.clear()
        for name in names[1:]:
            place.bans.ban(name, "it lies too")
        assert (await place.until_told(2))[1:] == [
            f"revoked: ticket {ticket.id.hex()[:8]} is revoked: 3 nodes that came by it were banned"
        ]
        place.gatekeeper.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_banned_local_node_does_not_come_back_under_any_name(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        assert place.name("lab", Admission(b"1" * 8, name="lab")) == "lab"
        # Its own name is taken, so that in the run it has another.
        assert place.name("lab", Admission(is_local=True)) == "lab-2"
        place.bans.ban("lab-2", "it is broken")
        assert place.bans.of_local_node("lab") == "it is broken"
        assert place.bans.of_local_node("local-2") == ""
        place.gatekeeper.close()

    asyncio.run(story())


def test_the_register_has_the_name_that_the_node_has_in_the_run(tmp_path: Path) -> None:
    """Also of a node that an earlier version registered by the name that it asked for."""

    async def story() -> None:
        place = Place(tmp_path)
        register = TicketRegister(tmp_path)
        ticket = register.new(NOW, lifetime_seconds=None)
        first, second = (admit(register, ticket, name="lab") for _ in range(2))
        assert [row.name for row in register.nodes()] == ["lab", "lab-2"]
        register.rename(second.node_id, "lab")
        with pytest.raises(StorageError, match=f"has 2 nodes 'lab': {first.node_id.hex()}, ") as ambiguous:
            register.ban("lab", "")
        assert ambiguous.value.code == "W5-118"
        assert [row.banned for row in register.nodes()] == [None, None]
        for came in (first, second):
            proof = came.node_id + came.secret.reveal()
            back = Hello(protocol=1, package="0", name="lab", credential=proof)
            place.name("lab", await place.gatekeeper.admit(back, "10.0.0.9"))
        place.bans.ban("lab-2", "it lies")
        place.gatekeeper.close()
        assert [(row.name, row.banned) for row in register.nodes()] == [("lab", None), ("lab-2", "it lies")]

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_ban_at_the_very_end_is_written_and_who_comes_after_it_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        register = TicketRegister(tmp_path)
        came = admit(register, register.new(NOW, lifetime_seconds=None))
        place.name("lab", Admission(came.node_id, name="lab"))
        place.bans.ban("lab", "it lies")
        proof = came.node_id + came.secret.reveal()
        back = place.gatekeeper.admit(Hello(protocol=1, package="0", name="x", credential=proof), "10.0.0.9")
        with pytest.raises(Exception, match="banned from the run: it lies"):
            await back
        place.bans.ban("lab", "again")
        place.gatekeeper.close()
        assert [row.banned for row in register.nodes()] == ["it lies"]

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_register_out_of_order_is_told_and_stops_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        register = TicketRegister(tmp_path)
        came = admit(register, register.new(NOW, lifetime_seconds=None))
        place.name("lab", Admission(came.node_id, name="lab"))
        (tmp_path / "tickets.json").write_bytes(b"damaged")
        place.bans.ban("lab", "it lies")
        place.bans.refresh(1e9)
        told = await place.until_told(2)
        assert all(text.startswith("trouble: run") and "damaged register" in text for text in told)
        place.gatekeeper.close()

    asyncio.run(asyncio.wait_for(story(), 60))
