"""Code that travels, as attackers see it: a coordinator that sends what it should not, and peers that ask."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import w5xde
from tests.processes import HERE, JOBS, Coordinator, coordinator
from tests.protocol.streams import around, feed, head
from tests.security.measure import MIB, peak_bytes, refusal_of
from tests.security.stranger import Stranger
from tests.sockets import answering, clear_ticket
from w5xde.errors import JoinError, W5xdeError
from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.message_types import CODE_BYTES_MAX, CODE_FILES_MAX
from w5xde.messages import Layout, Offer, Refuse, Rules, Welcome
from w5xde.protocol.wire import Decoder, encode
from w5xde.runtime.node import code_request
from w5xde.runtime.node.limits import OFFER_LIMITS
from w5xde.ticket import Ticket

CODE = CodeBundle.of("train.py", {"train.py": b"raise SystemExit('it ran')\n"})
GOOD: dict[str, Any] = {"type": "offer", "job": "train.py", "files": CODE.sizes, "sha256": CODE.sha256}


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """Where code would lie if it had been taken; modules from there are forgotten afterwards."""
    monkeypatch.setenv("W5XDE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "state"
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def framed(said: dict[str, Any], body: bytes = CODE.body) -> bytes:
    meta = msgspec.msgpack.encode(said)
    return head(len(meta), len(body)) + meta + body


def joining(frames: bytes, **settings: Any) -> W5xdeError:
    """What a node says that asks such a coordinator for its code, and agrees to it beforehand."""

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            if connection.recv(4096):
                connection.sendall(frames)
                while connection.recv(4096):
                    pass

    settings = {"accept_code": CODE.sha256, "wait": 0, **settings}
    with answering(answer) as address, pytest.raises(W5xdeError) as told:
        w5xde.join(clear_ticket(address), **settings)
    return told.value


# --- what a coordinator may send ------------------------------------------------------------------


def test_the_good_offer_is_good_so_that_the_others_are_refused_for_what_they_change(state):
    told = joining(framed(GOOD))
    assert told.code == "W5-208"
    assert "it ran" in told.what
    assert (state / "code" / CODE.sha256 / "train.py").exists()


def named(name: str) -> dict[str, Any]:
    """An offer with one more file, which is empty, and with the hash that it then has."""
    files = {"train.py": CODE.files["train.py"], name: b""}
    digests = {each: hashlib.sha256(content).hexdigest() for each, content in files.items()}
    lines = ["w5xde code 1", "train.py", *(f"{digests[each]}  {each}" for each in sorted(files))]
    sha256 = hashlib.sha256(
        "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
    ).hexdigest()
    return GOOD | {"files": {each: len(content) for each, content in files.items()}, "sha256": sha256}


@pytest.mark.parametrize(
    "name",
    [
        "../x.py", "../../nodes/x.py", "/tmp/x.py", "~/x.py", "a/../../x.py", "..\\x.py", "C:\\x.py",
        "a/./x.py", ".x.py", "x.so", "x.pth", "sitecustomize.pyc", "\x1b[2Jx.py", "x\r.py", "x\n.py",
        "x\0.py", "x\u202e.py", "a" * 300 + ".py", "json.py", "torch/__init__.py", "w5xde/x.py", "TRAIN.py",
    ],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_written(name, state):
    said = named(name)
    told = joining(framed(said), accept_code=said["sha256"])
    assert told.code == "W5-120"
    assert told.what.isprintable()
    assert not (state / "code").exists()
    assert not (state / "nodes" / "x.py").exists()


@pytest.mark.parametrize(
    ("changes", "body"),
    [
        ({"sha256": "0" * 64}, CODE.body),
        ({"sha256": CODE.sha256[:12]}, CODE.body),
        ({"sha256": CODE.sha256 + "\n"}, CODE.body),
        ({}, CODE.body[:-1]),
        ({}, CODE.body + b"\n"),
        ({}, b""),
        ({}, CODE.body[:-1] + b"!"),
        ({"files": {"train.py": 2**62}}, CODE.body),
        ({"files": {"train.py": -1}}, CODE.body),
        ({"files": {"train.py": CODE_BYTES_MAX + 1}}, CODE.body),
        ({"files": {}}, b""),
        ({"files": {f"m{number}.py": 0 for number in range(CODE_FILES_MAX)} | CODE.sizes}, CODE.body),
        ({"job": "other.py"}, CODE.body),
        ({"job": "../train.py"}, CODE.body),
        ({"job": "train.py:__import__('os')"}, CODE.body),
        ({"imports": {"os; rm": ""}}, CODE.body),
        ({"imports": {"yaml": "PyYAML; rm -rf ~"}}, CODE.body),
        ({"imports": {f"m{number}": "" for number in range(65)}}, CODE.body),
        ({"versions": {"torch": "$(reboot)"}}, CODE.body),
        ({"versions": {"torch\x1b[2J": "2"}}, CODE.body),
        ({"run": "it"}, CODE.body),
    ],
)  # fmt: skip
def test_an_offer_that_is_not_what_it_says_is_refused_as_a_whole(changes, body, state):
    told = joining(framed(GOOD | changes, body))
    assert told.code == "W5-120"
    assert told.what.isprintable()
    assert not (state / "code").exists()


def test_more_bytes_than_code_has_are_not_received():
    meta = msgspec.msgpack.encode(GOOD)
    assert joining(head(len(meta), CODE_BYTES_MAX + 1) + meta).code == "W5-121"
    assert joining(head(len(meta), 2**63) + meta).code == "W5-121"
    assert joining(head(OFFER_LIMITS.meta_bytes_max + 1, 0)).code == "W5-121"


def test_an_offer_takes_no_more_memory_than_its_limits():
    grown = [
        b"\x82\xa4type\xa5offer\xa5files\xdf\x00\x00\xff\xff" + b"\xa1a\x00" * 40_000,
        b"\x82\xa4type\xa5offer\xa5files\xdd\x7f\xff\xff\xff" + b"\x90" * 130_000,
        b"\x82\xa4type\xa5offer\xa3job" + b"\x91" * 130_000,
    ]
    for meta in grown:
        data = memoryview(around(meta))
        assert len(data) <= OFFER_LIMITS.meta_bytes_max + 16
        assert peak_bytes(lambda data=data: refusal_of(lambda: feed(Decoder(OFFER_LIMITS), data))) < 8 * MIB


@pytest.mark.parametrize(
    "message",
    [
        Welcome("run", 1, "node", Layout([]), Rules("sync", 0, "fp32", 1, "stream")),
        msgspec.convert(GOOD | {"sha256": ""}, Offer),
    ],
    ids=lambda message: type(message).__name__,
)
def test_another_answer_than_an_offer_or_a_refusal_is_an_error(message):
    assert joining(encode(message)).code == "W5-120"


def test_a_refusal_is_told_without_what_a_terminal_obeys():
    told = joining(encode(Refuse("W5-286", "no\x1b[2J code", fix="\u202ego")))
    assert (told.code, told.what, told.fix) == ("W5-286", "no code", "go")


def test_an_ordinary_node_takes_no_code():
    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(framed(GOOD))

    with answering(answer) as address, pytest.raises(JoinError) as told:
        w5xde.join(clear_ticket(address), f"{JOBS}:job", wait=0)
    assert told.value.code == "W5-120"


def test_a_coordinator_that_never_answers_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(code_request, "OFFER_SECONDS", 0.2)
    assert joining(b"").code == "W5-104"
    assert joining(framed(GOOD)[:-1]).code == "W5-104"


# --- who is sent the code -------------------------------------------------------------------------

ASKS = {"looks": True, "asks_code": True}


def uses(run: Coordinator) -> int:
    return sum(row.uses for row in run.register.tickets())


def test_only_who_has_a_secret_is_sent_the_code_and_only_the_code(tmp_path):
    with coordinator(tmp_path) as run:
        register, now = run.register, time.time()
        revoked = register.new(now)
        register.revoke(revoked.id.hex(), now)
        member = register.admit_ticket(run.ticket.id, run.ticket.secret.reveal(), now, name="member")
        outcast = register.admit_ticket(run.ticket.id, run.ticket.secret.reveal(), now, name="outcast")
        register.ban("outcast", "it cheated")
        before = uses(run)
        for greeting, code in [
            ({"ticket": b""}, "W5-113"),
            ({"ticket": bytes(24)}, "W5-113"),
            ({"ticket": run.ticket.id + bytes(16)}, "W5-113"),
            ({"ticket": revoked.id + revoked.secret.reveal()}, "W5-105"),
            ({"credential": bytes(40)}, "W5-113"),
            ({"credential": outcast.node_id + outcast.secret.reveal()}, "W5-114"),
            ({"protocol": 1}, "W5-107"),
        ]:
            with Stranger(run.ticket) as stranger:
                stranger.greet(**ASKS, **greeting)
                answer = stranger.hear()
                assert isinstance(answer, Refuse)
                assert answer.code == code
                assert stranger.hear() is None
        for proof in ({}, {"ticket": b"", "credential": member.node_id + member.secret.reveal()}):
            with Stranger(run.ticket) as guest:
                guest.greet(**ASKS, **proof)
                offer = guest.hear()
                assert isinstance(offer, Offer)
                assert CodeBundle.from_offer(offer, bytearray(guest.body)).files == {
                    "jobs.py": Path(JOBS).read_bytes()
                }
                assert guest.hear() is None, "the connection closes"
        assert uses(run) == before
        # Who does not only look, and who does not ask, is welcomed as ever.
        for greeting in ({"asks_code": True}, {"looks": True}):
            with Stranger(run.ticket) as other:
                other.greet(**greeting)
                assert isinstance(other.hear(), Welcome)
        run.stop_and_compare(tmp_path)


def test_a_node_that_asks_a_thousand_times_is_answered_once_a_connection_and_costs_nobody_anything(tmp_path):
    with coordinator(tmp_path, host=HERE) as run:
        # At once, on one connection.
        with Stranger(run.ticket) as greedy:
            for _ in range(1000):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    greedy.greet(**ASKS)
            answers = []
            while (answer := greedy.hear()) is not None:
                answers.append(answer)
            assert len(answers) <= 1
        # And one after the other.
        offers = set()
        for _ in range(1000):
            with Stranger(run.ticket, source="127.0.0.1") as patient:
                patient.greet(**ASKS)
                answer = patient.hear()
                assert isinstance(answer, Offer)
                offers.add(answer.sha256)
        assert len(offers) == 1
        assert uses(run) == 0
        run.wait_until_recorded("127.0.0.1 was sent the code of the job")
        assert run.ledger_text().count("was sent the code of the job") <= 2
        run.stop_and_compare(tmp_path)


def test_a_run_that_sends_no_code_says_so_to_who_may_know(tmp_path):
    with coordinator(tmp_path, ship="off") as run:
        with pytest.raises(JoinError) as told:
            w5xde.join(run.ticket)
        assert told.value.code == "W5-286"
        assert "--ship off" in told.value.what
        assert "name it:  w5xde join TICKET JOB" in told.value.fix
        wrong = Ticket(run.ticket.addresses, run.ticket.fingerprint, bytes(8), run.ticket.secret)
        with pytest.raises(JoinError) as told:
            w5xde.join(wrong)
        assert told.value.code == "W5-113"
        run.stop()
