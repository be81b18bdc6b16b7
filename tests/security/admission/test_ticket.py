"""A ticket is read as it was made or not at all, and shows its secret to nobody."""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
from pathlib import Path

import pytest

from tests.security.decoders import ALPHABET, body_of, sealed_ticket
from w5xde.cli.qr import qr_lines
from w5xde.errors import JoinError, UsageError
from w5xde.runtime.admission.ticket_source import read_ticket
from w5xde.ticket import (
    Secret,
    Ticket,
    expired_ago,
    no_longer_accepted,
    other_identity,
    parse,
)

HIDDEN = b"do not show this"


def make(*hosts: str, port: int = 5555, seed: int = 1, **changes: object) -> Ticket:
    draw = random.Random(seed)
    facts: dict[str, object] = {
        "addresses": tuple((host, port) for host in hosts or ("192.168.1.20",)),
        "fingerprint": draw.randbytes(32),
        "id": draw.randbytes(8),
        "secret": Secret(HIDDEN),
        "expires_at": 1_900_000_000,
    }
    return Ticket(**{**facts, **changes})  # type: ignore[arg-type]


SEVERAL = [
    make(),
    make("192.168.1.20", "100.101.5.7", "fd00::1:2", "trainer.example.org", port=1, expires_at=0),
    make("a", fingerprint=b"", is_clear=True),
    make("gpu-1.lab.example.org", fingerprint=b"", is_pki=True, port=65535),
    make("::1", expires_at=2**32 - 1, seed=7),
]


def refusal(text: str) -> JoinError:
    with pytest.raises(JoinError) as caught:
        parse(text)
    assert caught.value.code == "W5-101"
    return caught.value


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ticket", SEVERAL)
def test_what_was_written_is_read(ticket):
    text = ticket.to_text()
    assert parse(text) == ticket
    assert text.isalnum()
    assert text.startswith("w5")
    assert text == text.lower()


def test_a_usual_ticket_is_short():
    assert len(make().to_text()) == 119
    assert len(make(fingerprint=b"", is_clear=True).to_text()) == 68


def test_case_blanks_and_line_breaks_do_not_matter_nor_do_letters_taken_for_digits():
    ticket = SEVERAL[1]
    text = ticket.to_text()
    wrapped = "\n".join(text[at : at + 40] for at in range(0, len(text), 40))
    assert parse(f"  {wrapped.upper()}\r\n") == ticket
    assert parse(text.replace("0", "O").replace("1", "l")) == ticket
    assert parse(text.replace("0", "o").replace("1", "I")) == ticket


@pytest.mark.parametrize("ticket", SEVERAL)
def test_every_wrong_character_at_every_place_is_noticed(ticket):
    text = ticket.to_text()
    for at, right in enumerate(text):
        for wrong in ALPHABET:
            if wrong != right:
                refusal(text[:at] + wrong + text[at + 1 :])


@pytest.mark.parametrize("ticket", SEVERAL)
def test_every_swap_of_neighbours_is_noticed(ticket):
    text = ticket.to_text()
    for at in range(len(text) - 1):
        if text[at] != text[at + 1]:
            refusal(text[:at] + text[at + 1] + text[at] + text[at + 2 :])


@pytest.mark.parametrize("ticket", SEVERAL)
def test_every_cut_is_noticed_wherever_it_is_and_however_long(ticket):
    text = ticket.to_text()
    for begin in range(len(text)):
        for end in range(begin + 1, len(text) + 1):
            refusal(text[:begin] + text[end:])


@pytest.mark.parametrize("ticket", SEVERAL)
def test_whatever_is_added_is_noticed(ticket):
    text = ticket.to_text()
    for extra in ALPHABET:
        refusal(text + extra)
        refusal(text[:2] + extra + text[2:])
    refusal(text + text)


def test_a_damaged_ticket_says_how_long_it_is_and_what_to_do():
    text = make().to_text()
    assert refusal(text[:68]).what == "this ticket is damaged (68 characters, 119 expected)"
    wrong = text[:50] + ("0" if text[50] != "0" else "1") + text[51:]
    error = refusal(wrong)
    assert error.what == "this ticket is damaged (119 characters, checksum wrong)"
    assert "copy the whole line" in error.fix
    assert "does not begin with w5" in refusal("192.168.1.20:5555").what
    assert "empty" in refusal(" \n").what
    assert "in no ticket" in refusal(text[:-1] + "ß").what
    assert "in no ticket" in refusal(text[:-1] + "u").what
    kelvin = "\N{KELVIN SIGN}"
    assert kelvin.lower() == "k"
    assert "in no ticket" in refusal(text.replace("k", kelvin)).what


def test_nonsense_is_refused_and_nothing_else_happens():
    draw = random.Random(3)
    for _ in range(2000):
        length = draw.randrange(200)
        refusal("w5" + "".join(draw.choices(ALPHABET, k=length)))
        refusal("".join(chr(draw.randrange(1, 0x2FFF)) for _ in range(length)))
    refusal("w5" + "z" * 10_000_000)


def resealed(ticket: Ticket, at: int, value: int) -> str:
    """A ticket made by another program: one byte is other, and its checksum is right."""
    body = bytearray(body_of(ticket))
    body[at] = value
    return sealed_ticket(bytes(body))


def test_a_ticket_of_another_version_is_told_from_a_damaged_one():
    assert "format 2.0" in refusal(resealed(make(), 0, 0x20)).what
    assert "format 1.7" in refusal(resealed(make(), 0, 0x17)).what


def test_a_ticket_that_is_whole_and_makes_no_sense_is_refused():
    ticket = make("localhost")
    size = len(body_of(ticket))
    for value in range(256):
        text = resealed(ticket, size - 10, value)
        if value != 10:
            refusal(text)
    refusal(resealed(ticket, size - 1, ord(" ")))
    refusal(resealed(ticket, size - 1, 0xFF))


# --- what can be a ticket --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": ()},
        {"addresses": (("10.0.0.1", 1),) * 5},
        {"addresses": (("10.0.0.1", 1), ("10.0.0.2", 2))},
        {"addresses": (("10.0.0.1", 0),)},
        {"addresses": (("10.0.0.1", 65536),)},
        {"addresses": (("fe80::1%eth0", 5),)},
        {"addresses": (("not a host", 5),)},
        {"addresses": (("", 5),)},
        {"addresses": (("höst", 5),)},
        {"addresses": ((f"{'a' * 60}.{'b' * 60}.{'c' * 60}.{'d' * 60}", 5),)},
        {"id": b"short"},
        {"secret": Secret(b"short")},
        {"fingerprint": b""},
        {"fingerprint": b"short"},
        {"is_clear": True},
        {"fingerprint": b"", "is_clear": True, "is_pki": True},
        {"expires_at": -1},
        {"expires_at": 2**32},
    ],
)
def test_what_cannot_be_read_again_cannot_be_made(changes):
    with pytest.raises(UsageError) as caught:
        make(**changes)
    assert caught.value.code == "W5-115"


def test_hosts_have_one_spelling():
    ticket = make("FD00:0:0::0001", "Trainer.Example.ORG")
    assert ticket.addresses == (("fd00::1", 5555), ("trainer.example.org", 5555))


def test_a_ticket_expires_at_its_second_and_not_before():
    assert not make(expires_at=1000).expired(999.9)
    assert make(expires_at=1000).expired(1000.0)
    assert not make(expires_at=0).expired(1e12)


# --- where it comes from ---------------------------------------------------------------------------


def test_a_ticket_comes_as_itself_from_a_file_from_standard_input_or_the_environment(tmp_path: Path):
    ticket = SEVERAL[1]
    text = ticket.to_text()
    file = tmp_path / "ticket"
    file.write_text(f"\ufeff{text}\n", encoding="utf-8")
    nothing = io.StringIO()
    assert read_ticket(text, {}, nothing) == ticket
    assert read_ticket(f"@{file}", {}, nothing) == ticket
    assert read_ticket("-", {}, io.StringIO(f"{text[:50]}\n{text[50:]}\n")) == ticket
    assert read_ticket(None, {"W5XDE_TICKET": text}, nothing) == ticket
    assert read_ticket(text, {"W5XDE_TICKET": "w5other"}, nothing) == ticket


def test_standard_input_is_read_no_further_than_the_ticket():
    stdin = io.StringIO(f"{make().to_text()}\nnot ours\n")
    assert read_ticket("-", {}, stdin) == make()
    assert stdin.read() == "not ours\n"


def test_what_is_missing_is_said(tmp_path: Path):
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe\xff")
    for argument, words in [
        (None, "no ticket was given"),
        (f"@{tmp_path}/none", "No such file"),
        (f"@{tmp_path}", "Is a directory"),
        (f"@{empty}", "is empty"),
        (f"@{binary}", "not a text file"),
        ("-", "standard input holds no ticket"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            read_ticket(argument, {"W5XDE_TICKET": "  "}, io.StringIO(" \n"))
        assert caught.value.code == "W5-116"


def test_half_a_ticket_on_standard_input_is_damaged():
    with pytest.raises(JoinError, match="119 expected"):
        read_ticket("-", {}, io.StringIO(make().to_text()[:70]))


# --- secrets ---------------------------------------------------------------------------------------


def test_nothing_shows_the_secret():
    ticket = make()
    for text in (repr(ticket), str(ticket), f"{ticket}", f"{ticket.secret!r} {ticket.secret}"):
        assert "***" in text
        assert "do not" not in text
        assert HIDDEN.hex() not in text
    assert ticket.secret.reveal() == HIDDEN
    for copying in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError):
            copying(ticket.secret)
    assert not hasattr(ticket.secret, "__dict__")


def test_no_error_repeats_the_ticket(tmp_path: Path):
    text = make().to_text()
    file = tmp_path / "ticket"
    file.write_text(text[:-3])
    for argument in (text[:-1], text + "0", text[1:], "w6" + text[2:], f"@{file}"):
        with pytest.raises(JoinError) as caught:
            read_ticket(argument, {}, io.StringIO())
        shown = " ".join([*caught.value.lines(), repr(caught.value)])
        assert not any(text[at : at + 8] in shown for at in range(len(text) - 8))


def test_secrets_are_equal_by_value_and_are_no_keys():
    assert Secret(b"a") == Secret(b"a")
    assert Secret(b"a") != Secret(b"b")
    assert Secret(b"a") != b"a"
    with pytest.raises(TypeError):
        hash(Secret(b"a"))


# --- what can be wrong with a whole ticket -----------------------------------------------------------


def test_a_ticket_that_was_good_once():
    error = no_longer_accepted(expired_ago(1000, 1000 + 7500))
    assert error.code == "W5-105"
    assert error.what == "the coordinator no longer accepts this ticket (expired 2 h ago)"
    assert "w5xde ticket new" in error.fix
    assert [expired_ago(0, now) for now in (5, 60, 86400, 200_000)] == [
        "expired 5 s ago",
        "expired 1 min ago",
        "expired 1 day ago",
        "expired 2 days ago",
    ]


def test_another_identity_is_told_with_both_fingerprints():
    error = other_identity("192.168.1.20:5555", bytes.fromhex("7f3a") + bytes(30), bytes.fromhex("c21e") * 16)
    assert error.code == "W5-501"
    assert error.what == "the machine at 192.168.1.20:5555 is not the one that made this ticket"
    assert "7f3a" in error.why
    assert "c21e" in error.why
    assert "--resume" in error.why


# --- QR --------------------------------------------------------------------------------------------


def test_a_qr_code_is_square_and_fits_a_terminal():
    lines = qr_lines(make().to_text())
    assert lines is not None
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == (len(lines[0]) + 1) // 2
    assert len(lines[0]) <= 60
    assert set("".join(lines)) == set(" ▄▀█")


def test_without_the_package_there_is_no_qr_code(monkeypatch):
    monkeypatch.setitem(sys.modules, "segno", None)
    assert qr_lines("w5") is None
