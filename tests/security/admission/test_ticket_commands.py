"""What `w5xde ticket` tells: tables for people, data for programs, and a secret only once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.security.admission.test_register import ENTRANCE, NOW, admit
from w5xde.cli.tickets import (
    Wanted,
    parse_lifetime,
    parse_uses,
    ticket_ban,
    ticket_list,
    ticket_new,
    ticket_revoke,
    ticket_unban,
)
from w5xde.errors import StorageError, UsageError
from w5xde.runtime.admission.register import TicketRegister
from w5xde.runtime.admission.register_rows import Entrance
from w5xde.ticket import parse


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tuesday"
    folder.mkdir()
    TicketRegister.begin(folder, ENTRANCE)
    return folder


def test_a_new_ticket_is_the_line_to_run(folder):
    told = ticket_new(folder, NOW, Wanted(3600, 1, label="lab", qr=True), job="a b.py")
    ticket = parse(told.data["ticket"])
    assert told.lines[0] == f"w5xde join {told.data['ticket']} 'a b.py'"
    assert f"ticket {ticket.id.hex()[:8]}: one node, until 2027-01-15 09:00 UTC" in told.lines
    assert any("█" in line for line in told.lines)
    assert told.data["addresses"] == ["192.168.1.20:5555", "[fd00::1]:5555"]
    assert json.loads(json.dumps(told.data)) == told.data
    assert "any number of nodes, for ever" in ticket_new(folder, NOW, Wanted(None, None)).lines[2]


def test_the_line_names_no_job_if_its_code_comes_with_the_run(folder):
    told = ticket_new(folder, NOW, job="train.py", code_sha256="9b" * 32)
    assert told.lines[0] == f"w5xde join {told.data['ticket']}"
    assert told.lines[3] == f"the code of the job comes with it: sha256 {'9b' * 32}"
    assert told.data["code_sha256"] == "9b" * 32
    assert ticket_new(folder, NOW).data["code_sha256"] is None


def test_a_ticket_in_clear_text_says_so(folder):
    TicketRegister.begin(folder, Entrance((("10.0.0.1", 5),), "", is_clear=True))
    told = ticket_new(folder, NOW)
    assert told.data["is_clear"]
    assert "clear text" in told.lines[-1]


def test_a_ticket_of_a_run_on_loopback_warns_of_nothing(folder):
    TicketRegister.begin(folder, Entrance((("127.0.0.1", 5), ("::1", 5)), "", is_clear=True))
    told = ticket_new(folder, NOW).lines
    assert told[-1].startswith("only this machine can join")
    assert not any("clear text" in line for line in told)


def test_the_list_shows_states_and_nodes_and_no_secret(folder):
    register = TicketRegister(folder)
    good, late = register.new(NOW, label="lab"), register.new(NOW, lifetime_seconds=60)
    node = admit(register, good, name="pi\x1b[31m-5")
    admit(register, good, name="lab-3")
    ticket_ban(folder, "lab-3", NOW, reason="sends nonsense")
    told = ticket_list(folder, NOW + 3600)
    text = "\n".join(told.lines)
    assert "fingerprint c2c2c2c2c2c2c2c2…" in text
    assert [row["state"] for row in told.data["tickets"]] == ["good", "expired"]
    assert "2 of 100" in text
    assert "sends nonsense" in text
    assert "pi?[31m-5" in text
    assert "\x1b" not in text
    everything = text + json.dumps(told.data) + repr(told)
    for secret in (good.secret, late.secret, node.secret):
        assert secret.reveal().hex() not in everything
        assert secret.digest().hex() not in everything


def test_revoking_says_who_stays_and_who_goes(folder):
    register = TicketRegister(folder)
    ticket = register.new(NOW)
    node = admit(register, ticket, name="lab-3")
    short = ticket.id.hex()[:8]
    told = ticket_revoke(folder, short, NOW)
    assert told.lines == [
        f"ticket {short} is revoked: nobody else comes by it",
        "1 node that came by it stays; --turn-out turns out these too",
    ]
    told = ticket_revoke(folder, short, NOW, turn_out=True)
    assert told.data["turned_out"] == [node.node_id.hex()]
    assert "lab-3" in told.lines[1]
    assert ticket_revoke(folder, short, NOW, turn_out=True).lines[1] == "turned out: nobody"


def test_a_ban_says_by_which_ticket_the_node_could_come_again(folder):
    register = TicketRegister(folder)
    ticket = register.new(NOW)
    node = admit(register, ticket, name="lab-3")
    told = ticket_ban(folder, "lab-3", NOW, reason="sends nonsense")
    short = ticket.id.hex()[:8]
    assert told.lines[0] == f"banned lab-3 ({node.node_id.hex()}): sends nonsense"
    assert f"w5xde ticket revoke tuesday {short}" in told.lines[1]
    ticket_revoke(folder, short, NOW)
    assert len(ticket_ban(folder, "lab-3", NOW).lines) == 1


def test_who_was_banned_may_come_back_and_is_named(folder):
    register = TicketRegister(folder)
    ticket = register.new(NOW)
    node = admit(register, ticket, name="lab-\x1b3", address="10.0.0.7")
    register.ban_node(node.node_id, "its updates are wrong", NOW)
    assert ticket_list(folder, NOW).data["nodes"][0]["address"] == "10.0.0.7"
    told = ticket_unban(folder, node.node_id.hex())
    assert told.lines == [
        f"lab-?3 ({node.node_id.hex()}) may come back; it was banned: its updates are wrong"
    ]
    assert [row["id"] for row in told.data["unbanned"]] == [node.node_id.hex()]
    register.admit_node(node.node_id, node.secret.reveal())
    assert ticket_unban(folder, node.node_id.hex()).lines == [f"{node.node_id.hex()} was not banned"]


def test_a_run_without_a_register_is_told(tmp_path):
    with pytest.raises(StorageError, match="has no register of tickets"):
        ticket_list(tmp_path, NOW)


def test_lifetimes_and_uses_as_people_write_them():
    assert [parse_lifetime(text) for text in ("24h", "90 m", "7D", "30", "never")] == [
        86400, 5400, 604800, 30, None,
    ]  # fmt: skip
    assert [parse_uses(text) for text in ("1", " 100", "any")] == [1, 100, None]
    for parser, wrong in [
        (parse_lifetime, ("", "0", "1w", "-1h", "h")),
        (parse_uses, ("", "0", "-1", "x", "²")),
    ]:
        for text in wrong:
            with pytest.raises(UsageError):
                parser(text)
