"""Machines: nodes that share cores take turns, and nobody is forgotten."""

from __future__ import annotations

from collections import Counter

from w5xde.control.pool.members import Member, Members
from w5xde.control.pool.turns import LATE_SECONDS, TURN_BATCHES_MAX, TURN_SECONDS


def crowd(count: int, slots: int) -> tuple[Members, list[Member]]:
    members = Members()
    return members, [members.join(f"n{i}", 0.0, "box", slots) for i in range(count)]


def work(members: Members, rounds: int, frame: int = 4) -> Counter[str]:
    """Each in turn is lent a frame and answers it, again and again."""
    done: Counter[str] = Counter()
    lease = 0
    for number in range(rounds):
        for member in list(members.in_turn(members, float(number))):
            lease += 1
            members.lend(member, lease, frame, float(number))
            members.returned(member, lease, float(number))
            members.measured(member, 0.0001)
            done[member.name] += frame
    return done


def test_only_as_many_are_in_turn_as_can_run() -> None:
    members, _ = crowd(10, 2)
    assert len(members.in_turn(members, 0.0)) == 2
    assert members.parallel == 2


def test_everybody_has_a_machine_of_its_own_unless_it_says_otherwise() -> None:
    members = Members()
    for name in "abc":
        members.join(name, 0.0)
    assert [member.name for member in members.in_turn(members, 0.0)] == ["a", "b", "c"]
    assert members.parallel == 3


def test_all_do_the_same_number_of_batches() -> None:
    members, everybody = crowd(10, 2)
    done = work(members, rounds=10 * TURN_BATCHES_MAX)
    assert len(done) == len(everybody)
    assert max(done.values()) - min(done.values()) <= 2 * TURN_BATCHES_MAX


def test_a_node_that_says_it_computes_in_no_time_gets_a_long_turn() -> None:
    members, (first, second) = crowd(2, 1)
    for member in (first, second):
        members.measured(member, 0.1)
        members.measured(member, 0.1, 5e-324)
    members.lend(first, 1, 1, 0.0)
    assert members.in_turn(members, 2 * LATE_SECONDS) == [second]
    assert second.turn_batches == TURN_BATCHES_MAX


def test_one_who_is_late_gives_its_turn_away_and_gets_it_back() -> None:
    members, (first, second) = crowd(2, 1)
    first.turn_batches = second.turn_batches = 10
    members.lend(first, 1, 1, 0.0)
    assert members.in_turn(members, LATE_SECONDS / 2) == [first]
    assert members.in_turn(members, 2 * LATE_SECONDS) == [second]
    members.returned(first, 1, 2 * LATE_SECONDS)
    members.lend(second, 2, 1, 2 * LATE_SECONDS)
    assert members.in_turn(members, 4 * LATE_SECONDS) == [first]


def test_when_all_are_late_nobody_is_swapped_for_another() -> None:
    members, (first, second) = crowd(2, 1)
    for number, member in enumerate((first, second)):
        members.lend(member, number, 1, 0.0)
    assert members.in_turn(members, 9.0) == [first]


def test_when_one_leaves_the_next_is_in_turn_and_an_empty_machine_is_forgotten() -> None:
    members, (first, second) = crowd(2, 1)
    members.leave(first.name)
    assert members.in_turn(members, 0.0) == [second]
    members.leave(second.name)
    assert members.parallel == 0
    assert members.in_turn(members, 0.0) == []
    members.join("later", 1.0, "box", 3)
    assert members.parallel == 1


def test_nodes_that_wait_for_other_things_than_cores_are_all_in_turn() -> None:
    members, everybody = crowd(6, 2)
    for _ in range(40):
        for member in everybody:
            members.measured(member, 0.1, 0.1, core_share=0.02)
    assert len(members.in_turn(members, 0.0)) == members.parallel == 6


def test_when_they_compute_again_they_take_turns_again() -> None:
    members, everybody = crowd(6, 2)
    for share in (0.02, 1.0):
        for _ in range(40):
            for member in everybody:
                members.measured(member, 0.1, 0.1, core_share=share)
    assert members.parallel == 2
    assert len(members.in_turn(members, 0.0)) == 2


def test_one_that_is_lent_nothing_gives_its_turn_away() -> None:
    members, (first, second) = crowd(2, 1)
    first.turn_batches = second.turn_batches = 10
    assert members.in_turn(members, 0.0) == [first]
    assert members.in_turn(members, TURN_SECONDS) == [first]
    assert members.in_turn(members, 3 * TURN_SECONDS) == [second]
    # One that has work in hand keeps it, however long that takes.
    second.turn_batches = 10
    members.lend(second, 1, 1, 3 * TURN_SECONDS)
    second.free_at = 100.0
    assert members.in_turn(members, 9 * TURN_SECONDS) == [second]


def test_a_busy_coordinator_has_a_core_to_itself_until_it_needs_far_less() -> None:
    members, _ = crowd(10, 2)
    for _ in range(50):
        members.loaded("box", 0.7)
        members.loaded("another", 1.0)
    assert len(members.in_turn(members, 0.0)) == members.parallel == 1
    for _ in range(50):
        members.loaded("box", 0.4)
    assert members.parallel == 1
    for _ in range(50):
        members.loaded("box", 0.1)
    assert len(members.in_turn(members, 0.0)) == members.parallel == 2


def test_on_a_machine_of_one_core_somebody_is_always_in_turn() -> None:
    members, _ = crowd(3, 1)
    for _ in range(50):
        members.loaded("box", 1.0)
    assert len(members.in_turn(members, 0.0)) == 1


def test_a_node_that_may_use_one_core_only_does_not_keep_the_others_from_theirs() -> None:
    members = Members()
    members.join("pinned", 0.0, "box", 1)
    for name in "abc":
        members.join(name, 0.0, "box", 3)
    assert members.parallel == 3
    assert len(members.in_turn(members, 0.0)) == 3
