"""Sharing for a robust mean: everybody has a part of every step, and who is fast gets nobody else's."""

from __future__ import annotations

import pytest

from w5xde.control.modes.choice import choose_mode
from w5xde.control.modes.robust_mode import CRAWL_FACTOR, GATHERING_SECONDS, RobustMode
from w5xde.control.modes.sync import PROBE_FACTOR, SyncMode
from w5xde.control.pool.members import Members
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.plan import Plan
from w5xde.specs.robust_rule import parse_robust


class Pool:
    """Nodes `n0`, `n1`, … that answer when the test says so."""

    def __init__(self, nodes: int, batches: int, robust: str = "trim:2", machine: str = "") -> None:
        self.members, self.leases = Members(), Leases(1)
        plan = Plan(step_batches=batches, epoch_limit=None, step_limit=None, samples=batches, batch_size=1)
        settings = CoreSettings("sync", robust=parse_robust(robust))
        mode = choose_mode(settings, plan, self.members, self.leases)
        assert isinstance(mode, RobustMode)
        self.mode = mode
        self.now = 100.0
        for i in range(nodes):
            # Two cores for all, if they share a machine.
            self.members.join(f"n{i}", self.now, machine, slots=2)

    def lend(self, *names: str) -> dict[str, int]:
        """Who is lent how many batches now."""
        asked = [m for m in self.members if m.name in names] if names else self.members
        lent: dict[str, int] = {}
        for leases in self.mode.grants(asked, 0, self.now):
            assert len({lease.node for lease in leases}) == 1
            lent[leases[0].node] = sum(lease.span.count for lease in leases)
        return lent

    def answer(self, name: str, seconds: float = 0.1) -> bool:
        """Whether that completed the step."""
        complete = None
        for lease in self.leases.of_node(name):
            member = self.members.get(name)
            assert member is not None
            self.members.returned(member, lease.id, self.now)
            settled = self.leases.settle(lease.id, name)
            assert isinstance(settled, Lease)
            complete = self.mode.take(settled)
            self.members.measured(member, seconds)
        return complete is not None

    def step(self, **seconds: float) -> dict[str, int]:
        """A whole step in which everybody answers; returns who had how many batches of it."""
        had: dict[str, int] = {}
        is_complete = False
        while not is_complete:
            lent = self.lend()
            assert lent, "nobody is lent anything"
            for name, count in lent.items():
                had[name] = had.get(name, 0) + count
                is_complete = self.answer(name, seconds.get(name, 0.1)) or is_complete
        self.mode.stepped(self.mode.plan.cursor.index - 1)
        return had


@pytest.mark.parametrize(
    ("nodes", "batches", "parts"),
    [
        (8, 8, [1] * 8),
        (5, 8, [2, 2, 2, 1, 1]),
        (8, 64, [8] * 8),
        (5, 5, [1] * 5),
        (7, 16, [3, 3, 2, 2, 2, 2, 2]),
        (9, 6, [1] * 6),
    ],
)
def test_everybody_gets_a_like_part(nodes: int, batches: int, parts: list[int]) -> None:
    assert sorted(Pool(nodes, batches).step().values(), reverse=True) == parts


def test_nodes_on_one_machine_take_no_turns() -> None:
    assert len(Pool(8, 8, machine="one").lend()) == 8


def test_speed_buys_nobody_a_larger_part() -> None:
    pool = Pool(5, 10)
    for _ in range(5):
        had = pool.step(n0=1e-6, n1=1e-6)
        assert set(had.values()) == {2}


def test_more_nodes_than_batches_come_to_word_one_after_another() -> None:
    pool = Pool(15, 5)
    assert len(set().union(*(pool.step() for _ in range(3)))) == 15


def test_those_who_are_there_wait_for_as_many_as_it_takes_but_not_for_ever() -> None:
    pool = Pool(4, 8)
    assert not pool.lend()
    pool.now += GATHERING_SECONDS / 2
    assert not pool.lend()
    pool.members.join("n4", pool.now)
    assert len(pool.lend()) == 5
    # Nobody is to do a step alone while the others find their way back.
    for name in ("n1", "n2", "n3", "n4"):
        pool.answer(name)
        pool.members.leave(name)
    pool.answer("n0")
    pool.mode.stepped(0)
    assert not pool.lend()
    pool.now += GATHERING_SECONDS + 1
    assert pool.lend() == {"n0": 2}
    pool.answer("n0")
    assert pool.lend() == {"n0": 2}


def test_that_nobody_was_there_for_long_does_not_shorten_the_wait() -> None:
    pool = Pool(0, 8)
    assert not pool.lend()
    pool.now += 3600
    pool.members.join("first", pool.now)
    assert not pool.lend()
    for name in ("b", "c", "d", "e"):
        pool.members.join(name, pool.now)
    assert len(pool.lend()) == 5


def test_a_node_much_slower_than_most_is_left_out_and_tried_again() -> None:
    pool = Pool(7, 7)
    slow = 2 * CRAWL_FACTOR * 0.1
    for _ in range(3):
        pool.step(n3=slow)
    assert "n3" not in pool.step(n3=slow)
    pool.now += 2 * PROBE_FACTOR * slow
    assert "n3" in pool.step()


def test_a_slow_node_that_is_needed_stays() -> None:
    pool = Pool(5, 5)
    for _ in range(5):
        assert "n3" in pool.step(n3=100.0)


def test_liars_who_seem_quick_leave_no_honest_node_out() -> None:
    pool = Pool(8, 8)
    for _ in range(5):
        assert len(pool.step(n0=1e-6, n1=1e-6)) == 8


def test_without_a_rule_batches_are_shared_by_speed() -> None:
    plan = Plan(step_batches=8, epoch_limit=1, step_limit=None, samples=8, batch_size=1)
    mode = choose_mode(CoreSettings("sync"), plan, Members(), Leases(1))
    assert type(mode) is SyncMode


def test_one_who_comes_and_goes_does_not_keep_the_others_waiting_for_ever() -> None:
    pool = Pool(2, 4, "trim:1")
    assert not pool.lend()
    pool.now += GATHERING_SECONDS - 1
    pool.members.join("flaps", pool.now)
    assert pool.lend()
    for lease in pool.leases.of_node("flaps"):
        pool.leases.end(lease)
        pool.mode.give_back(lease)
    pool.members.leave("flaps")
    # They waited for it once; now they go on without it.
    pool.now += 2.0
    pool.answer("n0")
    assert pool.lend("n0")
