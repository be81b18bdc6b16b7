"""Which answers are verified, how many are counted, and how many leases a node holds meanwhile."""

from __future__ import annotations

import pytest

from tests.control.driver import Driver, only
from w5xde.control import events as ev
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import Plan
from w5xde.control.trust.norm_limits import AUTO


def a_driver(settings: CoreSettings) -> tuple[Driver, list[Lease]]:
    """A run with one node, and the leases of that node."""
    plan = Plan(step_batches=1, epoch_limit=9, step_limit=None, samples=8, batch_size=4)
    driver = Driver(plan, settings)
    driver.join("a")
    return driver, [lease for work in driver.works for lease in work.leases]


def test_an_answer_that_could_not_be_computed_again_is_counted_and_reported() -> None:
    driver, [lease] = a_driver(CoreSettings("sync", verify=1.0))
    assert driver.work()[0] == ev.Verify(lease)
    note, fold, *_ = driver.feed(ev.Verified("a", lease.id, unknown="no memory"))
    assert isinstance(note, ev.Note)
    assert note.kind == "unverified"
    assert "no memory" in note.text
    assert isinstance(fold, ev.Fold)
    progress = driver.core.view.progress
    assert (progress.verified_batches, progress.unverified_batches) == (0, 1)


def test_a_verified_answer_is_counted() -> None:
    driver, [lease] = a_driver(CoreSettings("sync", verify=1.0))
    driver.work()
    driver.feed(ev.Verified("a", lease.id))
    progress = driver.core.view.progress
    assert (progress.verified_batches, progress.unverified_batches) == (1, 0)


@pytest.mark.parametrize("wrong", ["", "its norm is 1e+08"])
def test_a_lone_node_whose_update_is_doubted_is_compared_with_the_coordinator(wrong: str) -> None:
    driver, _ = a_driver(CoreSettings("sync", max_update_norm=AUTO, own_norm=1.0))
    driver.node = lambda work: driver.answer(work, norm=1e8)
    assert not driver.works[0].verify
    [again] = only(ev.Assign, driver.work())
    [lease] = again.leases
    assert again.verify == [lease.id]
    # Its word alone is not enough: the coordinator computes the same.
    assert driver.work()[0] == ev.Verify(lease)
    effects = driver.feed(ev.Verified("a", lease.id, wrong))
    assert bool(only(ev.Step, effects)) == (not wrong)
    assert bool(only(ev.Ban, effects)) == bool(wrong)


@pytest.mark.parametrize("is_large", [True, False])
def test_a_node_that_is_verified_in_async_mode_holds_one_lease(is_large: bool) -> None:
    """Each may be of another version, and of each the coordinator keeps a copy."""
    _, leases = a_driver(CoreSettings("async", verify=1.0, is_large=is_large))
    assert len(leases) == 1
