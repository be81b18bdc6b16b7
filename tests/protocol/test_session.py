"""A session accepts a message only from the side and in the state that the table allows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.protocol.streams import WORDS
from w5xde.errors import LocalProtocolError, RemoteProtocolError
from w5xde.messages import (
    Beat,
    Bye,
    Cancel,
    Difference,
    Hello,
    Leave,
    Offer,
    Params,
    Ready,
    Refuse,
    Rejected,
    Update,
    Welcome,
    Work,
)
from w5xde.protocol.session import (
    CHECKING,
    CLOSED,
    COORDINATOR,
    GREETED,
    NEW,
    NODE,
    TABLE,
    WITH_BODY,
    WORKING,
    Session,
)

STATES = [NEW, GREETED, CHECKING, WORKING, CLOSED]
SIDES = [NODE, COORDINATOR]
OTHER = {NODE: COORDINATOR, COORDINATOR: NODE}

# The shortest way to each state: (side, message).
PATHS: dict[str, list[tuple[str, type]]] = {
    NEW: [],
    GREETED: [(NODE, Hello)],
    CHECKING: [(NODE, Hello), (COORDINATOR, Welcome)],
    WORKING: [(NODE, Hello), (COORDINATOR, Welcome), (NODE, Ready)],
    CLOSED: [(NODE, Hello), (COORDINATOR, Refuse)],
}

EVERYTHING = [(state, speaker, kind) for state in STATES for speaker in SIDES for kind in WORDS]
ALLOWED = [case for case in EVERYTHING if case[2] in TABLE.get(case[:2], {})]
FORBIDDEN = [case for case in EVERYTHING if case not in ALLOWED]


def exchange(sessions: dict[str, Session], speaker: str, kind: type, body_bytes: int = 0) -> bool:
    """One message, sent by one side and received by the other."""
    sessions[speaker].say(WORDS[kind])
    return sessions[OTHER[speaker]].hear(WORDS[kind], body_bytes)


def both_at(state: str) -> dict[str, Session]:
    sessions = {side: Session(side) for side in SIDES}
    for speaker, kind in PATHS[state]:
        assert exchange(sessions, speaker, kind)
    assert {session.state for session in sessions.values()} == {state}
    return sessions


def name(case: tuple[str, str, type]) -> str:
    return "-".join((case[0], case[1], case[2].__name__))


def test_the_table_speaks_of_every_message_and_of_every_state_but_the_last():
    assert {kind for words in TABLE.values() for kind in words} == set(WORDS)
    assert {state for state, _ in TABLE} == set(STATES) - {CLOSED}
    assert {after for words in TABLE.values() for after in words.values()} == set(STATES) - {NEW}
    assert len(ALLOWED) + len(FORBIDDEN) == 140


@pytest.mark.parametrize(("state", "speaker", "kind"), ALLOWED, ids=map(name, ALLOWED))
def test_what_the_table_allows_moves_both_sides_alike(state, speaker, kind):
    sessions = both_at(state)
    assert sessions[speaker].may_say(kind)
    assert exchange(sessions, speaker, kind)
    assert {session.state for session in sessions.values()} == {TABLE[state, speaker][kind]}


@pytest.mark.parametrize(("state", "speaker", "kind"), FORBIDDEN, ids=map(name, FORBIDDEN))
def test_what_the_table_does_not_allow_is_our_error_to_say(state, speaker, kind):
    session = both_at(state)[speaker]
    assert not session.may_say(kind)
    with pytest.raises(LocalProtocolError, match=f"{speaker} may not say {kind.__name__} when {state}"):
        session.say(WORDS[kind])
    assert session.state == state


@pytest.mark.parametrize(
    ("state", "speaker", "kind"),
    [case for case in FORBIDDEN if case[0] != CLOSED],
    ids=[name(case) for case in FORBIDDEN if case[0] != CLOSED],
)
def test_what_the_table_does_not_allow_is_their_error_when_heard(state, speaker, kind):
    session = both_at(state)[OTHER[speaker]]
    with pytest.raises(RemoteProtocolError, match=f"{speaker} may not say {kind.__name__} when {state}"):
        session.hear(WORDS[kind], 0)
    assert session.state == state


@pytest.mark.parametrize("kind", WORDS, ids=lambda kind: kind.__name__)
def test_only_the_canary_parameters_work_and_what_comes_of_them_carry_a_body(kind):
    state, speaker, _ = next(case for case in ALLOWED if case[2] is kind)
    session = both_at(state)[OTHER[speaker]]
    if kind in (Welcome, Offer, Ready, Params, Difference, Work, Update):
        assert session.hear(WORDS[kind], 1)
        assert kind in WITH_BODY
        return
    with pytest.raises(RemoteProtocolError, match=f"{kind.__name__} carries no body"):
        session.hear(WORDS[kind], 1)
    assert session.state == state


# --- messages that cross ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [Params, Work, Cancel, Rejected, Beat, Refuse, Bye], ids=lambda kind: kind.__name__
)
def test_a_node_that_has_left_ignores_what_the_coordinator_said_meanwhile(kind):
    sessions = both_at(WORKING)
    sessions[NODE].say(WORDS[Leave])
    sessions[COORDINATOR].say(WORDS[kind])
    assert not sessions[NODE].hear(WORDS[kind], 0)
    assert sessions[NODE].state == CLOSED


@pytest.mark.parametrize("kind", [Update, Beat, Leave], ids=lambda kind: kind.__name__)
def test_a_coordinator_that_said_goodbye_ignores_what_the_node_said_meanwhile(kind):
    sessions = both_at(WORKING)
    sessions[COORDINATOR].say(WORDS[Bye])
    sessions[NODE].say(WORDS[kind])
    assert not sessions[COORDINATOR].hear(WORDS[kind], 0)
    assert sessions[COORDINATOR].state == CLOSED


def test_a_refusal_that_crosses_a_ready_ends_the_conversation_on_both_sides():
    sessions = both_at(CHECKING)
    sessions[COORDINATOR].say(WORDS[Refuse])
    sessions[NODE].say(WORDS[Ready])
    assert not sessions[COORDINATOR].hear(WORDS[Ready], 0)
    assert sessions[NODE].hear(WORDS[Refuse], 0)
    assert {session.state for session in sessions.values()} == {CLOSED}


def test_who_was_sent_the_code_can_ask_for_nothing_more():
    sessions = both_at(GREETED)
    assert exchange(sessions, COORDINATOR, Offer, 7)
    assert {session.state for session in sessions.values()} == {CLOSED}
    assert not sessions[COORDINATOR].hear(WORDS[Hello], 0)
    assert not any(sessions[NODE].may_say(kind) for kind in WORDS)


def test_two_goodbyes_that_cross_are_both_fine():
    sessions = both_at(WORKING)
    sessions[NODE].say(WORDS[Leave])
    sessions[COORDINATOR].say(WORDS[Bye])
    assert not sessions[NODE].hear(WORDS[Bye], 0)
    assert not sessions[COORDINATOR].hear(WORDS[Leave], 0)


def test_a_whole_conversation():
    sessions = both_at(WORKING)
    for speaker, kind, body_bytes in [
        (COORDINATOR, Params, 64),
        (COORDINATOR, Work, 4096),
        (COORDINATOR, Work, 0),
        (NODE, Beat, 0),
        (COORDINATOR, Beat, 0),
        (COORDINATOR, Cancel, 0),
        (NODE, Update, 64),
        (COORDINATOR, Rejected, 0),
        (NODE, Update, 0),
        (COORDINATOR, Bye, 0),
    ]:
        assert exchange(sessions, speaker, kind, body_bytes)
    assert {session.state for session in sessions.values()} == {CLOSED}


# --- the table in the documentation ---------------------------------------------------------------


def test_the_documented_table_is_the_one_in_force():
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (node|coordinator) \| (.+) \|$", text, re.MULTILINE)
    documented = {
        (state, speaker): dict(re.findall(r"`(\w+)` → (\w+)", words)) for state, speaker, words in rows
    }
    in_force = {key: {kind.__name__: after for kind, after in words.items()} for key, words in TABLE.items()}
    assert documented == in_force
