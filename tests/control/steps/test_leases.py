"""Leases: each is settled once, by the node it was lent to."""

from __future__ import annotations

import pytest

from w5xde.control.steps.leases import INCARNATION_SHIFT, Lease, Leases
from w5xde.control.steps.plan import StepPlan
from w5xde.tree import Span

STEP = StepPlan(index=0, epoch=0, first=0, sizes=(3, 3, 3, 2), ends_epoch=True)
NEXT = StepPlan(index=1, epoch=1, first=0, sizes=(3, 3, 3, 2), ends_epoch=True)


@pytest.fixture
def leases() -> Leases:
    return Leases(incarnation=1)


def grant(leases: Leases, node: str, step: StepPlan = STEP, start: int = 0, stop: int = 1) -> Lease:
    lease = Lease(leases.new_id(), node, step, Span(start, stop), version=0, granted_at=0.0, expected_at=1.0)
    leases.grant(lease)
    return lease


def test_a_lease_is_settled_once(leases: Leases) -> None:
    lease = grant(leases, "a")
    assert leases.holds(lease.id)
    assert leases.settle(lease.id, "a") == lease
    assert not leases.holds(lease.id)
    assert leases.settle(lease.id, "a") == f"lease {lease.id} is not outstanding"


def test_a_lease_is_settled_by_its_own_node_only(leases: Leases) -> None:
    lease = grant(leases, "a")
    assert leases.settle(lease.id, "b") == f"lease {lease.id} was lent to a"
    assert leases.settle(lease.id, "a") == lease


def test_a_lease_that_was_ended_cannot_be_settled(leases: Leases) -> None:
    lease = grant(leases, "a")
    leases.end(lease)
    assert leases.settle(lease.id, "a") == f"lease {lease.id} is not outstanding"
    assert leases.of_step(STEP.index) == []


def test_a_number_is_never_given_twice(leases: Leases) -> None:
    lease = grant(leases, "a")
    with pytest.raises(ValueError, match="exists"):
        leases.grant(lease)
    leases.end(lease)
    assert grant(leases, "a").id != lease.id


def test_numbers_of_one_incarnation_never_meet_those_of_another() -> None:
    """An answer from before a crash of the coordinator must not fit a lease of after it."""
    before, after = Leases(incarnation=1), Leases(incarnation=2)
    old = grant(before, "a")
    grant(after, "a")
    assert after.settle(old.id, "a") == f"lease {old.id} is not outstanding"
    assert after.new_id() - before.new_id() == 1 << INCARNATION_SHIFT


def test_leases_are_found_by_node_and_by_step(leases: Leases) -> None:
    first = grant(leases, "a", STEP, 0, 2)
    second = grant(leases, "b", STEP, 2, 4)
    third = grant(leases, "a", NEXT)
    assert leases.of_node("a") == [first, third]
    assert leases.of_step(STEP.index) == [first, second]
    assert list(leases) == [first, second, third]
    leases.end(first)
    assert leases.of_node("a") == [third]
    assert leases.of_step(STEP.index) == [second]
    assert len(leases) == 2


def test_a_lease_knows_how_many_samples_it_is(leases: Leases) -> None:
    assert grant(leases, "a", STEP, 2, 4).samples == 5
