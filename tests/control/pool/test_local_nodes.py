"""Decisions about local nodes: how many start at once, which are given up, and when a run must end."""

from __future__ import annotations

from w5xde.control.pool.local_nodes import ALONE_SECONDS, AbandonRun, Decision, LocalNodesCore
from w5xde.control.pool.members import STALL_SECONDS
from w5xde.control.pool.node_processes import (
    QUICK_ENDS_MAX,
    QUICK_SECONDS,
    STARTING_MAX,
    STARTING_SECONDS,
    StartNode,
    TellUser,
)


def names(count: int) -> list[str]:
    return [f"local-{i + 1}" for i in range(count)]


def started(decisions: list[Decision]) -> list[str]:
    return [decision.name for decision in decisions if isinstance(decision, StartNode)]


def serving(count: int) -> LocalNodesCore:
    """A core whose fork server takes requests, and whose first nodes are started at time 0."""
    core = LocalNodesCore(names(count))
    assert core.tick({}, 0.0) == []
    assert core.serving() == []
    for name in started(core.tick({}, 0.0)):
        core.started(name, 0.0)
    return core


def test_a_thousand_nodes_start_a_few_at_a_time() -> None:
    core = LocalNodesCore(names(1000))
    core.serving()
    connected: dict[str, bool] = {}
    order: list[str] = []
    now = 0.0
    while len(order) < 1000:
        now += 0.1
        asked = started(core.tick(connected, now))
        assert 0 < len(asked) <= STARTING_MAX
        order += asked
        for name in asked:
            core.started(name, now)
        connected |= dict.fromkeys(asked, True)
    assert order == names(1000)


def test_a_node_that_builds_its_model_for_long_does_not_delay_the_others_for_ever() -> None:
    core = serving(STARTING_MAX + 1)
    building = dict.fromkeys(names(STARTING_MAX), False)
    assert core.tick(building, STARTING_SECONDS) == []
    assert started(core.tick(building, STARTING_SECONDS + 0.1)) == [f"local-{STARTING_MAX + 1}"]


def test_a_killed_node_is_started_again_unless_it_ends_quickly_each_time() -> None:
    core = serving(2)
    ready = dict.fromkeys(names(2), True)
    now = QUICK_SECONDS
    assert core.ended("local-1", -9, now) == []
    assert started(core.tick(ready, now)) == ["local-1"]
    for _ in range(QUICK_ENDS_MAX - 1):
        core.started("local-1", now)
        assert core.ended("local-1", -9, now) == []
        assert started(core.tick(ready, now)) == ["local-1"]
    core.started("local-1", now)
    assert core.ended("local-1", -9, now) == [
        TellUser("local-1 ended with status -9 and is not started again", "local-1")
    ]
    assert core.tick(ready, now) == []


def test_a_run_ends_once_every_local_node_is_given_up_and_no_other_is_connected() -> None:
    core = serving(2)
    core.ended("local-1", 20, 1.0)
    core.failed("local-2", "Resource temporarily unavailable")
    assert core.tick({"guest": True}, 1.0) == []
    assert core.tick({}, 1.1) == [
        AbandonRun(
            "every local node has ended (the last could not be started: Resource temporarily unavailable)"
        )
    ]


def test_a_new_fork_server_starts_all_nodes_that_are_not_given_up() -> None:
    core = serving(3)
    core.ended("local-2", 20, 1.0)
    assert core.serving() == [TellUser("the process that starts local nodes died, and was started again")]
    assert started(core.tick({"local-1": True}, 1.0)) == ["local-1", "local-3"]


def test_without_a_fork_server_nothing_is_started_and_the_run_ends_with_its_last_node() -> None:
    core = serving(2)
    core.server_died()
    core.ended("local-1", -9, 1.0)
    assert core.tick({"local-2": True}, 1.0) == []
    assert core.tick({}, 1.1) == [
        AbandonRun("every local node has ended, because the process that starts them died")
    ]


def test_a_run_without_any_node_for_long_ends_but_not_because_it_stood_still_itself() -> None:
    core = serving(1)
    now = ALONE_SECONDS * 2
    assert core.tick({}, now) == []
    end = now + ALONE_SECONDS
    while now <= end:
        assert core.tick({}, now) == []
        now += STALL_SECONDS / 2
    assert core.tick({}, now) == [
        AbandonRun(f"no node was connected for {ALONE_SECONDS:.0f} s, and no local node came back")
    ]
