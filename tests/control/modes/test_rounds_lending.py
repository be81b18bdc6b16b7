"""Rounds: columns are lent one by one and by speed, slow nodes cost little, and nothing is lost."""

from __future__ import annotations

import heapq
from itertools import count

import pytest

from tests.control.driver import Driver, only
from w5xde.control import events as ev
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.plan import Plan
from w5xde.specs.round_lengths import RoundLengths


def plan(columns: int = 4, lengths: str = "5", *, epochs: int = 1, samples: int = 400) -> Plan:
    return Plan(
        step_batches=columns,
        epoch_limit=epochs,
        step_limit=None,
        samples=samples,
        batch_size=1,
        rounds=RoundLengths.parse(lengths),
    )


def test_a_lease_is_one_column_whatever_the_speed() -> None:
    driver = Driver(plan(), CoreSettings("rounds"))
    driver.join("a", "b")
    driver.run()
    leases = [lease for effect in only(ev.Assign, driver.effects) for lease in effect.leases]
    assert {lease.span.count for lease in leases} == {1}
    assert {lease.batches for lease in leases} == {5}
    assert driver.core.view.progress.batches == 400
    assert driver.core.view.progress.rounds == 20
    assert driver.core.view.version == 100


def test_a_dead_nodes_column_is_lent_again_from_its_start() -> None:
    driver = Driver(plan(), CoreSettings("rounds"))
    driver.join("a", "b")
    held = driver.core.view.leases
    lost = next(lease for lease in held if lease.node == "a")
    effects = driver.feed(ev.Left("a", "gone"))
    (note,) = [each for each in only(ev.Note, effects) if each.kind == "left"]
    assert "batch" in note.text
    driver.works = type(driver.works)(work for work in driver.works if work.node != "a")
    driver.run()
    again = [
        lease
        for effect in only(ev.Assign, driver.effects)
        for lease in effect.leases
        if (lease.step.index, lease.span) == (lost.step.index, lost.span) and lease.node == "b"
    ]
    assert again
    assert driver.core.view.progress.batches == 400


def test_a_column_that_fails_everywhere_is_set_aside_as_a_whole() -> None:
    driver = Driver(plan(), CoreSettings("rounds", skip_bad_batches=True))

    def node(work: ev.Assign) -> list[ev.Event]:
        bad = [lease for lease in work.leases if lease.step.index == 10 and lease.span.start == 2]
        return driver.fail(work, "bad") if bad else driver.answer(work)

    driver.node = node
    driver.join("a", "b", "c")
    driver.run()
    aside = driver.core.view.accounts.aside
    assert [each.batch for each in aside] == [40 + 2 + 4 * row for row in range(5)]
    assert driver.core.view.progress.batches == 395
    assert driver.core.view.progress.epochs == 1


def driver_with_a_small_node() -> Driver:
    """A driver whose node `small` cannot hold a column."""
    driver = Driver(plan(), CoreSettings("rounds"))

    def node(work: ev.Assign) -> list[ev.Event]:
        if work.node == "small":
            return [ev.Dropped("small", lease.id, lease.batches) for lease in work.leases]
        return driver.answer(work)

    driver.node = node
    return driver


def test_a_run_waits_for_a_node_that_can_hold_a_column_and_says_so_once() -> None:
    driver = driver_with_a_small_node()
    driver.join("small")
    for _ in range(100):
        driver.work()
    told = [note.text for note in only(ev.Note, driver.effects) if note.kind == "little memory"]
    assert len([text for text in told if "no node that is here can hold the 5 batches" in text]) == 1
    driver.join("big")
    driver.run()
    assert driver.core.view.progress.batches == 400


def test_a_node_that_cannot_hold_a_column_leaves_them_to_others() -> None:
    driver = driver_with_a_small_node()
    driver.join("big", "small")
    driver.run()
    assert driver.core.view.progress.batches == 400


class Pool(Driver):
    """Nodes of given speeds in virtual time; each computes one lease after the other."""

    def __init__(self, of: Plan, seconds: dict[str, float]) -> None:
        super().__init__(of, CoreSettings("rounds"))
        self._seconds = seconds
        self._queue: list[tuple[float, int, ev.Answered]] = []
        self._numbers = count()
        self._free_at = dict.fromkeys(seconds, 0.0)
        self._cancelled: set[int] = set()
        self.rounds = 0

    def perform(self, effect: ev.Effect) -> list[ev.Event]:
        match effect:
            case ev.Assign():
                self._lend(effect)
                return []
            case ev.CancelLeases():
                self._cancelled.update(effect.leases)
            case ev.Step():
                self.rounds += 1
        return super().perform(effect)

    def _lend(self, work: ev.Assign) -> None:
        for lease in work.leases:
            begun = max(self.now, self._free_at[work.node])
            self._free_at[work.node] = begun + lease.batches * self._seconds[work.node]
            each = self._seconds[work.node]
            answer = ev.Answered(work.node, [lease.id], each, each)
            self._later(self._free_at[work.node] - self.now, answer)

    def _later(self, seconds: float, event: ev.Answered) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), event))

    def run_for(self, seconds: float) -> None:
        self.join(*self._seconds)
        tick = 0.0
        while self.now < seconds:
            if self._queue and self._queue[0][0] <= tick:
                self.now, _, event = heapq.heappop(self._queue)
                if event.leases[0] in self._cancelled:
                    # A node notices between two batches; what it would have computed is not done.
                    self._free_at[event.node] = self.now
                else:
                    self.feed(event)
            else:
                self.now = tick
                self.feed(ev.Ticked(heard=dict.fromkeys(self._seconds, tick)))
                tick += 0.1


@pytest.mark.parametrize("columns", [13, 16, 26])
def test_a_node_at_a_quarter_of_the_speed_costs_less_than_a_tenth(columns: int) -> None:
    of = plan(columns, "10", epochs=100_000, samples=columns * 10)
    pool = Pool(of, {"a": 0.1, "b": 0.1, "c": 0.1, "slow": 0.4})
    pool.run_for(600.0)
    ideal = 600.0 * (3 / 0.1 + 1 / 0.4) / (columns * 10)
    assert pool.rounds / ideal > 0.9


def test_more_columns_than_nodes_wait_at_the_nodes_so_that_none_is_idle() -> None:
    driver = Driver(plan(), CoreSettings("rounds"))
    driver.join("a", "b")
    driver.run(until=lambda: driver.core.view.version >= 50)
    assert max(len(member.pending) for member in driver.core.view.members) == 2
