"""How long a step takes in pools of unequal machines, against the best that any division could give."""

from __future__ import annotations

import itertools

import pytest

from tests.sim.scenario import Scenario
from tests.sim.world import World

BATCH_SECONDS = 0.1
STEPS = 12
# Speeds are not known yet in the first two steps.
STEPS_TO_LEARN = 2


def step_seconds(
    nodes: list[float], step_batches: int, joins_at: tuple[float, ...] = (), mode: str = "sync"
) -> list[float]:
    """How long each step of a run without faults took."""
    scenario = Scenario(
        nodes=tuple(nodes),
        epochs=((1,) * (STEPS * step_batches),),
        step_batches=step_batches,
        batch_size=1,
        epoch_limit=1,
        joins_at=joins_at,
        mode=mode,
    )
    world = World(scenario)
    world.run()
    ends = [0.0, *(world.books.stepped_at[step] for step in range(STEPS))]
    return [after - before for before, after in itertools.pairwise(ends)]


def ideal_seconds(nodes: list[float], step_batches: int) -> float:
    return step_batches / sum(1 / seconds for seconds in nodes)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("fast", "step_batches"), [(1, 8), (1, 16), (2, 16), (3, 32), (4, 32), (5, 40), (7, 64), (6, 64)]
)
def test_one_node_ten_times_slower_costs_a_step_at_most_15_percent(fast: int, step_batches: int) -> None:
    """Of an ideal that cuts batches in pieces: these pools can come within 12 % of it with whole ones."""
    nodes = [BATCH_SECONDS] * fast + [10 * BATCH_SECONDS]
    steps = step_seconds(nodes, step_batches)[STEPS_TO_LEARN:]
    assert mean(steps) <= 1.15 * ideal_seconds(nodes, step_batches)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_equal_nodes_share_a_step_equally(count: int) -> None:
    nodes = [BATCH_SECONDS] * count
    steps = step_seconds(nodes, 32)[STEPS_TO_LEARN:]
    assert mean(steps) <= 1.05 * ideal_seconds(nodes, 32)


@pytest.mark.parametrize("newcomer", [BATCH_SECONDS, BATCH_SECONDS / 5])
def test_a_newcomer_takes_its_share_from_the_next_steps_on(newcomer: float) -> None:
    nodes = [BATCH_SECONDS, newcomer]
    steps = step_seconds(nodes, 16, joins_at=(0.0, 5.0))
    assert steps[2] == pytest.approx(16 * BATCH_SECONDS, rel=0.05)
    assert mean(steps[6:]) <= 1.15 * ideal_seconds(nodes, 16)


def test_a_pool_that_doubles_takes_half_the_time() -> None:
    nodes = [BATCH_SECONDS] * 4
    steps = step_seconds(nodes, 32, joins_at=(0.0, 0.0, 5.0, 5.0))
    assert mean(steps[6:]) <= 1.15 * ideal_seconds(nodes, 32)
