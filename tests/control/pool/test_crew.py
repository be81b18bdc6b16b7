"""Decisions about a crew: the first node goes ahead, the others follow, and all of them end together."""

from __future__ import annotations

from w5xde.control.pool.crew import GIVE_UP_SECONDS, CrewCore, CrewDecision, LeaveAll
from w5xde.control.pool.node_processes import QUICK_ENDS_MAX, QUICK_SECONDS, StartNode, TellUser

NAMES = ["desk", "desk-2", "desk-3"]


def started(decisions: list[CrewDecision]) -> list[str]:
    return [decision.name for decision in decisions if isinstance(decision, StartNode)]


def told(decisions: list[CrewDecision]) -> list[str]:
    return [decision.text for decision in decisions if isinstance(decision, TellUser)]


def serving() -> CrewCore:
    """A core whose first node runs since time 0."""
    core = CrewCore(NAMES)
    assert core.tick(0.0) == []
    core.serving()
    assert started(core.tick(0.0)) == ["desk"]
    core.started("desk", 0.0)
    return core


def complete() -> CrewCore:
    """A core all of whose nodes have joined at time 0."""
    core = serving()
    core.joined("desk")
    core.processes.allow(3)
    for name in started(core.tick(0.0)):
        core.started(name, 0.0)
        core.joined(name)
    assert core.running == 3
    return core


def test_the_first_node_goes_ahead_and_the_others_follow_when_they_may() -> None:
    core = serving()
    core.joined("desk")
    assert core.tick(1.0) == []
    core.processes.allow(2)
    assert started(core.tick(1.0)) == ["desk-2"]
    assert core.tick(2.0) == []


def test_a_first_node_that_is_refused_ends_all() -> None:
    core = serving()
    # Without a word: its error is shown as that of all.
    assert core.ended("desk", 110, 0.1, "error[W5-113]: unknown") == []
    assert core.is_over


def test_a_node_that_ends_in_order_takes_the_others_with_it() -> None:
    core = complete()
    assert core.ended("desk-2", 0, 9.0, "status 0") == [LeaveAll()]
    assert not core.is_over
    assert core.tick(9.0) == []
    assert core.ended("desk", 0, 9.0, "status 0") == []
    # Also one that crashes instead is not started again.
    assert started(core.ended("desk-3", -9, 9.0, "signal 9")) == []
    assert core.is_over


def test_a_killed_node_is_started_again_while_the_others_work() -> None:
    core = complete()
    now = QUICK_SECONDS
    assert told(core.ended("desk-2", -9, now, "signal 9")) == ["desk-2 died (signal 9) and is started again"]
    assert started(core.tick(now)) == ["desk-2"]
    assert not core.is_over


def test_a_node_that_dies_quickly_again_and_again_is_given_up_and_the_others_work() -> None:
    core = complete()
    for number in range(QUICK_ENDS_MAX):
        ended = told(core.ended("desk-3", -11, 0.1, "signal 11"))
        if number < QUICK_ENDS_MAX - 1:
            assert started(core.tick(0.1)) == ["desk-3"]
            core.started("desk-3", 0.1)
    assert ended == ["desk-3 ended (signal 11) and is not started again"]
    assert core.tick(0.2) == []
    assert not core.is_over


def test_a_refused_node_leaves_the_others_alone() -> None:
    core = complete()
    decisions = core.ended("desk-2", 110, 1.0, "error[W5-115]: used up")
    assert told(decisions) == ["desk-2 ended (error[W5-115]: used up) and is not started again"]
    core.failed("desk-3", "Resource temporarily unavailable")
    assert core.tick(1.0) == []
    assert not core.is_over


def test_a_user_who_leaves_takes_all_and_nothing_is_started_after_that() -> None:
    core = serving()
    assert core.leave() == [LeaveAll()]
    core.processes.allow(3)
    assert core.tick(0.1) == []
    core.ended("desk", 0, 0.2, "status 0")
    assert core.is_over


def test_a_new_fork_server_starts_all_nodes_again() -> None:
    core = complete()
    assert told(core.serving()) == ["the process that starts local nodes died, and was started again"]
    assert core.running == 0
    assert not core.is_over
    assert started(core.tick(1.0)) == NAMES


def test_without_a_fork_server_all_is_over() -> None:
    core = complete()
    assert "has died" in told(core.server_died())[0]
    assert core.is_over


def test_a_crew_that_leaves_in_a_hurry_does_not_wait_for_frozen_nodes() -> None:
    core = complete()
    assert core.leave_in_a_hurry(5.0) == [LeaveAll(hurries=True)]
    assert core.ended("desk", 0, 6.0, "status 0") == []
    # Told again, it does not begin to wait anew.
    assert core.leave_in_a_hurry(15.0) == [LeaveAll(hurries=True)]
    assert core.tick(5.0 + GIVE_UP_SECONDS - 0.1) == []
    assert not core.is_over
    assert core.tick(5.0 + GIVE_UP_SECONDS) == []
    assert core.is_over
