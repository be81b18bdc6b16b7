"""Pools in the simulated world: a caller, any nodes and any faults; and bugs that this must find."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.sim.scenario import Scenario
from tests.sim.world import Failure, World
from w5xde.control import events as ev
from w5xde.control.answers import Answers
from w5xde.control.step_decisions import StepDecisions
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.open_step import OpenStep
from w5xde.runtime.pipeline.pipeline import Pipeline

SEEDS = 240


@pytest.mark.parametrize("first", range(0, SEEDS, 40))
def test_every_call_of_a_pool_ends_and_is_computed_on_the_weights_that_its_caller_had(first: int) -> None:
    for seed in range(first, first + 40):
        outcome = World(Scenario.pool_of_seed(seed)).run()
        assert (outcome.reason, outcome.error) == ("all steps done", "")


def test_in_some_of_them_callers_give_up_and_batches_fail_everywhere() -> None:
    said: list[str] = []
    for seed in range(40):
        World(Scenario.pool_of_seed(seed), said.append).run()
    given_up = [line for line in said if "set aside" in line]
    assert any("Withdrawn(" in line for line in given_up)
    assert any("failed n" in line for line in given_up)


# --- bugs -----------------------------------------------------------------------------------------


def sends_nothing_again(state: object, known: int) -> str:
    return "whole" if known < 0 else "nothing"


def forgets_what_is_fixed(state: Any, known: int) -> str:
    return "nothing" if known >= state.fixed_at else "whole"


def tells_the_caller_before_the_learner(self: Pipeline, effect: ev.SetAside) -> None:
    self.steps.set_aside(effect)
    self._around.given_up(effect)


def keeps_the_version(self: StepDecisions, work: OpenStep, reason: str, nodes: list[str], now: float) -> Any:
    version = self._state.version
    effects = GIVE_UP(self, work, reason, nodes, now)
    self._state.version = version
    return effects


def goes_on_without_the_batch(
    self: Answers, work: OpenStep, lease: Lease, reason: str, now: float
) -> list[ev.Effect]:
    state = self._state
    effects = state.failures.set_aside(work, lease, reason)
    complete = state.mode.set_aside(lease.step.index, lease.span)
    return effects + (self._steps.complete(complete, now) if complete is not None else [])


def leaves_leases_outstanding(self: StepDecisions, *given: Any) -> list[ev.Effect]:
    return [effect for effect in GIVE_UP(self, *given) if not isinstance(effect, ev.CancelLeases)]


GIVE_UP = StepDecisions.give_up
BUGS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "parameters that changed are not sent": ("tests.sim.fakes.part_lacked", sends_nothing_again, "summed as"),
    "the moving part is not sent": ("tests.sim.fakes.part_lacked", forgets_what_is_fixed, "summed as"),
    "the caller goes on before the learner": (
        "w5xde.runtime.pipeline.pipeline.Pipeline._set_aside",
        tells_the_caller_before_the_learner,
        "summed as",
    ),
    "a call that is given up makes no version": (
        "w5xde.control.step_decisions.StepDecisions.give_up",
        keeps_the_version,
        "version",
    ),
    "a call is made without a part that fails": (
        "w5xde.control.answers.Answers._set_aside",
        goes_on_without_the_batch,
        "the rest of its call goes on",
    ),
    "leases of a call that is given up stay": (
        "w5xde.control.step_decisions.StepDecisions.give_up",
        leaves_leases_outstanding,
        "outstanding",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_simulator_finds_it(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, planted, found = BUGS[bug]
    monkeypatch.setattr(place, planted)
    for seed in range(SEEDS):
        try:
            World(Scenario.pool_of_seed(seed)).run()
        except Failure as failure:
            if re.search(found, str(failure)):
                return
    pytest.fail("no seed found it")
