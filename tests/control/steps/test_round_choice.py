"""How far rounds grow: chosen once, by the talk and the computing of the first rounds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.control.driver import Driver, only
from w5xde.control import events as ev
from w5xde.control.settings import CoreSettings
from w5xde.control.step_decisions import ROUND_LENGTHS
from w5xde.control.steps.plan import Plan
from w5xde.specs.round_lengths import RoundLengths


def plan() -> Plan:
    return Plan(
        step_batches=2,
        epoch_limit=1,
        step_limit=None,
        samples=2000,
        batch_size=1,
        rounds=RoundLengths(50, 50),
    )


def run(talk: float, compute: float, **settings: Any) -> Driver:
    """A pool of two nodes whose rounds talk for so long, and that compute a batch in so long."""
    driver = Driver(plan(), CoreSettings("rounds", chooses_rounds=True, **settings))

    def node(work: ev.Assign) -> list[ev.Event]:
        batches = sum(lease.batches for lease in work.leases)
        # Both nodes work at the same time: each moves the clock by half.
        driver.now += (batches * compute + talk) / 2 - driver.batch_seconds
        leases = [lease.id for lease in work.leases]
        return [ev.Answered(work.node, leases, compute + talk / batches, compute)]

    driver.node = node
    driver.join("a", "b")
    return driver


@pytest.mark.parametrize(
    ("talk", "compute", "most"), [(1.0, 0.1, 90), (0.1, 0.1, 9), (0.001, 0.1, 2), (9.0, 0.1, 200)]
)
def test_rounds_grow_until_nodes_compute_nine_tenths_of_the_time(
    talk: float, compute: float, most: int
) -> None:
    driver = run(talk, compute)
    driver.run()
    (chosen,) = [note for note in only(ev.Note, driver.effects) if note.kind == ROUND_LENGTHS]
    found = RoundLengths.parse(chosen.facts["round_lengths"])
    assert found.growth == 50
    assert abs(found.most - most) <= 1 + most // 20
    steps = only(ev.Step, driver.effects)
    # Until the choice all rounds are of two steps, whatever it will be.
    assert {step.plan.steps for step in steps if step.version < 150} == {2}
    assert max(step.plan.steps for step in steps) <= found.most
    assert ("--mode sync would use" in chosen.text) == (talk < 0.002)


def test_the_choice_is_in_the_cut_and_is_not_made_again() -> None:
    driver = run(1.0, 0.1)
    driver.run(until=lambda: driver.core.view.version >= 100)
    assert driver.core.view.cut(0.0).round_lengths is None
    driver.run(until=lambda: driver.core.view.version >= 300)
    cut = driver.core.view.cut(0.0)
    assert cut.round_lengths == str(driver.core.view.plan.rounds)
    resumed = Driver(plan(), CoreSettings("rounds", chooses_rounds=True, incarnation=2), cut)
    resumed.join("a", "b")
    resumed.run()
    assert not [note for note in only(ev.Note, resumed.effects) if note.kind == ROUND_LENGTHS]
    assert str(resumed.core.view.plan.rounds) == cut.round_lengths


def test_without_auto_nothing_is_chosen() -> None:
    driver = Driver(plan(), CoreSettings("rounds"))
    driver.join("a", "b")
    driver.run()
    assert driver.core.view.plan.rounds == RoundLengths(50, 50)
    assert not [note for note in only(ev.Note, driver.effects) if note.kind == ROUND_LENGTHS]
