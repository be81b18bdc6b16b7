"""The guest book: a name is one node's while the coordinator lives, and who was turned out stays out."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from tests.security.admission.test_register import NOW, admit
from w5xde.config import Settings
from w5xde.control.pool.connection_limits import ConnectionLimits
from w5xde.messages import Hello
from w5xde.protocol.session import COORDINATOR
from w5xde.runtime.admission.gatekeeper import Entry
from w5xde.runtime.admission.names import Guests, local_id
from w5xde.runtime.admission.register import TicketRegister
from w5xde.runtime.coordinator.peer import Peer
from w5xde.runtime.net import listener as door
from w5xde.runtime.net.connection import Connection, Owner
from w5xde.runtime.net.listener import Candidate


class Place:
    """A reception that only writes down what it is told."""

    def __init__(self, folder: Path) -> None:
        self.entry = Entry(folder, "0" * 16, Settings())
        self.entry.guard([door.ListenAddress(socket.AF_INET, "127.0.0.1")])
        self.entry.open("127.0.0.1", 5555)
        self.present: list[Peer] = []
        self.told: list[str] = []
        self._news = asyncio.Event()
        self.guests = Guests(
            self.entry,
            lambda: self.present,
            lambda peer, reason: self._hear(f"{peer.name} must go: {reason}"),
            lambda kind, text: self._hear(f"{kind}: {text}"),
            lambda error: self._hear(f"trouble: {error.what}"),
        )

    def _hear(self, text: str) -> None:
        self.told.append(text)
        self._news.set()

    async def until_told(self, count: int) -> list[str]:
        while len(self.told) < count:
            self._news.clear()
            await self._news.wait()
        return self.told


def guest(node_id: bytes, name: str) -> Peer:
    owner = Owner(opened=print, heard=print, lost=print, alive=print)
    visit = Candidate("10.0.0.7", ConnectionLimits(), is_here=False)
    visit.over()
    return Peer(Connection(COORDINATOR, owner), visit, name=name, node_id=node_id)


def test_a_name_is_one_nodes_alone_and_it_keeps_it(tmp_path: Path) -> None:
    async def story() -> None:
        guests = Place(tmp_path).guests
        one, two = b"1" * 8, b"2" * 8
        assert guests.name_for("lab", one, ()) == "lab"
        # It has gone; its name is still its own, and by another it does not come back.
        assert guests.name_for("lab", two, ()) == "lab-2"
        assert guests.name_for("somebody else", one, ()) == "lab"
        assert guests.name_for("lab", b"", ()) == "lab-3"
        # Those who only look come and go.
        assert guests.name_for("doctor", b"", ()) == "doctor"
        assert guests.name_for("doctor", b"", ("doctor",)) == "doctor-2"
        assert len(guests.name_for("x" * 64, b"3" * 8, ())) == 64
        assert len(guests.name_for("x" * 64, b"4" * 8, ())) <= 64

    asyncio.run(story())


def test_a_ban_reaches_a_node_under_whatever_name_it_is_here(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        register = TicketRegister(tmp_path)
        ticket = register.new(NOW, lifetime_seconds=None)
        ids = [admit(register, ticket, address=f"10.0.0.{at}").node_id for at in range(3)]
        names = [place.guests.name_for("lab", node_id, ()) for node_id in ids]
        place.present.append(guest(ids[0], "lab"))
        place.guests.ban("lab", "it lies")
        assert await place.until_told(1) == ["lab must go: this node is banned from the run: it lies"]
        place.present.clear()
        for name in names[1:]:
            place.guests.ban(name, "it lies too")
        assert (await place.until_told(2))[1:] == [
            f"revoked: ticket {ticket.id.hex()[:8]} is revoked: 3 nodes that came by it were banned"
        ]
        place.entry.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_ban_at_the_very_end_is_written_and_who_comes_after_it_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        register = TicketRegister(tmp_path)
        came = admit(register, register.new(NOW, lifetime_seconds=None))
        place.guests.name_for("lab", came.node_id, ())
        place.guests.ban("lab", "it lies")
        proof = came.node_id + came.secret.reveal()
        back = place.entry.admit(Hello(protocol=1, package="0", name="x", credential=proof), "10.0.0.9")
        with pytest.raises(Exception, match="banned from the run: it lies"):
            await back
        place.guests.ban("lab", "again")
        place.entry.close()
        assert [row.banned for row in register.nodes()] == ["it lies"]

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_register_out_of_order_is_told_and_stops_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        register = TicketRegister(tmp_path)
        came = admit(register, register.new(NOW, lifetime_seconds=None))
        place.guests.name_for("lab", came.node_id, ())
        (tmp_path / "tickets.json").write_bytes(b"damaged")
        place.guests.ban("lab", "it lies")
        place.guests.refresh(1e9)
        told = await place.until_told(2)
        assert all(text.startswith("trouble: run") and "damaged register" in text for text in told)
        place.entry.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_local_node_is_banned_by_what_it_is_whatever_it_is_called(tmp_path: Path) -> None:
    async def story() -> None:
        place = Place(tmp_path)
        local, guest_id = local_id("local-1"), b"1" * 8
        # Its name is kept for it, even if another node comes first.
        assert place.guests.name_for("local-1", guest_id, ()) == "local-1-2"
        assert place.guests.name_for("local-1", local, ()) == "local-1"
        # A connection that nobody has found to be broken still has the name: the ban goes by the id.
        assert place.guests.name_for("local-1", local, ("local-1",)) == "local-1-3"
        place.guests.ban("local-1-3", "it is broken")
        assert place.guests.local_ban(local) == "it is broken"
        assert place.guests.local_ban(local_id("local-2")) == ""
        place.entry.close()

    asyncio.run(asyncio.wait_for(story(), 60))
