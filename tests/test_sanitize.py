"""Untrusted text: no terminal, log or JSON reader obeys what a peer sends."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from w5xde.callbacks.status import NodeStatus, RunStatus
from w5xde.cli.panels import machine_table
from w5xde.cli.view import View
from w5xde.config import Settings
from w5xde.errors import JoinError, RemoteProtocolError
from w5xde.learn.job.job import describe
from w5xde.messages import Answer, Bye, Hello, Leave, Message, Refuse, Rejected, Update
from w5xde.protocol.wire import Decoder, Limits, encode
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.sanitize import harmless, to_json

# Clears the screen, sets the title (ended by a bell or by ST), links, turns the writing round.
ATTACK = "\x1b[2J\x1b]0;owned\x07ok\x1b]8;;http://x\x1b\\link\x9b31m\u202e\x7f\r\n\x00end"
OBEYED = {*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), *"\u202e\u2028\u2029\u2066"}
ROOMY = Limits(100_000, 0)


def heard(frame: bytes) -> Message:
    decoder = Decoder(ROOMY)
    decoder.get_buffer()[: len(frame)] = frame
    [(message, _)] = decoder.buffer_updated(len(frame))
    return message


def hostile(tag: str, **fields: object) -> bytes:
    """A frame as a program would write it that does not use our message classes."""
    meta = msgspec.msgpack.encode({"type": tag, **fields})
    return encode(Leave())[:4] + len(meta).to_bytes(4, "little") + bytes(8) + meta


def test_an_attack_leaves_its_words_and_nothing_else() -> None:
    assert harmless(ATTACK) == "oklink end"
    assert harmless("naïve – 雪 \N{ROCKET} [bold]") == "naïve – 雪 \N{ROCKET} [bold]"
    assert harmless("one\n\ttwo") == "one two"
    assert harmless("\x1b[31") == "31"
    assert harmless("\x1b]0;never ended") == ""


@given(st.text())
def test_what_is_harmless_is_one_line_stays_as_it_is_and_can_be_encoded(text: str) -> None:
    said = harmless(text)
    assert not OBEYED & set(said)
    assert harmless(said) == said
    said.encode()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_json_keeps_its_values_and_shows_no_control_character(text: str) -> None:
    shown = to_json({"said": text})
    assert not OBEYED & set(shown)
    assert json.loads(shown) == {"said": text}


@pytest.mark.parametrize(
    ("tag", "fields", "shown"),
    [
        ("leave", {"reason": ATTACK}, lambda m: m.reason),
        ("bye", {"reason": ATTACK, "finished": True}, lambda m: m.reason),
        ("rejected", {"lease": 1, "reason": ATTACK}, lambda m: m.reason),
        ("refuse", {"code": ATTACK, "what": "x"}, lambda m: m.code),
        ("refuse", {"code": "W5-1", "what": ATTACK}, lambda m: m.what),
        ("refuse", {"code": "W5-1", "what": "x", "why": ATTACK}, lambda m: m.why),
        ("refuse", {"code": "W5-1", "what": "x", "fix": ATTACK}, lambda m: m.fix),
        ("hello", {"protocol": 1, "package": "1", "name": "a", "device": ATTACK}, lambda m: m.device),
        ("hello", {"protocol": 1, "package": "1", "name": "a", "run": ATTACK}, lambda m: m.run),
        ("hello", {"protocol": 1, "package": ATTACK, "name": "a"}, lambda m: m.package),
        (
            "update",
            {"version": 1, "answers": [[7, 0.0, 0.0, [], False, ATTACK]]},
            lambda m: m.answers[0].failure,
        ),
    ],
)
def test_words_that_arrive_are_harmless_already(tag: str, fields: dict[str, object], shown) -> None:
    assert shown(heard(hostile(tag, **fields))) == "oklink end"


def test_our_own_words_leave_harmless_too() -> None:
    for message in (Leave(ATTACK), Bye(ATTACK, finished=False), Rejected(1, ATTACK), Refuse("W5-1", ATTACK)):
        assert b"\x1b" not in encode(message)
    assert b"\x1b" not in encode(Update(1, [Answer(1, failure=ATTACK)]))


@pytest.mark.parametrize("name", ["", "a b", "../up", "-x", "é", "a" * 65, "a\n", "\x1b[2J", "[red]"])
def test_a_name_that_is_more_than_a_name_is_refused_at_hello(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="makes no sense") as refused:
        heard(hostile("hello", protocol=1, package="1", name=name))
    assert refused.value.code == "W5-120"


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "a" * 64])
def test_a_name_of_letters_digits_dots_and_dashes_is_taken(name: str) -> None:
    message = heard(hostile("hello", protocol=1, package="1", name=name))
    assert isinstance(message, Hello)
    assert message.name == name


def test_a_message_that_makes_no_sense_is_quoted_harmlessly() -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        heard(hostile("beat", **{ATTACK: 1}))
    assert "oklink end" in refused.value.what
    assert "\x1b" not in refused.value.what


def test_an_error_is_shown_harmlessly_line_by_line() -> None:
    error = JoinError(ATTACK, code=f"W5-103{ATTACK}", why=ATTACK, fix=ATTACK)
    assert error.lines() == [
        "error[W5-103oklink end]: oklink end",
        "  why: oklink end",
        "  fix: oklink end",
    ]


def test_what_a_users_code_raises_is_described_harmlessly() -> None:
    assert describe(ValueError(ATTACK)) == "ValueError: oklink end"


def test_the_view_obeys_nobody() -> None:
    out = io.StringIO()
    view = View(Settings(), out)
    view.say(f"gone ({ATTACK})")
    view.node_note("lost", ATTACK)
    assert not {"\x1b", "\x9b", "\x07", "\x00", "\u202e"} & set(out.getvalue())
    assert out.getvalue().startswith("gone (oklink")


def test_a_devices_markup_is_shown_and_not_obeyed() -> None:
    row = NodeStatus("pi", f"[bold]cpu[/nope]{ATTACK}", "working", 1, 1.0, 1.0, None, 0.0)
    out = io.StringIO()
    status = RunStatus("run", "sync", "127.0.0.1:1", 10, nodes=[row])
    Console(file=out, width=200).print(machine_table(status, 200))
    assert "[bold]cpu[/nope]oklink …" in out.getvalue()


def test_a_run_is_not_named_by_a_file_whose_name_a_terminal_obeys(tmp_path: Path) -> None:
    recorder = RunFolder(Settings(runs=str(tmp_path)), f"job{ATTACK}")
    assert recorder.name.startswith("joboklink end-")
    recorder.close()
