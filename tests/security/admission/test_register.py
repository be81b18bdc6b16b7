"""The register lets in who has a good ticket or credential, and nobody else, whoever changes it meanwhile."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.admission.test_identity import trouble
from w5xde.errors import UsageError
from w5xde.runtime.admission import private_files as private
from w5xde.runtime.admission import register as tickets
from w5xde.runtime.admission.register import Refused, TicketRegister
from w5xde.runtime.admission.register_rows import Entrance
from w5xde.runtime.durable import sealed_json as seal
from w5xde.ticket import Ticket, parse

NOW = 1_800_000_000.0
DAY = 24 * 3600.0
ENTRANCE = Entrance((("192.168.1.20", 5555), ("fd00::1", 5555)), "c2" * 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tuesday"
    folder.mkdir()
    return folder


@pytest.fixture
def register(folder: Path) -> TicketRegister:
    return TicketRegister.begin(folder, ENTRANCE)


def refused(do, *given) -> Refused:
    with pytest.raises(Refused) as caught:
        do(*given)
    return caught.value


def admit(register: TicketRegister, ticket: Ticket, now: float = NOW, name: str = "node", address: str = ""):
    return register.admit_ticket(ticket.id, ticket.secret.reveal(), now, name=name, address=address)


# --- tickets ---------------------------------------------------------------------------------------


def test_a_ticket_says_where_to_come_and_whom_to_trust(register):
    ticket = register.new(NOW, label="lab")
    assert parse(ticket.to_text()) == ticket
    assert ticket.addresses == ENTRANCE.addresses
    assert ticket.fingerprint == bytes.fromhex(ENTRANCE.fingerprint)
    assert ticket.expires_at == NOW + DAY
    [row] = register.tickets()
    assert (row.id, row.label, row.uses, row.uses_max) == (ticket.id.hex(), "lab", 0, 100)


def test_a_ticket_lets_in_and_gives_each_node_a_credential_of_its_own(register):
    ticket = register.new(NOW)
    one, two = admit(register, ticket, name="one"), admit(register, ticket, name="two")
    assert one.node_id != two.node_id
    assert one.secret != two.secret
    assert register.admit_node(one.node_id, one.secret.reveal()).name == "one"
    assert register.admit_node(two.node_id, two.secret.reveal()).ticket == ticket.id.hex()
    assert register.tickets()[0].uses == 2


def test_who_does_not_have_the_ticket_learns_nothing_about_it(register):
    ticket = register.new(NOW, uses=1)
    admit(register, ticket)
    register.revoke(ticket.id.hex(), NOW)
    right = ticket.secret.reveal()
    heard = set()
    for ticket_id, secret, kind in [
        (bytes(8), right, "unknown"),
        (b"", b"", "unknown"),
        (ticket.id, bytes(16), "wrong secret"),
        (ticket.id, b"", "wrong secret"),
        (ticket.id, right + b"\0", "wrong secret"),
        (ticket.id, right[:-1], "wrong secret"),
    ]:
        error = refused(register.admit_ticket, ticket_id, secret, NOW + 2 * DAY)
        assert error.kind == kind
        assert error.code == "W5-113"
        heard.add((error.what, error.why, error.fix))
    assert len(heard) == 1


def test_an_unknown_id_is_compared_like_a_known_one(register, monkeypatch):
    ticket = register.new(NOW)
    compared = []
    real = tickets.hmac.compare_digest

    def watched(one, two):
        compared.append((len(one), len(two)))
        return real(one, two)

    monkeypatch.setattr(tickets.hmac, "compare_digest", watched)
    for ask in (register.admit_ticket, lambda who, secret, now: register.admit_node(who, secret)):
        refused(ask, bytes(8), b"x", NOW)
        refused(ask, ticket.id, b"x", NOW)
    assert compared == [(32, 32)] * 4


def test_a_ticket_ends_by_time_by_use_and_by_word_each_in_its_own_words(register):
    late = register.new(NOW, lifetime_seconds=3600)
    admit(register, late, NOW + 3599)
    error = refused(admit, register, late, NOW + 3 * 3600)
    assert (error.kind, error.code) == ("expired", "W5-105")
    assert error.what == "the coordinator no longer accepts this ticket (expired 2 h ago)"

    single = register.new(NOW, uses=1)
    admit(register, single)
    error = refused(admit, register, single)
    assert (error.kind, error.code) == ("used up", "W5-105")
    assert "(used up after 1 use)" in error.what

    back = register.new(NOW)
    register.revoke(back.id.hex(), NOW)
    error = refused(admit, register, back)
    assert (error.kind, error.code) == ("revoked", "W5-105")
    assert "revoked" in error.what


def test_without_limits_a_ticket_goes_on(register):
    ticket = register.new(NOW, lifetime_seconds=None, uses=None)
    assert ticket.expires_at == 0
    for days in range(5):
        admit(register, ticket, NOW + days * 1000 * DAY)
    for wrong in ({"lifetime_seconds": 0}, {"uses": 0}, {"uses": -1}):
        with pytest.raises(UsageError):
            register.new(NOW, **wrong)


def test_a_ticket_is_named_by_how_its_id_begins_if_that_is_one(register):
    ticket = register.new(NOW)
    assert trouble(lambda: register.revoke("", NOW)).code == "W5-118"
    assert trouble(lambda: register.revoke("zz", NOW)).code == "W5-118"
    row, turned_out = register.revoke(ticket.id.hex()[:6].upper(), NOW)
    assert row.revoked_at == NOW
    assert turned_out == []
    # Once more changes nothing, not even when it was.
    assert register.revoke(ticket.id.hex(), NOW + 5)[0].revoked_at == NOW


# --- nodes -----------------------------------------------------------------------------------------


def test_a_node_stays_when_its_ticket_ends_unless_it_is_turned_out_with_it(register):
    ticket, other = register.new(NOW), register.new(NOW)
    one, two = admit(register, ticket, name="one"), admit(register, other, name="two")
    register.revoke(ticket.id.hex(), NOW)
    assert register.admit_node(one.node_id, one.secret.reveal()).name == "one"
    _, gone = register.revoke(ticket.id.hex(), NOW, turn_out=True)
    assert [node.name for node in gone] == ["one"]
    error = refused(register.admit_node, one.node_id, one.secret.reveal())
    assert (error.kind, error.code) == ("banned", "W5-114")
    assert "its ticket was revoked" in error.what
    assert register.admit_node(two.node_id, two.secret.reveal()).name == "two"


def test_a_ban_is_by_id_or_by_name_and_says_why(register):
    ticket = register.new(NOW)
    nodes = [admit(register, ticket, name=name) for name in ("a", "b", "b", "")]
    assert [row.name for row in register.nodes()] == ["a", "b", "b-2", ""]
    assert register.ban("b", "sends nonsense").id == nodes[1].node_id.hex()
    assert register.ban(nodes[0].node_id.hex(), "").name == "a"
    for nobody in ("nobody", ""):
        assert trouble(lambda nobody=nobody: register.ban(nobody, "")).code == "W5-118"
    assert [register.ban_of(node.node_id) for node in nodes] == [
        "banned",
        "sends nonsense",
        None,
        None,
    ]
    error = refused(register.admit_node, nodes[1].node_id, nodes[1].secret.reveal())
    assert error.what == "this node is banned from the run: sends nonsense"


def test_only_who_has_the_credential_learns_of_a_ban(register):
    node = admit(register, register.new(NOW))
    register.ban(node.node_id.hex(), "secret reasons")
    for who in (node.node_id, bytes(8)):
        error = refused(register.admit_node, who, b"wrong")
        assert error.code == "W5-113"
        assert error.what == "the coordinator does not know this node"


def test_who_was_turned_out_comes_back_neither_as_itself_nor_by_its_ticket(register, folder):
    ticket, other = register.new(NOW), register.new(NOW)
    liar = admit(register, ticket, address="10.0.0.7")
    admit(register, ticket, name=liar.node_id.hex(), address="10.0.0.8")
    assert register.unban(liar.node_id.hex()).id == liar.node_id.hex(), "an id before a name"
    assert register.ban_node(liar.node_id, "an update of it is wrong", NOW) is None
    # Also for a coordinator that starts anew, and not for whoever took its id for a name.
    again = TicketRegister(folder)
    assert [row.banned for row in again.nodes()] == ["an update of it is wrong", None]
    error = refused(again.admit_node, liar.node_id, liar.secret.reveal())
    assert (error.kind, error.code) == ("banned", "W5-114")
    assert "an update of it is wrong" in error.what
    for ask in (again.admit_ticket, again.check_ticket):
        with pytest.raises(Refused, match="came from here by this ticket is banned") as caught:
            ask(ticket.id, ticket.secret.reveal(), NOW, address="10.0.0.7")
        assert (caught.value.kind, caught.value.code) == ("banned", "W5-114")
    # From elsewhere, or by a ticket that somebody gave it since, it is somebody else.
    admit(again, ticket, address="10.0.0.9")
    admit(again, other, address="10.0.0.7")


def test_a_ticket_that_brought_three_who_were_banned_is_revoked(register):
    ticket = register.new(NOW)
    nodes = [admit(register, ticket, address=f"10.0.0.{place}") for place in range(5)]
    register.ban(nodes[0].node_id.hex(), "by hand")
    assert register.ban_node(nodes[1].node_id, "wrong", NOW) is None
    assert register.ban_node(nodes[1].node_id, "wrong once more", NOW) is None
    row = register.ban_node(nodes[2].node_id, "wrong", NOW + 1)
    assert row is not None
    assert (row.id, row.revoked_at) == (ticket.id.hex(), NOW + 1)
    assert refused(admit, register, ticket).kind == "revoked"
    # Those who did nothing stay, and it is revoked once.
    register.admit_node(nodes[3].node_id, nodes[3].secret.reveal())
    assert register.ban_node(nodes[3].node_id, "wrong", NOW) is None
    assert register.ban_node(bytes(8), "nobody knows it", NOW) is None


def test_who_is_banned_may_be_let_in_again(register):
    ticket = register.new(NOW)
    nodes = [admit(register, ticket, name="lab", address="10.0.0.7") for _ in range(2)]
    register.ban_node(nodes[0].node_id, "wrong", NOW)
    row = register.unban("lab")
    assert (row.id, row.banned) == (nodes[0].node_id.hex(), "wrong")
    register.admit_node(nodes[0].node_id, nodes[0].secret.reveal())
    admit(register, ticket, address="10.0.0.7")
    assert register.unban("lab").banned is None
    assert trouble(lambda: register.unban("nobody")).code == "W5-118"


def test_a_ticket_is_no_credential_and_a_credential_no_ticket(register):
    ticket = register.new(NOW)
    node = admit(register, ticket)
    assert refused(register.admit_node, ticket.id, ticket.secret.reveal()).kind == "unknown"
    assert refused(register.admit_ticket, node.node_id, node.secret.reveal(), NOW).kind == "unknown"


def test_there_is_an_end_to_tickets_and_nodes(register, monkeypatch):
    monkeypatch.setattr(tickets, "TICKETS_MAX", 2)
    monkeypatch.setattr(tickets, "NODES_MAX", 1)
    ticket = register.new(NOW, label="x" * 10_000)
    register.new(NOW)
    assert "2 tickets" in trouble(lambda: register.new(NOW)).what
    admit(register, ticket, name="y" * 10_000)
    assert refused(admit, register, ticket).kind == "full"
    assert len(register.tickets()[0].label) == len(register.nodes()[0].name) == 200


# --- the file --------------------------------------------------------------------------------------


def test_the_file_is_private_and_holds_no_secret(register, folder):
    ticket = register.new(NOW, label="lab")
    node = admit(register, ticket)
    for name in ("tickets.json", "tickets.lock"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    data = (folder / "tickets.json").read_bytes()
    for secret in (ticket.secret, node.secret):
        assert secret.reveal() not in data
        assert secret.reveal().hex().encode() not in data
        assert secret.digest().hex().encode() in data
    assert ticket.to_text().encode() not in data
    shown = repr(register.tickets()) + repr(register.nodes())
    assert ticket.secret.reveal().hex() not in shown
    assert sorted(path.name for path in folder.iterdir()) == ["tickets.json", "tickets.lock"]


def test_the_coordinator_hears_of_every_change_before_it_decides(register, folder):
    command = TicketRegister(folder)
    ticket = command.new(NOW)
    node = admit(register, ticket)
    assert not register.refresh()
    command.ban(node.node_id.hex(), "enough")
    assert register.ban_of(node.node_id) is None
    assert refused(register.admit_node, node.node_id, node.secret.reveal()).kind == "banned"
    command.revoke(ticket.id.hex(), NOW)
    assert register.refresh()
    assert refused(admit, register, ticket).kind == "revoked"


def test_strangers_never_make_the_coordinator_wait_for_the_lock(register, folder, monkeypatch):
    ticket = register.new(NOW)
    node = admit(register, ticket)
    monkeypatch.setattr(private, "LOCK_SECONDS", 0.0)
    with private.locked(folder / "tickets.lock"):
        refused(register.admit_ticket, ticket.id, b"wrong", NOW)
        refused(register.admit_node, bytes(8), b"wrong")
        register.admit_node(node.node_id, node.secret.reveal())


def test_a_run_that_goes_on_keeps_its_register_and_moves_its_entrance(register, folder):
    ticket = register.new(NOW)
    moved = Entrance((("10.0.0.9", 6000),), "", is_clear=True)
    again = TicketRegister.begin(folder, moved)
    admit(again, ticket)
    assert again.entrance == moved
    assert again.new(NOW).is_clear


def test_a_damaged_register_is_refused_and_never_begun_anew(register, folder):
    ticket = register.new(NOW)
    file = folder / "tickets.json"
    whole = file.read_bytes()
    for damaged in (
        b"",
        b"{}\n",
        whole[:-1],
        whole[:-40],
        whole.replace(b'"uses":0', b'"uses":9'),
        whole * 2,
    ):
        file.write_bytes(damaged)
        for use in (
            lambda: TicketRegister(folder),
            lambda: TicketRegister.begin(folder, ENTRANCE),
            lambda: admit(register, ticket),
            lambda: register.new(NOW),
        ):
            error = trouble(use)
            assert error.code == "W5-414"
            assert "damaged" in error.what
            assert "tuesday" in error.what
        assert file.read_bytes() == damaged
    file.write_bytes(whole)
    admit(register, ticket)


NO_DIGEST = b"""{"nodes":{"0123456789abcdef":{"id":"0123456789abcdef","sha256":"zz","name":"",
"ticket":"0123456789abcdef","joined_at":1.0}}}"""


def test_a_register_of_another_format_is_refused(register, folder):
    file = folder / "tickets.json"
    for book in (
        b'{"format":2}',
        b'{"format":1,"more":1}',
        b'{"tickets":{"a":{}}}',
        NO_DIGEST,
        b"[" * 100_000,
    ):
        file.write_bytes(seal.seal(book)[0] + b"\n")
        assert trouble(lambda: TicketRegister(folder)).code == "W5-414"


def test_a_register_that_is_missing_or_open_to_others_is_refused(register, folder):
    ticket = register.new(NOW)
    file = folder / "tickets.json"
    file.chmod(0o644)
    assert trouble(lambda: TicketRegister(folder)).code == "W5-410"
    file.rename(folder / "away")
    assert "has lost its register" in trouble(lambda: admit(register, ticket)).what
    assert "start its coordinator" in trouble(lambda: TicketRegister(folder)).fix


# --- several processes -----------------------------------------------------------------------------

OTHER = """
import sys
from pathlib import Path
from w5xde.runtime.admission.register import TicketRegister
register = TicketRegister(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for at in range(int(sys.argv[2])):
    ticket = register.new(1_800_000_000.0, label=sys.argv[3])
    if at % 3 == 0:
        register.revoke(ticket.id.hex(), 1_800_000_000.0)
    print(ticket.id.hex(), flush=True)
"""


def other(folder: Path, count: int, label: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder), str(count), label],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def test_processes_that_change_it_at_once_lose_nothing(register, folder):
    ticket = register.new(NOW, uses=25)
    processes = [other(folder, 30, label) for label in ("one", "two")]
    for process in processes:
        go(process)
    nodes = [admit(register, ticket, name=f"node {at}") for at in range(25)]
    assert refused(admit, register, ticket).kind == "used up"
    made = {line for process in processes for line in process.communicate(timeout=30)[0].split()}
    rows = register.tickets()
    assert len(made) == 60
    assert {row.id for row in rows} == made | {ticket.id.hex()}
    assert sum(row.revoked_at is not None for row in rows) == 20
    assert rows[0].uses == 25
    for node in nodes:
        register.admit_node(node.node_id, node.secret.reveal())


def test_a_process_killed_while_it_changes_it_leaves_it_whole_and_free(register, folder):
    for after in (1, 3, 8):
        process = other(folder, 10_000, "killed")
        go(process)
        told = [process.stdout.readline().strip() for _ in range(after)]
        process.kill()
        process.communicate(timeout=10)
        known = {row.id for row in TicketRegister(folder).tickets()}
        assert set(told) <= known
        register.new(NOW)
    assert sorted(path.name for path in folder.iterdir()) == ["tickets.json", "tickets.lock"]
