"""Batches that fail everywhere: when it is the batches, and when it is not."""

from __future__ import annotations

import math

import pytest

from tests.control.driver import Driver, only
from w5xde.control import events as ev
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.plan import Plan
from w5xde.control.trust.failures import ASIDE_IN_A_ROW_MAX
from w5xde.specs.round_lengths import RoundLengths
from w5xde.tree import Span


def outcome(batches: int, good: set[int]) -> tuple[int, ev.Finish]:
    """One node computes only the good batches; returns how many batches were set aside, and the end."""
    plan = Plan(step_batches=1, epoch_limit=1, step_limit=None, samples=batches, batch_size=1)
    driver = Driver(plan, CoreSettings("sync", skip_bad_batches=True))
    driver.node = lambda work: (
        driver.answer(work) if work.leases[0].step.first in good else driver.fail(work, "not a number")
    )
    driver.join("a")
    driver.run()
    assert driver.finish is not None
    return len(only(ev.SetAside, driver.effects)), driver.finish


def test_when_nothing_works_the_batches_are_not_to_blame() -> None:
    """Weights that are not numbers any more spoil every batch: no need to set all of them aside."""
    aside, end = outcome(1000, good=set(range(5)))
    assert aside == ASIDE_IN_A_ROW_MAX - 1
    assert end.error == (
        f"batch {5 + aside} of epoch 1 fails wherever it is tried, like {aside} before it: not a number"
    )


def test_a_bad_stretch_of_data_is_set_aside_and_the_run_goes_on() -> None:
    bad = set(range(3, 3 + ASIDE_IN_A_ROW_MAX - 1)) | {40, 41}
    aside, end = outcome(60, good=set(range(60)) - bad)
    assert aside == len(bad)
    assert end.reason == "all steps done"


def test_what_failed_on_a_node_is_not_copied_to_it_while_others_have_not_tried() -> None:
    """However late they are: it would fail there time and again, and be called bad."""
    plan = Plan(step_batches=2, epoch_limit=1, step_limit=None, samples=2, batch_size=1)
    driver = Driver(plan, CoreSettings("sync"))
    driver.join("a", "b", "c")
    begun, failing = len(driver.effects), driver.works.popleft()
    driver.feed(*driver.fail(failing, "not a number", math.inf))
    driver.node = lambda work: driver.answer(work) if work.node == "a" else []
    driver.run(until=lambda: driver.now >= 60)
    later = [(work.node, work.leases[0].span) for work in only(ev.Assign, driver.effects[begun:])]
    # Only `c` gets the batch that failed; `a` gets a copy of the batch that `b` holds.
    assert (failing.node, failing.leases[0].span) == ("a", Span(0, 1))
    assert later == [("c", Span(0, 1)), ("a", Span(1, 2))]


def test_a_batch_that_failed_does_not_wait_for_ever_for_somebody_who_is_stuck() -> None:
    """It beats, but it never answers: whoever is there does its batch, and tries the other one again."""
    plan = Plan(step_batches=4, epoch_limit=2, step_limit=None, samples=4, batch_size=1)
    driver = Driver(plan, CoreSettings("sync"))
    driver.join("a", "stuck")
    driver.feed(*driver.fail(driver.works.popleft(), "out of memory"))
    driver.node = lambda work: driver.answer(work) if work.node == "a" else []
    driver.run(until=lambda: driver.now >= 120)
    assert driver.core.view.version == 2


# --- batches that the coordinator cannot read -----------------------------------------------------


def unreadable(plan: Plan, bad: set[int], *nodes: str, mode: str = "sync", skip: bool = True) -> Driver:
    """Nodes that compute everything, and batches of the first epoch that cannot be read."""
    driver = Driver(plan, CoreSettings(mode, skip_bad_batches=skip, stretches=mode == "async"))

    def compute(work: ev.Assign) -> list[ev.Event]:
        answered: list[ev.Event] = []
        for lease in work.leases:
            found = {batch: "it is torn" for epoch, batch in lease.step.keys_of(lease.span) if batch in bad}
            if lease.step.epoch == 0 and found:
                answered.append(ev.Unreadable(work.node, lease.id, found))
            else:
                answered.append(ev.Answered(work.node, [lease.id], 0.001, 0.001))
        return answered

    driver.node = compute
    driver.join(*nodes)
    driver.run()
    return driver


def asides(driver: Driver) -> list[int]:
    return sorted(each.batch for each in driver.core.view.accounts.aside)


def plan_of(batches: int, step_batches: int, rounds: RoundLengths | None = None) -> Plan:
    return Plan(
        step_batches=step_batches,
        epoch_limit=2,
        step_limit=None,
        samples=batches,
        batch_size=1,
        rounds=rounds,
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("step_batches", [1, 4, 8])
def test_a_batch_that_cannot_be_read_is_set_aside_and_the_run_goes_on(mode: str, step_batches: int) -> None:
    driver = unreadable(plan_of(24, step_batches), {2, 3, 17}, "a", "b", "c", mode=mode)
    assert driver.finish == ev.Finish("all steps done")
    assert asides(driver) == [2, 3, 17]
    assert driver.core.view.progress.batches == 2 * 24 - 3
    assert driver.core.view.progress.epochs == 2
    # No node is to blame, and the reason is the reader's.
    effects = only(ev.SetAside, driver.effects)
    assert {(effect.reason, tuple(effect.nodes)) for effect in effects} == {("it is torn", ())}
    assert only(ev.Close, driver.effects) == only(ev.Reject, driver.effects) == []


def test_a_step_of_which_nothing_can_be_read_is_left_out() -> None:
    driver = unreadable(plan_of(8, 2), {4, 5}, "a", "b")
    assert driver.finish == ev.Finish("all steps done")
    assert asides(driver) == [4, 5]
    assert driver.core.view.version == 7


def test_in_rounds_the_column_of_an_unreadable_batch_is_set_aside() -> None:
    plan = plan_of(12, 3, RoundLengths(4))
    driver = unreadable(plan, {4}, "a", "b", mode="rounds")
    assert driver.finish == ev.Finish("all steps done")
    # One round of four steps in three columns: the second column has every third batch.
    assert asides(driver) == [1, 4, 7, 10]


def test_without_the_flag_the_rest_of_the_epoch_is_trained_and_the_run_ends() -> None:
    driver = unreadable(plan_of(12, 4), {2}, "a", skip=False)
    assert driver.finish is not None
    assert driver.finish.error == "epoch 1 is not complete: batch 2 failed wherever tried (it is torn)"
    assert driver.core.view.progress.batches == 11


def test_data_of_which_nothing_can_be_read_ends_the_run() -> None:
    driver = unreadable(plan_of(100, 1), set(range(100)), "a", "b")
    assert driver.finish is not None
    assert f"like {ASIDE_IN_A_ROW_MAX - 1} before it: it is torn" in driver.finish.error


def test_other_leases_of_a_batch_that_cannot_be_read_end_with_it() -> None:
    """Otherwise idle nodes would be lent copies of it in turn, for ever."""
    plan = Plan(step_batches=2, epoch_limit=1, step_limit=None, samples=2, batch_size=1)
    driver = Driver(plan, CoreSettings("sync", skip_bad_batches=True))
    driver.join("a", "b", "c")
    driver.now += 3
    driver.feed(ev.Ticked(heard=dict.fromkeys("abc", driver.now)))
    first, second, copy = driver.works
    assert [work.leases[0].span for work in (first, second, copy)] == [Span(0, 1), Span(1, 2), Span(0, 1)]
    driver.feed(ev.Unreadable("a", first.leases[0].id, {0: "it is torn"}))
    assert only(ev.CancelLeases, driver.effects) == [ev.CancelLeases("c", [copy.leases[0].id])]
    assert asides(driver) == [0]
    # The loader says so for the copy too, when it was to be sent.
    driver.feed(ev.Unreadable("c", copy.leases[0].id, {0: "it is torn"}))
    driver.feed(*driver.answer(second))
    assert driver.finish == ev.Finish("all steps done")
    assert asides(driver) == [0]
