"""Batches that fail everywhere: when it is the batches, and when it is not."""

from __future__ import annotations

import math

from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.plan import Plan
from w5xde.control.trust.failures import ASIDE_IN_A_ROW_MAX
from w5xde.tree import Span


def core_of(batches: int) -> CoordinatorCore:
    plan = Plan(step_batches=1, epoch_limit=1, step_limit=None, samples=batches, batch_size=1)
    return CoordinatorCore(plan, CoreSettings("sync", skip_bad_batches=True))


def outcome(core: CoordinatorCore, good: set[int]) -> tuple[int, ev.Finish]:
    """One node computes what it is lent, but only these batches; returns how many were set aside."""
    aside, waiting = 0, core.handle(ev.Joined("a"), 0.0)
    while True:
        effect = waiting.pop(0)
        match effect:
            case ev.Finish():
                return aside, effect
            case ev.SetAside():
                aside += 1
            case ev.Step():
                waiting += core.handle(ev.Stepped([effect.plan.index]), 0.0)
            case ev.Assign():
                for lease in effect.leases:
                    if lease.step.first in good:
                        waiting += core.handle(ev.Answered("a", [lease.id], 0.1), 0.0)
                    else:
                        waiting += core.handle(ev.Failed("a", lease.id, "not a number"), 0.0)


def test_when_nothing_works_the_batches_are_not_to_blame() -> None:
    """Weights that are not numbers any more spoil every batch: no need to set all of them aside."""
    aside, end = outcome(core_of(1000), good=set(range(5)))
    assert aside == ASIDE_IN_A_ROW_MAX - 1
    assert end.error == (
        f"batch {5 + aside} of epoch 1 fails wherever it is tried, like {aside} before it: not a number"
    )


def test_a_bad_stretch_of_data_is_set_aside_and_the_run_goes_on() -> None:
    bad = set(range(3, 3 + ASIDE_IN_A_ROW_MAX - 1)) | {40, 41}
    aside, end = outcome(core_of(60), good=set(range(60)) - bad)
    assert aside == len(bad)
    assert end.reason == "all steps done"


def test_what_failed_on_a_node_is_not_copied_to_it_while_others_have_not_tried() -> None:
    """However late they are: it would fail there time and again, and be called bad."""
    plan = Plan(step_batches=2, epoch_limit=1, step_limit=None, samples=2, batch_size=1)
    core = CoordinatorCore(plan, CoreSettings("sync"))
    lent: list[ev.Effect] = []
    for name in ("a", "b", "c"):
        lent += core.handle(ev.Joined(name), 0.0)
    first = next(e.leases[0] for e in lent if isinstance(e, ev.Assign) and e.node == "a")
    core.handle(ev.Failed("a", first.id, "not a number", math.inf), 0.0)
    copied = []
    for now in range(60):
        told = core.handle(ev.Ticked(heard=dict.fromkeys("abc", float(now))), float(now))
        for effect in told:
            if isinstance(effect, ev.Assign):
                assert effect.node == "a"
                copied.append(effect.leases[0].span)
                told += core.handle(ev.Answered("a", [effect.leases[0].id], 0.1), float(now))
    assert (first.span, copied) == (Span(0, 1), [Span(1, 2)])


def test_a_batch_that_failed_does_not_wait_for_ever_for_somebody_who_is_stuck() -> None:
    """It beats, but it never answers: whoever is there does its batch, and tries the other one again."""
    plan = Plan(step_batches=4, epoch_limit=2, step_limit=None, samples=4, batch_size=1)
    core = CoordinatorCore(plan, CoreSettings("sync"))
    lent = core.handle(ev.Joined("a"), 0.0) + core.handle(ev.Joined("stuck"), 0.0)
    first = next(e.leases[0] for e in lent if isinstance(e, ev.Assign) and e.node == "a")
    told = core.handle(ev.Failed("a", first.id, "out of memory"), 0.0)
    for tick in range(1, 1200):
        now = tick / 10
        for effect in told:
            if isinstance(effect, ev.Assign) and effect.node == "a":
                told += core.handle(ev.Answered("a", [lease.id for lease in effect.leases], 0.1), now)
            elif isinstance(effect, ev.Step):
                told += core.handle(ev.Stepped([effect.plan.index]), now)
        told = core.handle(ev.Ticked(heard=dict.fromkeys(("a", "stuck"), now)), now)
    assert core.view.version == 2
