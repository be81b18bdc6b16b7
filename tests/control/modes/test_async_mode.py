"""How much async mode lends: one step for each node that can run, or two stretches of short batches."""

from __future__ import annotations

import pytest

from w5xde.control.modes.async_mode import (
    ADVISED_AFTER,
    STALENESS_MIN,
    STRETCH_STEPS_MAX,
    STRETCHES_MAX,
    STUCK_SECONDS_MIN,
    AsyncMode,
)
from w5xde.control.modes.delay import AHEAD_MAX, DelayCorrection
from w5xde.control.pool.members import Members
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.plan import Plan


class Pool:
    """An async mode with nodes on machines of their own, or all on one machine of two cores."""

    def __init__(
        self, nodes: int, staleness: int | None = None, *, one_machine: bool = False, **settings: bool
    ) -> None:
        plan = Plan(step_batches=1, epoch_limit=1, step_limit=None, samples=1_000_000, batch_size=1)
        self.members, self.leases = Members(), Leases(1)
        stretches = settings.pop("stretches", False)
        delay = DelayCorrection(**settings)
        self.mode = AsyncMode(plan, self.members, self.leases, staleness, delay, stretches=stretches)
        for number in range(nodes):
            self.members.join(f"n{number}", 0.0, "one" if one_machine else "", 2)
        self.now = 0.0

    def measure(self, seconds: float) -> None:
        for member in self.members:
            self.members.measured(member, seconds, seconds)
            self.members.measured(member, seconds, seconds)

    def lend(self) -> list[Lease]:
        return [lease for each in self.mode.grants(self.members, 0, self.now) for lease in each]

    def answer(self, lease: Lease) -> float:
        """Take the answer to a lease; returns the rate of its step."""
        member = self.members.get(lease.node)
        assert member is not None
        self.members.returned(member, lease.id, self.now)
        self.leases.end(lease)
        complete = self.mode.take(lease)
        assert complete is not None
        return self.mode.rate(complete)


@pytest.mark.parametrize(("nodes", "bound"), [(1, STALENESS_MIN), (2, 2), (3, 2), (4, 3), (10, 9)])
def test_the_default_bound_follows_the_nodes(nodes: int, bound: int) -> None:
    assert Pool(nodes).mode.staleness == bound


def test_nodes_that_cannot_run_at_once_do_not_raise_the_bound() -> None:
    pool = Pool(10, one_machine=True)
    assert pool.mode.staleness == STALENESS_MIN
    assert len(pool.lend()) == 2


def test_a_node_holds_one_lease_whatever_the_bound() -> None:
    pool = Pool(4, staleness=1000)
    pool.measure(1e-5)
    assert sorted(lease.node for lease in pool.lend()) == ["n0", "n1", "n2", "n3"]
    assert pool.lend() == []


def test_no_node_of_a_large_pool_is_idle_in_the_first_steps() -> None:
    pool = Pool(16)
    assert {lease.node for lease in pool.lend()} == {member.name for member in pool.members}


def test_two_nodes_are_never_idle() -> None:
    pool = Pool(2)
    first, second = pool.lend()
    for _ in range(20):
        pool.answer(first)
        (third,) = pool.lend()
        first, second = second, third


def test_no_update_can_be_staler_than_the_bound() -> None:
    """One node is never done, and the others do as much as they may."""
    pool = Pool(4)
    slow, *others = pool.lend()
    while others:
        for lease in others:
            pool.answer(lease)
        others = pool.lend()
    assert pool.mode.staleness_of(slow) == pool.mode.staleness


def test_a_late_update_makes_a_smaller_step() -> None:
    pool = Pool(4, scales_rates=True)
    assert [pool.answer(lease) for lease in pool.lend()] == [1.0, 1 / 1.5, 1 / 2, 1 / 2.5]


def test_without_the_correction_every_step_is_whole() -> None:
    pool = Pool(4)
    assert [pool.answer(lease) for lease in pool.lend()] == [1.0] * 4


def keep_busy(pool: Pool, rounds: int) -> list[Lease]:
    """Every node answers in turn and is lent the next step at once; returns the leases of the last round."""
    held = pool.lend()
    for _ in range(rounds * len(pool.members)):
        pool.answer(held.pop(0))
        held += pool.lend()
    return held


def test_parameters_look_ahead_by_as_many_updates_as_the_answers_of_their_node_are_late() -> None:
    pool = Pool(3, staleness=10, looks_ahead=True)
    assert [lease.ahead for lease in keep_busy(pool, rounds=20)] == [2.0] * 3


def test_each_node_looks_ahead_by_its_own_delay() -> None:
    """The first node answers twice for each answer of the second."""
    pool = Pool(2, staleness=10, looks_ahead=True)
    fast, slow = pool.lend()
    for _ in range(30):
        for _ in range(2):
            pool.answer(fast)
            (fast,) = pool.lend()
        pool.answer(slow)
        (slow,) = pool.lend()
    assert fast.ahead == 0.5
    assert slow.ahead == 2.0


def test_a_node_that_has_not_answered_yet_looks_ahead_by_the_others() -> None:
    pool = Pool(3, staleness=10, looks_ahead=True)
    first, _, _ = pool.lend()
    pool.answer(first)
    pool.members.leave(first.node)
    pool.members.join("new", 0.0)
    (lease,) = pool.lend()
    assert (lease.node, lease.ahead) == ("new", 2.0)


def test_a_node_that_is_hardly_ever_late_does_not_look_ahead() -> None:
    pool = Pool(2, staleness=10, looks_ahead=True)
    fast, slow = pool.lend()
    for _ in range(10):
        for _ in range(8):
            pool.answer(fast)
            (fast,) = pool.lend()
        pool.answer(slow)
        (slow,) = pool.lend()
    pool.answer(fast)
    assert [lease.ahead for lease in pool.lend()] == [0.0]
    assert slow.ahead == 8.0


def test_nobody_looks_farther_ahead_than_the_limit() -> None:
    pool = Pool(16, staleness=100, looks_ahead=True)
    assert {lease.ahead for lease in keep_busy(pool, rounds=20)} == {AHEAD_MAX}


def test_the_first_leases_of_a_run_do_not_look_ahead() -> None:
    """Also after a resume: which movement came before is not known then."""
    assert [lease.ahead for lease in Pool(4, looks_ahead=True).lend()] == [0.0] * 4


def test_one_node_alone_does_not_look_ahead_even_if_its_answers_were_late() -> None:
    pool = Pool(2, looks_ahead=True)
    first, second = keep_busy(pool, rounds=10)
    assert first.ahead == second.ahead == 1.0
    pool.leases.end(second)
    pool.members.leave(second.node)
    pool.answer(first)
    assert [lease.ahead for lease in pool.lend()] == [0.0]


def test_stretches_do_not_look_ahead() -> None:
    pool = Pool(2, looks_ahead=True, stretches=True)
    pool.measure(1e-4)
    held = keep_busy(pool, rounds=10)
    assert [(lease.step.apart, lease.ahead) for lease in held] == [(True, 0.0)] * 2


def test_the_movement_of_a_stretch_shows_nothing_to_look_ahead_by() -> None:
    pool = Pool(2, looks_ahead=True, scales_rates=True, stretches=True)
    pool.measure(1e-4)
    stretch, _ = keep_busy(pool, rounds=2)
    pool.answer(stretch)
    pool.measure(1.0)
    pool.measure(1.0)
    pool.measure(1.0)
    (single,) = pool.lend()
    assert (single.step.apart, single.ahead) == (False, 0.0)


@pytest.mark.parametrize("settings", [{}, {"scales_rates": True}])
def test_nothing_looks_ahead_if_that_is_switched_off(settings: dict[str, bool]) -> None:
    assert {lease.ahead for lease in keep_busy(Pool(3, **settings), rounds=10)} == {0.0}


@pytest.mark.parametrize(("nodes", "rate"), [(2, 1.0), (3, 1 / 1.5), (5, 1 / 2.5)])
def test_looking_ahead_makes_up_for_one_update_of_delay(nodes: int, rate: float) -> None:
    pool = Pool(nodes, staleness=10, looks_ahead=True, scales_rates=True)
    held = keep_busy(pool, rounds=20)
    assert pool.answer(held[0]) == pytest.approx(rate)


@pytest.mark.parametrize("seconds", [1e-4, 5e-324])
def test_short_batches_are_lent_as_two_stretches(seconds: float) -> None:
    pool = Pool(4, stretches=True)
    pool.measure(seconds)
    lent = pool.lend()
    assert [lease.step.apart for lease in lent] == [True] * STRETCHES_MAX
    assert all(lease.span.count == STRETCH_STEPS_MAX for lease in lent)


def test_stuck_nodes_keep_no_others_from_making_stretches() -> None:
    pool = Pool(4, stretches=True)
    pool.measure(1e-4)
    stuck = pool.lend()
    pool.now = 1.0
    others = pool.lend()
    assert [lease.span.count for lease in others] == [STRETCH_STEPS_MAX] * STRETCHES_MAX
    assert not {lease.node for lease in others} & {lease.node for lease in stuck}
    pool.now = 1.0 + STUCK_SECONDS_MIN
    for lease in others:
        pool.answer(lease)
    pool.mode.overtake(pool.now)
    assert [lease.step for lease in pool.lend()] == [lease.step for lease in stuck]


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 1e-4), (4, 0.002)])
def test_one_node_alone_and_longer_batches_are_lent_one_by_one(nodes: int, seconds: float) -> None:
    pool = Pool(nodes, stretches=True)
    pool.measure(seconds)
    assert [lease.span.count for lease in pool.lend()] == [1] * nodes


@pytest.mark.parametrize(("nodes", "is_told"), [(10, False), (20, True)])
def test_the_user_is_told_once_if_updates_are_old(nodes: int, is_told: bool) -> None:
    pool = Pool(nodes, staleness=1000)
    told = []
    for _ in range(ADVISED_AFTER // nodes + 2):
        for lease in pool.lend():
            pool.answer(lease)
            told.append(pool.mode.advice())
    assert len(list(filter(None, told))) == is_told
    assert not is_told or "updates late on average" in next(filter(None, told))
    assert not is_told or "--mode sync" in next(filter(None, told))
