"""The default bound of staleness grows with the run: the first steps change the weights most."""

from __future__ import annotations

import pytest

from w5xde.control.modes.async_mode import STALENESS_FIRST, STALENESS_MIN, STEPS_PER_STALENESS, AsyncMode
from w5xde.control.pool.members import Members
from w5xde.control.steps.leases import Leases
from w5xde.control.steps.plan import Plan


def lent_steps(version: int, staleness: int | None = None) -> int:
    """How many steps two fast nodes are lent at once when this many were applied before."""
    plan = Plan(step_batches=1, epoch_limit=1, step_limit=None, samples=100_000, batch_size=1)
    members, leases = Members(), Leases(1)
    mode = AsyncMode(plan, members, leases, staleness, stretches=True)
    for name in ("a", "b"):
        member = members.join(name, 0.0)
        members.measured(member, 1e-5, 1e-5)
        members.measured(member, 1e-5, 1e-5)
    mode.grants(members, version, 0.0)
    return leases.steps


def test_the_first_steps_lend_little() -> None:
    assert lent_steps(0) <= STALENESS_FIRST + 1


def test_later_steps_lend_up_to_the_bound() -> None:
    late = STALENESS_MIN * STEPS_PER_STALENESS
    assert lent_steps(0) < lent_steps(late // 2) < lent_steps(late) <= STALENESS_MIN + 1
    assert lent_steps(late) == lent_steps(10 * late)


@pytest.mark.parametrize("version", [0, 10_000])
def test_a_bound_that_the_user_set_is_used_from_the_first_step_on(version: int) -> None:
    assert lent_steps(version, staleness=48) == lent_steps(100_000)


def test_no_node_of_a_large_pool_is_idle_in_the_first_steps() -> None:
    plan = Plan(step_batches=1, epoch_limit=1, step_limit=None, samples=100_000, batch_size=1)
    members, leases = Members(), Leases(1)
    mode = AsyncMode(plan, members, leases, None)
    for number in range(16):
        members.join(f"n{number}", 0.0, f"machine {number}")
    mode.grants(members, 0, 0.0)
    assert {lease.node for lease in leases} == {member.name for member in members}
