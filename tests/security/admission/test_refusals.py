"""Whoever should not come in is refused with its reason, and the model is the one nobody attacked."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

import w5xde
from tests.processes import HERE, JOBS, Coordinator, coordinator, node
from tests.security.stranger import Stranger
from tests.sockets import answering
from w5xde.errors import JoinError
from w5xde.learn.model.layout import Blueprint
from w5xde.messages import Answer, Bye, Hello, Ready, Refuse, Update, Welcome, Work
from w5xde.protocol.wire import encode
from w5xde.runtime.admission.identity import RunIdentity
from w5xde.runtime.net import tls
from w5xde.ticket import Secret, Ticket

HOUR = 3600.0


def proof(ticket: Ticket) -> bytes:
    return ticket.id + ticket.secret.reveal()


def refused(run: Coordinator, greeting: dict[str, Any]) -> tuple[str, str]:
    with Stranger(run.ticket) as stranger:
        stranger.greet(**greeting)
        answer = stranger.hear()
        assert isinstance(answer, Refuse), answer
        assert stranger.hear() is None, "nothing else is said to it"
    return answer.code, answer.what


def test_every_wrong_proof_is_refused_with_its_reason(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run:
        register, now = run.register, time.time()
        expired = register.new(now - 2 * HOUR, lifetime_seconds=HOUR)
        revoked = register.new(now)
        register.revoke(revoked.id.hex(), now)
        used = register.new(now, uses=1)
        member = register.admit_ticket(used.id, used.secret.reveal(), now, name="member")
        outcast = register.admit_ticket(*_parts(register.new(now)), now, name="outcast")
        register.ban("outcast", "it cheated")
        own = member.node_id + member.secret.reveal()
        wrong = {"ticket": run.ticket.id + bytes(16)}
        cases: list[tuple[dict[str, Any], str, str]] = [
            (wrong, "W5-113", "does not know this ticket"),
            ({"ticket": bytes(24)}, "W5-113", "does not know this ticket"),
            ({"ticket": b""}, "W5-113", "joining needs a ticket"),
            ({"ticket": proof(run.ticket)[:-1]}, "W5-113", "joining needs a ticket"),
            ({"ticket": proof(expired)}, "W5-105", "expired 1 h ago"),
            ({"ticket": proof(revoked)}, "W5-105", "revoked"),
            ({"ticket": proof(used)}, "W5-105", "used up after 1 use"),
            ({"credential": member.node_id + bytes(32)}, "W5-113", "does not know this node"),
            ({"credential": bytes(40)}, "W5-113", "does not know this node"),
            (
                {"credential": outcast.node_id + outcast.secret.reveal()},
                "W5-114",
                "banned from the run: it cheated",
            ),
            (
                {"credential": own, "ticket": b"", "run": "tuesday"},
                "W5-109",
                "the run here is mine, not tuesday",
            ),
            ({"protocol": 1}, "W5-107", "speaks protocol 1, the run needs 3"),
            ({"protocol": 0, "ticket": b""}, "W5-107", "speaks protocol 0, the run needs 3"),
        ]
        for greeting, code, words in cases:
            found = refused(run, greeting)
            assert found[0] == code, (greeting.keys(), found)
            assert words in found[1]
        told = run.ledger_text()
        assert "was turned away: the coordinator does not know this ticket" in told
        assert run.stop_and_compare(tmp_path)["nodes"][0]["name"] == "local-1"


def _parts(ticket: Ticket) -> tuple[bytes, bytes]:
    return ticket.id, ticket.secret.reveal()


def test_what_is_not_tls_1_3_is_not_heard(tmp_path: Path) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with coordinator(tmp_path) as run:
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            Stranger(run.ticket, context=old)
        hello = encode(Hello(protocol=1, package="0", name="stranger", ticket=proof(run.ticket)))
        for at, (words, half) in enumerate(
            [(hello, True), (hello, False), (b"\x16", False), (b"", True), (b"GET / HTTP/1.1\r\n\r\n", True)]
        ):
            with socket.create_connection((HERE, run.port), 10, (f"127.0.9.{at + 1}", 0)) as plain:
                plain.sendall(words)
                if half:
                    plain.shutdown(socket.SHUT_WR)
                    back = b""
                    with contextlib.suppress(ConnectionResetError):
                        back = plain.recv(1000)
                    # An alert of TLS at most.
                    assert not back or back[0] == 21, back
        run.wait_until_recorded("no TLS 1.3 came about")
        # It still serves who comes as it should.
        with Stranger(run.ticket) as fine:
            fine.greet(looks=True)
            assert isinstance(fine.hear(), Welcome)
        run.stop_and_compare(tmp_path)


def test_who_came_in_cannot_speak_for_others(tmp_path: Path) -> None:
    """Another model, a lease nobody was lent, of another node or another life: cut off, nothing changes."""
    with coordinator(tmp_path) as run:
        with Stranger(run.ticket) as other:
            other.greet(name="other")
            assert isinstance(other.hear(), Welcome)
            other.say(Ready("0" * 64))
            answer = other.hear()
            assert isinstance(answer, Refuse)
            assert answer.code == "W5-201"
        with Stranger(run.ticket) as looking:
            looking.greet(name="looking", looks=True)
            welcome = looking.hear()
            assert isinstance(welcome, Welcome)
            assert welcome.credential == b""
            looking.say(Ready(welcome.layout.digest()))
            answer = looking.hear()
            assert isinstance(answer, Refuse)
            assert answer.code == "W5-113"
        # "absent" answers what it was lent, but for an entry that the model has not.
        for name, lease in [
            ("early", 1),
            ("empty early", 1),
            ("foreign", None),
            ("absent", 0),
            ("of the last life", 2**40 + 1),
        ]:
            with Stranger(run.ticket) as hostile:
                hostile.greet(name=name.replace(" ", "-"))
                hostile.get_ready()
                given: Any = None
                while "early" not in name and not isinstance(given, Work):
                    given = hostile.hear()
                version = given.version if given else 0
                leases = [loan.lease for loan in given.loans] if given else [1]
                chosen = lease if lease is not None else max(leases) + 1000
                answers, body = [Answer(chosen, loss_sum=1.0)], bytes(64)
                if name == "empty early":
                    answers, body = [], b""
                if name == "absent":
                    answers = [Answer(each, loss_sum=1.0, absent=[0, 99]) for each in leases]
                    body = bytes(Blueprint(welcome.layout).moving_bytes * len(leases))
                hostile.say(Update(version, answers), body=body)
                said = hostile.hear()
                while said is not None and not isinstance(said, Bye):
                    said = hostile.hear()
        run.wait_until_recorded("of-the-last-life left")
        result = run.stop_and_compare(tmp_path)
        assert [node["name"] for node in result["nodes"] if node["batches"]] == ["local-1"]


SPOILED: list[tuple[Callable[[bytes], bytes], str | None]] = [
    (lambda proof: b"", "W5-120"),
    (lambda proof: proof[:-8], "W5-120"),
    (lambda proof: bytes(len(proof)), "W5-212"),
    (lambda proof: b"\xff" * len(proof), "W5-212"),
    (lambda proof: proof[136:] + proof[:136], "W5-212"),
    # What is longer than it can be is not even read.
    (lambda proof: proof + bytes(8), None),
    (lambda proof: bytes(1 << 20), None),
]


def test_who_does_not_prove_itself_is_lent_nothing(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run:
        for at, (spoil, code) in enumerate(SPOILED):
            with Stranger(run.ticket) as hostile:
                hostile.greet(name=f"hostile-{at}")
                with contextlib.suppress(OSError):
                    hostile.get_ready(spoil)
                answer = hostile.hear()
                assert (answer.code if isinstance(answer, Refuse) else answer) == code
            run.wait_until_recorded(
                f"hostile-{at} was refused" if code else f"hostile-{at} did not join: a frame"
            )
        result = run.stop_and_compare(tmp_path)
        assert [node["name"] for node in result["nodes"]] == ["local-1"]


def test_an_answer_that_is_said_twice_counts_once(tmp_path: Path) -> None:
    """A relay says a node's first update again; in clear, or it could not."""
    replayed = threading.Event()
    with coordinator(tmp_path, host=HERE, road="tcp") as run:

        def relay(client: socket.socket) -> None:
            with socket.create_connection((HERE, run.port)) as server:
                down = threading.Thread(target=_copy, args=(server, client, None))
                down.start()
                _copy(client, server, replayed)
                down.join()

        with answering(relay) as address:
            host, _, port = address.rpartition(":")
            through = dataclasses.replace(run.ticket, addresses=((host, int(port)),))
            with node(through, node_name="echo", road="tcp"):
                assert replayed.wait(30)
                run.wait_until_recorded("echo left (its answer does not fit what it was lent)")
        run.stop_and_compare(tmp_path)


def _copy(source: socket.socket, target: socket.socket, replayed: threading.Event | None) -> None:
    """Forward, and the first frame that is an update twice."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 20):
            target.sendall(data)
            if replayed is not None and not replayed.is_set() and b"\xa6update" in data and data[:2] == b"W5":
                target.sendall(data)
                replayed.set()
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


# --- from the node's side ---------------------------------------------------------------------------


def test_a_node_says_nothing_to_who_did_not_make_its_ticket(tmp_path: Path) -> None:
    """Neither to somebody with a certificate of his own, nor by a ticket whose pin is another's."""
    theirs = RunIdentity.load_or_create(token_hex(8), tmp_path / "theirs")
    ours = RunIdentity.load_or_create(token_hex(8), tmp_path / "ours")
    heard: list[bytes] = []

    def pretend(connection: socket.socket) -> None:
        context = tls.server_context(theirs.file)
        with contextlib.suppress(ssl.SSLError), context.wrap_socket(connection, server_side=True) as secured:
            heard.append(secured.recv(100))

    with answering(pretend) as address:
        host, _, port = address.rpartition(":")
        ticket = Ticket(((host, int(port)),), ours.fingerprint, bytes(8), Secret(bytes(16)))
        with pytest.raises(JoinError, match="is not the one that made this ticket") as caught:
            w5xde.join(ticket, f"{JOBS}:job", wait=0, road="tcp")
    assert caught.value.code == "W5-501"
    assert b"".join(heard) == b""


def test_a_wrong_pin_is_told_by_both_fingerprints(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run:
        other = dataclasses.replace(run.ticket, fingerprint=bytes(32))
        with pytest.raises(JoinError) as caught:
            w5xde.join(other, f"{JOBS}:job", wait=0, road="tcp")
        assert caught.value.code == "W5-501"
        assert run.ticket.fingerprint.hex()[:16] in caught.value.why
        run.stop_and_compare(tmp_path)


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_cut_ticket_is_noticed_before_anybody_is_dialled(cut: int) -> None:
    whole = Ticket((("192.0.2.1", 5555),), bytes(32), bytes(8), Secret(bytes(16))).to_text()
    with pytest.raises(JoinError, match="damaged") as caught:
        w5xde.join(whole[:-cut], f"{JOBS}:job")
    assert caught.value.code == "W5-101"
    assert whole[10:30] not in str(caught.value.lines())
