"""The coordinator dies at every single operation of a small run, and again while it recovers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.scenario import Death, Scenario
from tests.sim.world import World

# Three nodes, six batches in two epochs, everything saved often: some two hundred operations.
SMALL = Scenario(
    nodes=(0.05, 0.07, 0.11),
    epochs=((2, 2, 1), (2, 2, 1)),
    step_batches=2,
    batch_size=2,
    epoch_limit=2,
    save_steps=1,
    writing_seconds=0.01,
    starting_seconds=0.1,
)
# Rounds of two steps, of one, and of one that is short.
ROUNDS = replace(SMALL, mode="rounds", epochs=((2,) * 6 + (1,),), epoch_limit=1, round_most=2)
VARIANTS = {
    "sync": SMALL,
    "sync, every step": replace(SMALL, durability="step", save_steps=3),
    "async, a stream": replace(SMALL, mode="async", is_stream=True, step_batches=1),
    "async, every step": replace(SMALL, mode="async", durability="step", step_batches=1, save_steps=3),
    "rounds": ROUNDS,
    "rounds, every step": replace(ROUNDS, durability="step", save_steps=99),
}


def points(scenario: Scenario) -> range:
    """Every operation of the run, if nothing happens."""
    return range(1, World(scenario).run().points + 1)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "without power"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_may_die_at_any_operation(variant: str, power: bool) -> None:
    scenario = VARIANTS[variant]
    assert len(points(scenario)) > 50
    for point in points(scenario):
        outcome = World(replace(scenario, deaths=(Death(point, power),))).run()
        assert outcome.reason == "all steps done", point
        assert outcome.lives == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_may_die_again_while_it_recovers(variant: str) -> None:
    scenario = VARIANTS[variant]
    for point in points(scenario)[::7]:
        for later in (1, 2, 3, 5, 8, 13):
            deaths = (Death(point, later % 2 == 0), Death(point + later, later % 3 == 0))
            assert World(replace(scenario, deaths=deaths)).run().reason == "all steps done", deaths
