"""Hundreds of runs with all that can go wrong, audited after every event, each replayable by its seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.machine import Machine
from tests.sim.scenario import DAMAGE, FAULTS, ROUNDS, UNREADABLE, Scenario
from tests.sim.validation import FakeValidation
from tests.sim.world import Failure, World
from w5xde.control import events as ev
from w5xde.control.view import CoreView
from w5xde.learn.rounds.rounds import HISTORY_ROUNDS

SEEDS = 1000
CHUNK = 25
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_sample_counts_once_whatever_dies(first: int) -> None:
    for seed in range(first, first + CHUNK):
        World(Scenario.of_seed(seed)).run()


# A thousand seeds in rounds mode, with those among the seeds before.
ROUND_SEEDS = [seed for seed in range(16 * SEEDS // len(ROUNDS)) if seed % 16 in ROUNDS]
MORE = [seed for seed in ROUND_SEEDS if seed >= SEEDS]


@pytest.mark.parametrize("first", range(0, len(MORE), CHUNK))
def test_every_sample_counts_once_in_rounds_whatever_dies(first: int) -> None:
    for seed in MORE[first : first + CHUNK]:
        World(Scenario.of_seed(seed)).run()


# Seeds beyond those of the suite that once found something.
FOUND = (1653, 3847, 4446, 6889, 10485, 16640, 23660, 25352, 31064, 36256, 37388, 42866, 45917)


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_found_something_finds_it_no_more(seed: int) -> None:
    World(Scenario.of_seed(seed)).run()


def test_the_seeds_of_the_suite_meet_every_fault_and_every_end() -> None:
    """A simulator that never crashes anything proves nothing."""
    scenarios = [Scenario.of_seed(seed) for seed in range(SEEDS)]
    for fault in (*FAULTS, UNREADABLE):
        assert 0.3 < sum(fault in scenario.faults for scenario in scenarios) / SEEDS < 0.7, fault
    assert {scenario.mode for scenario in scenarios} == {"sync", "async", "rounds"}
    assert {scenario.staleness for scenario in scenarios} >= {0, 64}
    assert {len(scenario.epochs) for scenario in scenarios} == {1, 2, 3}
    assert {scenario.is_stream for scenario in scenarios} == {True, False}
    assert min(len(scenario.nodes) for scenario in scenarios) == 1
    assert max(len(scenario.nodes) for scenario in scenarios) > 40
    assert max(scenario.step_batches for scenario in scenarios) == 64
    assert any(scenario.epochs[0][-1] < scenario.batch_size for scenario in scenarios)


def test_the_seeds_in_rounds_meet_rounds_of_every_form() -> None:
    scenarios = [Scenario.of_seed(seed) for seed in ROUND_SEEDS]
    assert len(scenarios) == SEEDS
    assert {scenario.mode for scenario in scenarios} == {"rounds"}
    lengths = [set(scenario.rounds.values()) for scenario in scenarios]
    assert sum(len(each) > 2 for each in lengths) > SEEDS / 4  # they grow, or end with their epoch
    assert set.union(*lengths) >= set(range(1, 10))
    # More rounds than the coordinator keeps differences of.
    assert sum(len(scenario.rounds) > HISTORY_ROUNDS + 2 for scenario in scenarios) > SEEDS / 10
    is_short = [len(scenario.epochs[0]) % scenario.step_batches for scenario in scenarios]
    assert 0.3 < sum(map(bool, is_short)) / SEEDS < 0.8
    for fault in (*FAULTS, DAMAGE, UNREADABLE):
        assert 0.3 < sum(fault in scenario.faults for scenario in scenarios) / SEEDS < 0.7, fault
    for each in ("is_stream", "verify", "skip_bad_batches", "deaths", "is_large", "learner_seconds"):
        assert 0.1 < sum(bool(getattr(scenario, each)) for scenario in scenarios) / SEEDS < 0.8, each
    assert {scenario.durability for scenario in scenarios} == {"checkpoint", "step"}
    assert {scenario.robust for scenario in scenarios} == {"off", "trim:1", "trim:2", "median"}


def test_the_seeds_of_the_suite_die_and_live_again_in_every_way() -> None:
    outcomes = [World(Scenario.of_seed(seed)).run() for seed in range(150)]
    assert max(outcome.lives for outcome in outcomes) >= 4
    assert sum(outcome.lives > 1 for outcome in outcomes) > 50
    scenarios = [Scenario.of_seed(seed) for seed in range(150)]
    assert {scenario.durability for scenario in scenarios} == {"checkpoint", "step"}
    assert {death.power for scenario in scenarios for death in scenario.deaths} == {True, False}


def test_the_seeds_of_the_suite_validate_in_every_mode_and_without_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenarios = [Scenario.of_seed(seed) for seed in range(SEEDS)]
    validated = [scenario for scenario in scenarios if scenario.validation]
    assert 0.3 < len(validated) / SEEDS < 0.5
    assert {scenario.mode for scenario in validated} == {"sync", "async", "rounds"}
    assert {scenario.evaluation_policy for scenario in validated} == {"wait", "skip", "hold"}
    here: list[int] = []
    measure = FakeValidation.measure_here

    def count(self: FakeValidation, effect: ev.Evaluate) -> None:
        here.append(effect.step)
        measure(self, effect)

    monkeypatch.setattr(FakeValidation, "measure_here", count)
    # Runs that are stopped in a hurry measure nothing at their end, so that many seeds are needed.
    worlds = [World(scenario) for scenario in validated[:300]]
    for world in worlds:
        world.run()
    assert sum(len(world.validated) > 1 for world in worlds) > 60
    assert len(here) >= 2


# --- one seed, one story --------------------------------------------------------------------------


def fingerprints(seeds: range) -> list[int]:
    return [World(Scenario.of_seed(seed)).run().fingerprint for seed in seeds]


def test_a_seed_tells_the_same_story_twice() -> None:
    first, second = fingerprints(range(30)), fingerprints(range(30))
    assert first == second
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_tells_the_same_story_in_another_process(hash_seed: str) -> None:
    """Nothing may hang on the order of a set of strings: it differs from process to process."""
    code = "from tests.sim.test_world import fingerprints; print(fingerprints(range(100, 110)))"
    there = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == str(fingerprints(range(100, 110)))


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Scenario.of_seed(7))
    monkeypatch.setattr(CoreView, "version", 5)
    with pytest.raises(Failure, match=r"python -m tests\.sim --seed 7 --verbose"):
        world.run()


# --- promises with a number -----------------------------------------------------------------------

# Moments of a run at which the node may hold anything: much, little, the last batch of a step.
MOMENTS = [round(2.0 + 0.07 * number, 2) for number in range(12)]


def seconds_until_lent_again(mode: str, at: float, strike: Callable[[Machine], None]) -> float:
    """How long after a node is struck the last batch it held is in other hands, too."""
    # In async mode a step is one lease: small ones, so that there is always a hand free within a second.
    scenario = Scenario(
        nodes=(0.08, 0.1, 0.12, 0.1),
        epochs=((1,) * 400,),
        step_batches=16 if mode == "sync" else 2,
        batch_size=1,
        epoch_limit=1,
        mode=mode,
    )
    world = World(scenario)
    struck_at = at
    world.run_until(struck_at)
    while not (held := world.core.view.leases.of_node("n0")):
        struck_at += 0.01
        world.run_until(struck_at)
    strike(world.machines[0])
    world.run()
    return max(
        min(
            other.granted_at - struck_at
            for other in world.books.leases.values()
            if other.node != "n0" and other.step == lease.step and other.span.start <= batch < other.span.stop
        )
        for lease in held
        for batch in range(lease.span.start, lease.span.stop)
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("at", MOMENTS)
def test_a_dead_nodes_batches_are_lent_again_within_a_second(mode: str, at: float) -> None:
    assert seconds_until_lent_again(mode, at, lambda machine: machine.crash()) <= 1.0


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("at", MOMENTS)
def test_a_silent_nodes_batches_are_lent_again_within_eight_seconds(mode: str, at: float) -> None:
    assert seconds_until_lent_again(mode, at, lambda machine: machine.freeze(60.0)) <= 8.0
