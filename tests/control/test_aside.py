"""Batches that fail everywhere: when it is the batches, and when it is not."""

from __future__ import annotations

import math

from tests.control.driver import Driver, only
from w5xde.control import events as ev
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.plan import Plan
from w5xde.control.trust.failures import ASIDE_IN_A_ROW_MAX
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
