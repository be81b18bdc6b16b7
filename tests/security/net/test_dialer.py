"""All addresses of a ticket are tried at once, and the first that is the right one is taken."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from secrets import token_hex

import pytest

from tests.runtime.net.test_connection import Ears
from tests.security.pool import attacked
from tests.system.harness import free_port
from w5xde.config import Settings
from w5xde.control.pool.connection_limits import Doorman
from w5xde.doctor import remote_checks as there
from w5xde.errors import JoinError
from w5xde.protocol.session import COORDINATOR, NODE
from w5xde.runtime.admission.identity import RunIdentity
from w5xde.runtime.net import dialer as route
from w5xde.runtime.net import tls
from w5xde.runtime.net.dialer import Route
from w5xde.runtime.net.listener import Door, Place
from w5xde.ticket import Secret, Ticket

# One port, several addresses of this machine.
FIRST, SECOND, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
# Nothing is ever sent there by anybody who keeps to the standards.
NOWHERE = "192.0.2.254"


def listening(identity: RunIdentity, host: str, port: int) -> Door:
    door = Door(lambda visit: Ears(COORDINATOR).connection, Doorman())
    door.context = tls.server_context(identity)
    door.listen([Place(2, host)], host, port, "tcp")
    return door


def ticket_for(identity: RunIdentity, port: int, *hosts: str) -> Ticket:
    return Ticket(tuple((host, port) for host in hosts), identity.fingerprint, bytes(8), Secret(bytes(16)))


def test_the_right_one_wins_over_one_that_is_silent_and_one_that_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (RunIdentity.load_or_create(token_hex(8), tmp_path / name) for name in ("ours", "theirs"))
    port = free_port()

    async def story() -> None:
        doors = [listening(theirs, FIRST, port), listening(ours, SECOND, port)]
        node, began = Ears(NODE), time.monotonic()
        found = Route(ticket_for(ours, port, NOWHERE, FIRST, SECOND), Settings(road="tcp"))
        # Again by the certificate that is known by now.
        for _ in range(2):
            node = Ears(NODE)
            connection = await found.dial(lambda ears=node: ears.connection)
            assert connection.peer == f"{SECOND}:{port}"
            connection.abort()
            await asyncio.wait_for(node.lost.wait(), 5)
        assert time.monotonic() - began < route.DIAL_SECONDS
        for door in doors:
            door.close()

    asyncio.run(story())


def test_if_none_is_right_the_most_telling_reason_is_told(tmp_path: Path) -> None:
    ours, theirs = (RunIdentity.load_or_create(token_hex(8), tmp_path / name) for name in ("ours", "theirs"))
    port = free_port()

    async def story() -> None:
        door = listening(theirs, FIRST, port)
        for hosts, code, words in [
            ((SECOND, FIRST), "W5-501", "not the one that made this ticket"),
            ((SECOND, THIRD), "W5-103", "none of the ticket's 2 addresses answers"),
        ]:
            with pytest.raises(JoinError, match=words) as caught:
                await Route(ticket_for(ours, port, *hosts), Settings(road="tcp")).dial(
                    lambda: Ears(NODE).connection
                )
            assert caught.value.code == code
        assert f"nothing answers at {SECOND}:{port}" in caught.value.why
        door.close()

    asyncio.run(story())


def test_the_doctor_looks_over_tls_and_uses_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three looks in a row, and there is a limit to handshakes from one address.
    monkeypatch.setattr(there, "DIALS", 1)
    with attacked(tmp_path) as run:
        found = {each.check: each for each in there.check_route(there.target_of(run.ticket.to_text()))}
        assert found["coordinator"].what.startswith("run mine, sync")
        assert found["tls"].measured == {"tls": "TLSv1.3"}
        other = Ticket(run.ticket.addresses, bytes(32), run.ticket.id, run.ticket.secret)
        found = {each.check: each for each in there.check_route(there.target_of(other.to_text()))}
        assert (found["tls"].state, found["tls"].code) == ("error", "W5-501")
        assert "coordinator" not in found
        # Without a ticket it sees no more than that TLS is spoken.
        found = {each.check: each for each in there.check_route(there.target_of(f"127.0.0.1:{run.port}"))}
        assert (found["coordinator"].state, found["coordinator"].code) == ("warning", "W5-102")
        assert [row.uses for row in run.register.tickets()] == [0]
        assert run.register.nodes() == []
        run.stop_and_compare(tmp_path)
