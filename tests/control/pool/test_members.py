"""Members: who is silent, who is fast, and for which time nobody is blamed."""

from __future__ import annotations

import pytest

from w5xde.control.pool.members import SILENCE_SECONDS, STALL_SECONDS, Member, Members

TICK_SECONDS = 0.1


@pytest.fixture
def members() -> Members:
    return Members()


def silent(members: Members, now: float) -> list[str]:
    return [member.name for member in members.silent(now)]


def tick(members: Members, since: float, until: float) -> None:
    """Ticks as they should come, from one moment to another."""
    for number in range(round((until - since) / TICK_SECONDS) + 1):
        members.forgive_stall(since + number * TICK_SECONDS, TICK_SECONDS)


def measure(members: Members, member: Member, *batch_seconds: float) -> None:
    for each in batch_seconds:
        members.measured(member, each)


def test_nobody_joins_twice(members: Members) -> None:
    members.join("a", now=0.0)
    with pytest.raises(ValueError, match="a is a member already"):
        members.join("a", now=1.0)


def test_who_was_never_here_cannot_leave(members: Members) -> None:
    assert members.leave("a") is None


def test_silence_is_counted_from_the_last_word(members: Members) -> None:
    members.join("a", now=0.0)
    members.join("b", now=0.0)
    members.heard("b", now=5.0)
    assert silent(members, SILENCE_SECONDS) == []
    assert silent(members, SILENCE_SECONDS + 0.1) == ["a"]
    assert silent(members, 5.0 + SILENCE_SECONDS + 0.1) == ["a", "b"]


def test_a_word_of_a_stranger_is_no_news(members: Members) -> None:
    members.heard("nobody", now=1.0)
    assert "nobody" not in members


def test_while_we_stand_still_nobody_is_silent(members: Members) -> None:
    members.join("a", now=0.0)
    tick(members, 0.0, 1.0)
    assert members.forgive_stall(3601.0, TICK_SECONDS) == pytest.approx(3600.0 - TICK_SECONDS)
    assert silent(members, 3601.0) == []


def test_a_tick_that_is_a_little_late_is_no_stall(members: Members) -> None:
    members.join("a", now=0.0)
    members.forgive_stall(1.0, TICK_SECONDS)
    assert members.forgive_stall(1.0 + STALL_SECONDS, TICK_SECONDS) == 0.0


def test_who_spoke_after_the_stall_is_not_forgiven_for_it(members: Members) -> None:
    """Messages that waited are read before the tick that notices the stall."""
    members.join("a", now=0.0)
    tick(members, 0.0, 1.0)
    members.heard("a", now=3601.0)
    members.forgive_stall(3601.0, TICK_SECONDS)
    assert silent(members, 3601.0 + SILENCE_SECONDS + 0.1) == ["a"]


def test_a_stall_before_the_first_tick_is_forgiven_as_well(members: Members) -> None:
    members.join("a", now=0.0)
    members.forgive_stall(30.0, TICK_SECONDS)
    assert silent(members, 30.0) == []


# --- speed ----------------------------------------------------------------------------------------


def test_the_first_answer_says_nothing_about_the_speed(members: Members) -> None:
    """It loads the model and warms up."""
    member = members.join("a", now=0.0)
    measure(members, member, 9.0)
    assert members.pool_rate == 0.0
    measure(members, member, 0.5)
    assert member.batch_seconds == 0.5
    assert members.pool_rate == pytest.approx(2.0)


def test_a_guess_is_an_estimate_until_the_speed_is_measured(members: Members) -> None:
    member = members.join("a", now=0.0, guess_seconds=0.25)
    assert members.expected_batch_seconds(member) == 0.25
    assert members.pool_rate == pytest.approx(4.0)
    measure(members, member, 9.0)
    assert member.batch_seconds == 0.25
    measure(members, member, 0.5)
    # Replaced, and not mixed with.
    assert member.batch_seconds == 0.5
    assert (members.pool_rate, members.measured_count) == (pytest.approx(2.0), 1)
    members.join("b", now=0.0, guess_seconds=1.0)
    members.leave("b")
    assert (members.pool_rate, members.measured_count) == (pytest.approx(2.0), 1)


def test_an_estimate_follows_a_change(members: Members) -> None:
    member = members.join("a", now=0.0)
    measure(members, member, 1.0, 1.0, *[0.1] * 10)
    assert member.batch_seconds == pytest.approx(0.1, rel=0.2)


def test_a_stranger_is_expected_to_be_as_fast_as_the_others(members: Members) -> None:
    fast, slow, stranger = (members.join(name, now=0.0) for name in ("fast", "slow", "stranger"))
    assert members.expected_batch_seconds(stranger) == 0.0
    measure(members, fast, 0.1, 0.1)
    measure(members, slow, 0.4, 0.4)
    # The mean of the speeds, not of the times: 2 nodes, 12.5 batches a second.
    assert members.expected_batch_seconds(stranger) == pytest.approx(0.16)


def test_the_pool_is_as_fast_as_those_who_are_here(members: Members) -> None:
    for name, seconds in (("a", 0.5), ("b", 0.25)):
        measure(members, members.join(name, now=0.0), seconds, seconds)
    assert members.pool_rate == pytest.approx(6.0)
    members.leave("b")
    assert members.pool_rate == pytest.approx(2.0)


def test_what_is_lent_is_counted_until_it_comes_back(members: Members) -> None:
    member = members.join("a", now=0.0)
    measure(members, member, 0.5, 0.5)
    assert members.lend(member, lease=1, batches=4, now=10.0) == pytest.approx(12.0)
    assert members.lend(member, lease=2, batches=2, now=10.0) == pytest.approx(13.0)
    assert (member.pending_batches, members.pending_batches) == (6, 6)
    members.returned(member, lease=1, now=12.5)
    assert (member.pending, members.pending_batches) == ({2: 2}, 2)
    assert member.free_at == pytest.approx(13.5)


def test_a_lease_that_comes_back_twice_counts_once(members: Members) -> None:
    member = members.join("a", now=0.0)
    members.lend(member, lease=1, batches=4, now=0.0)
    members.returned(member, lease=1, now=1.0)
    members.returned(member, lease=1, now=2.0)
    assert (member.pending_batches, members.pending_batches) == (0, 0)


def test_who_leaves_takes_his_debts_along(members: Members) -> None:
    member = members.join("a", now=0.0)
    members.lend(member, lease=1, batches=4, now=0.0)
    members.leave("a")
    assert members.pending_batches == 0
