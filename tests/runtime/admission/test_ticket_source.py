"""Where a ticket comes from: a file or a function is asked again, and never waited for too long."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.security.admission.test_ticket import make
from w5xde.errors import JoinError, UsageError, W5xdeError
from w5xde.runtime.admission import ticket_source
from w5xde.runtime.admission.node_pass import NodePass
from w5xde.runtime.admission.ticket_source import (
    SoughtTicket,
    TicketSource,
    find_source,
    first_found,
    in_file,
    located,
    source_of,
)
from w5xde.ticket import Ticket

HERE = make(addresses=(("127.0.0.1", 5555),))
MOVED = replace(HERE, addresses=(("127.0.0.2", 6666),))
OTHER = make(seed=2, addresses=(("127.0.0.1", 5555),))
Result = TypeVar("Result")


def run(work: Callable[[], Awaitable[Result]]) -> Result:
    async def main() -> Result:
        return await work()

    return asyncio.run(main())


def notes_of(source: TicketSource) -> list[str]:
    notes: list[str] = []
    source.note = lambda kind, text: notes.append(text)
    return notes


def found(source: TicketSource, wait_seconds: float = 0.0) -> Ticket:
    return first_found(source, wait_seconds, source.note).ticket


def refused(source: TicketSource, wait_seconds: float = 0.0) -> W5xdeError:
    with pytest.raises(W5xdeError) as caught:
        found(source, wait_seconds)
    assert caught.value.fix
    return caught.value


# --- a file ---------------------------------------------------------------------------------------


def test_a_file_is_read_again_at_every_look(tmp_path: Path) -> None:
    file = tmp_path / "ticket"
    file.write_text(HERE.to_text())
    source = find_source(f"@{file}")
    notes = notes_of(source)
    assert run(source.look) == HERE
    file.write_text(MOVED.to_text())
    assert run(source.look) == MOVED
    assert notes == ["the coordinator is now at 127.0.0.2:6666"]


@pytest.mark.parametrize("damage", ["", "w5", HERE.to_text()[:-7], "\xff" * 40, "x" * 10**6])
def test_while_a_file_holds_no_ticket_the_one_of_before_is_used(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "ticket"
    file.write_text(HERE.to_text())
    source = in_file(str(file))
    notes = notes_of(source)
    assert run(source.look) == HERE
    file.write_text(damage, encoding="latin-1")
    assert run(source.look) == run(source.look) == HERE
    file.unlink()
    assert run(source.look) == HERE
    assert len(notes) == 2
    assert all("trying the ticket of before" in note for note in notes)


def test_a_file_that_is_missing_empty_and_half_written_is_waited_for(tmp_path: Path) -> None:
    file, text = tmp_path / "ticket", HERE.to_text()
    contents = iter(["", text[:20], text[:60], text])
    source = in_file(str(file))
    notes: list[str] = []

    def note(kind: str, sentence: str) -> None:
        notes.append(sentence)
        file.write_text(next(contents))

    assert first_found(source, 60.0, note).ticket == HERE
    assert "No such file" in notes[0]
    assert "is empty" in notes[1]
    assert all(note.startswith("waiting for a ticket: ") for note in notes)


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [(None, UsageError, "W5-116"), ("", UsageError, "W5-116"), (HERE.to_text()[:-1], JoinError, "W5-101")],
)
def test_when_the_wait_is_over_the_error_says_what_was_missing(
    tmp_path: Path, content: str | None, kind: type[W5xdeError], code: str
) -> None:
    file = tmp_path / "ticket"
    if content is not None:
        file.write_text(content)
    for wait_seconds in (0.0, 0.3):
        error = refused(in_file(str(file)), wait_seconds)
        assert (type(error), error.code) == (kind, code)


def test_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    error = refused(in_file(str(tmp_path)), wait_seconds=10**6)
    assert (error.code, "Is a directory" in error.what) == ("W5-116", True)


def test_a_pipe_without_a_writer_holds_nobody_up(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is empty" in refused(in_file(str(pipe))).what


def test_a_pipe_with_a_silent_writer_holds_nobody_up_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_source, "PIPE_SECONDS", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        assert "is empty" in refused(in_file(str(pipe))).what
        os.write(writer, HERE.to_text().encode())
        assert found(in_file(str(pipe))) == HERE
    finally:
        os.close(writer)


def test_a_pipe_says_its_ticket_once_and_that_is_enough() -> None:
    """As in  w5xde join @<(command) ."""
    reader, writer = os.pipe()
    try:
        for piece in (HERE.to_text()[:50], HERE.to_text()[50:], "\n"):
            os.write(writer, piece.encode())
        os.close(writer)
        source = in_file(f"/dev/fd/{reader}")
        assert run(source.look) == run(source.look) == HERE
    finally:
        os.close(reader)


def test_a_name_that_no_file_can_have_is_told(tmp_path: Path) -> None:
    assert refused(in_file("a\0b")).code == "W5-116"
    assert "(no name)" in refused(find_source("@")).what


# --- a function -----------------------------------------------------------------------------------


def test_a_function_is_called_at_every_look_and_may_say_it_in_three_ways() -> None:
    answers = iter([None, HERE.to_text(), MOVED, None])
    source = located(lambda: next(answers))
    notes = notes_of(source)
    assert found(source, 60.0) == HERE
    assert run(source.look) == MOVED
    assert run(source.look) == MOVED
    assert notes[0] == "waiting for a ticket: locate() knows no ticket yet"


def test_what_a_function_raises_is_told_with_its_line_and_it_is_called_again() -> None:
    calls: list[str] = []

    def locate() -> str:
        calls.append("")
        if len(calls) < 3:
            raise KeyError("no such actor")
        return HERE.to_text()

    source = located(locate)
    notes = notes_of(source)
    assert found(source, 60.0) == HERE
    [note] = notes
    assert "locate() failed: KeyError: 'no such actor' (test_ticket_source.py, line" in note


def leave() -> str:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("locate", "told"),
    [(lambda: None, "knows no ticket yet"), (lambda: {}["x"], "KeyError: 'x'"), (leave, "SystemExit: 3")],
)
def test_a_function_that_never_finds_one_is_an_error_when_the_wait_is_over(locate: Any, told: str) -> None:
    error = refused(located(locate), 0.3)
    assert (type(error), error.code) == (JoinError, "W5-128")
    assert told in error.what


def test_a_function_that_returns_nonsense_is_refused_at_once() -> None:
    nonsense: Any = lambda: 5555  # noqa: E731
    error = refused(located(nonsense), wait_seconds=10**6)
    assert (type(error), error.code) == (UsageError, "W5-128")
    assert "returned an object of type int" in error.what
    assert refused(located(lambda: "w5 but no ticket")).code == "W5-101"


def test_a_ticket_and_a_function_are_not_given_together() -> None:
    nothing: Any = "@ticket"
    for ticket, locate in ((HERE, lambda: None), (None, nothing)):
        with pytest.raises(UsageError, match="locate is a function") as caught:
            source_of(ticket, locate)
        assert caught.value.code == "W5-210"
    assert source_of(HERE, None) is HERE


def test_a_function_that_hangs_holds_up_neither_the_loop_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ticket_source, "LOOK_SECONDS", 0.05)
    may_go_on, calls = threading.Event(), []

    def locate() -> Ticket:
        calls.append("")
        if len(calls) == 2:
            may_go_on.wait(60)
            return MOVED
        return HERE

    source = located(locate)

    async def looks() -> None:
        assert await source.look() == HERE
        # Several who ask at once share one call.
        assert await asyncio.gather(source.look(), source.look(), source.look()) == [HERE] * 3
        may_go_on.set()
        while await source.look() != MOVED:
            pass

    run(looks)
    assert len(calls) == 2
    may_go_on.clear()

    def hang() -> None:
        may_go_on.wait(60)

    assert refused(located(hang)).code == "W5-104"
    may_go_on.set()


# --- a node's pass --------------------------------------------------------------------------------


class Said(TicketSource):
    """A source that says what a test wants."""

    may_change = True

    def say(self, ticket: Ticket) -> None:
        self._ticket = ticket


def renewed(node_pass: NodePass, *, was_welcome: bool) -> Ticket:
    return run(lambda: node_pass.renew(was_welcome=was_welcome))


def welcomed(source: TicketSource, secret: bytes = b"secret") -> NodePass:
    node_pass = NodePass(source, keeps=False)
    assert node_pass.keep(secret.ljust(40, b".")) == ""
    return node_pass


def proof(node_pass: NodePass) -> tuple[bytes, bytes]:
    import torch

    hello = node_pass.greeting("n", "", torch.device("cpu"))
    return hello.credential, hello.ticket


def test_a_credential_stays_valid_for_the_same_identity_wherever_that_is() -> None:
    source = Said(HERE)
    node_pass = welcomed(source)
    before = proof(node_pass)
    source.say(replace(MOVED, id=b"another1"))
    assert renewed(node_pass, was_welcome=True).addresses == MOVED.addresses
    assert proof(node_pass) == before
    # And if it is not known any more, the newest ticket is shown.
    assert node_pass.falls_back("W5-113")
    assert proof(node_pass)[1].startswith(b"another1")


@pytest.mark.parametrize(
    "other",
    [
        OTHER,
        replace(HERE, fingerprint=b"", is_clear=True),
        replace(HERE, fingerprint=b"", is_pki=True),
    ],
)
def test_a_node_that_was_welcome_goes_to_no_other_coordinator(other: Ticket) -> None:
    source = Said(HERE)
    node_pass = welcomed(source)
    before = proof(node_pass)
    source.say(other)
    with pytest.raises(JoinError, match="that of another coordinator") as caught:
        renewed(node_pass, was_welcome=True)
    assert caught.value.code == "W5-119"
    assert proof(node_pass) == before


def test_before_it_was_welcome_a_node_follows_any_ticket_with_the_credential_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be left from an earlier run until its coordinator has started."""
    monkeypatch.setenv("W5XDE_STATE", str(tmp_path))
    before = NodePass(OTHER)
    before.keep(b"other".ljust(40, b"."))
    before.close()
    source = Said(HERE)
    node_pass = NodePass(source)
    assert proof(node_pass) == (b"", HERE.id + HERE.secret.reveal())
    source.say(OTHER)
    assert renewed(node_pass, was_welcome=False) == OTHER
    assert proof(node_pass)[0].startswith(b"other")
    node_pass.close()


def test_a_clear_ticket_may_be_another_one_after_a_restart() -> None:
    clear = replace(HERE, fingerprint=b"", is_clear=True)
    source = Said(clear)
    node_pass = welcomed(source)
    before = proof(node_pass)
    source.say(replace(clear, id=b"another1", addresses=(("127.0.0.1", 7777),)))
    assert renewed(node_pass, was_welcome=True).addresses == (("127.0.0.1", 7777),)
    assert proof(node_pass) == before


@pytest.mark.parametrize("code", ["W5-113", "W5-105"])
def test_a_ticket_that_was_refused_is_not_shown_again_and_another_one_is(code: str) -> None:
    source = Said(HERE)
    node_pass = NodePass(source, keeps=False)
    refusal = JoinError("the coordinator does not know this ticket", code=code)
    assert node_pass.awaits_another(refusal)
    for _ in range(2):
        with pytest.raises(JoinError) as caught:
            renewed(node_pass, was_welcome=False)
        assert caught.value is refusal
    source.say(replace(HERE, id=b"another1"))
    assert renewed(node_pass, was_welcome=False).id == b"another1"


def test_nobody_waits_for_another_ticket_where_there_is_only_one() -> None:
    refusal = JoinError("the coordinator does not know this ticket", code="W5-113")
    assert not NodePass(HERE, keeps=False).awaits_another(refusal)
    banned = JoinError("this node is banned from the run", code="W5-114")
    assert not NodePass(SoughtOnce(), keeps=False).awaits_another(banned)


class SoughtOnce(SoughtTicket):
    """A source that has looked already."""

    def __init__(self) -> None:
        super().__init__(lambda: HERE)
        self._ticket = HERE
