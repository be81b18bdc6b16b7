"""Which answers may be added while they arrive: only those that nothing is known against."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from w5xde.control import events as ev
from w5xde.control.adding import Adding
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import Plan
from w5xde.robust_rule import Robust
from w5xde.tree import Span


class Pool:
    """A core with a node for each batch of a step, and what each was lent."""

    def __init__(self, batches: int, *, verify: float = 0.0, mode: str = "sync") -> None:
        plan = Plan(step_batches=batches, epoch_limit=1, step_limit=None, samples=2 * batches, batch_size=1)
        self.core = CoordinatorCore(plan, CoreSettings(mode, verify=verify))
        self.leases: dict[str, Lease] = {}
        for number in range(batches):
            self.tell(ev.Joined(f"n{number}"))

    def tell(self, event: ev.Event) -> list[ev.Effect]:
        effects = self.core.handle(event, 0.0)
        for effect in effects:
            if isinstance(effect, ev.Assign):
                for lease in effect.leases:
                    self.leases[effect.node] = lease
        return effects

    def answer(self, node: str, norm: float = 1.0) -> list[ev.Effect]:
        return self.tell(ev.Answered(node, [self.leases[node].id], 0.1, norms=[norm]))

    def neighbour(self, node: str) -> Span | None:
        return self.core.adding.neighbour_of(self.leases[node], self.core.version)


def test_the_second_of_a_pair_is_added_to_the_first() -> None:
    pool = Pool(4)
    assert pool.neighbour("n1") is None
    pool.answer("n0")
    assert pool.neighbour("n1") == Span(0, 1)
    assert pool.neighbour("n2") is None
    assert pool.neighbour("n3") is None


def test_what_will_be_verified_is_seen_alone() -> None:
    pool = Pool(2, verify=1.0)
    pool.answer("n0")
    pool.tell(ev.Verified("n0", pool.leases["n0"].id))
    assert pool.neighbour("n1") is None


def test_nothing_is_added_while_somebody_elses_for_the_same_is_verified() -> None:
    """It may prove right at any moment, and would be added to what is half added."""
    pool = Pool(2, verify=0.5)
    chosen = pool.core._verification._chosen
    chosen.clear()
    pool.answer("n0")
    held = pool.leases["n1"]
    chosen.add(held.id)
    pool.answer("n1")
    copy = replace(held, id=999, node="n0")
    pool.core.leases.grant(copy)
    assert pool.core.adding.wanted(999, "n0") == copy
    assert pool.core.adding.neighbour_of(copy, 0) is None


def test_nothing_is_added_where_a_batch_has_failed() -> None:
    """One more failure may set it aside, and complete the step with what is half added."""
    pool = Pool(4)
    pool.answer("n0")
    assert pool.neighbour("n1") is not None
    pool.tell(ev.Failed("n3", pool.leases["n3"].id, "it raised"))
    assert pool.neighbour("n1") is None


@pytest.mark.parametrize("settings", [CoreSettings("async"), CoreSettings("sync", robust=Robust(1))])
def test_only_where_sums_are_exact_and_nobody_looks_at_each(settings: CoreSettings) -> None:
    pool = Pool(4)
    pool.answer("n0")
    core = pool.core
    adding = Adding(settings, core.mode, core.leases, core._verification, core._judge)
    assert adding.neighbour_of(pool.leases["n1"], 0) is None


def test_a_step_that_was_spoilt_once_is_added_the_old_way_and_remembers_who_failed() -> None:
    pool = Pool(4)
    pool.answer("n0")
    pool.tell(ev.Failed("n1", pool.leases["n1"].id, "not finite", math.inf))
    pool.tell(ev.Spoilt(0, "what n1 gave is not finite"))
    (work,) = pool.core.mode.open_works
    assert work.failures[Span(1, 2)] == ["n1"]
    pool = Pool(4)
    pool.tell(ev.Spoilt(0, "n3 went"))
    for node in ("n0", "n1", "n2", "n3"):
        pool.tell(ev.Dropped(node, pool.leases[node].id))
    for node in list(pool.leases):
        if pool.leases[node].span == Span(0, 1):
            pool.answer(node)
    holder = next(node for node, lease in pool.leases.items() if lease.span == Span(1, 2))
    assert pool.neighbour(holder) is None


def test_a_step_with_a_doubt_is_added_the_old_way() -> None:
    pool = Pool(4)
    pool.answer("n0")
    assert pool.neighbour("n1") is not None
    pool.tell(ev.Failed("n3", pool.leases["n3"].id, "not finite", math.inf))
    assert pool.neighbour("n1") is None


def test_what_somebody_else_gave_or_is_not_lent_is_needless() -> None:
    pool = Pool(4)
    lease = pool.leases["n0"].id
    assert not pool.core.adding.is_needless(lease, "n0")
    assert pool.core.adding.is_needless(lease, "n1")
    pool.answer("n0")
    assert pool.core.adding.is_needless(lease, "n0")


@pytest.mark.parametrize("answered", [["n0"], ["n0", "n1"], ["n0", "n1", "n2"]])
def test_a_spoilt_step_begins_anew_with_nothing_in_it(answered: list[str]) -> None:
    pool = Pool(4)
    for node in answered:
        pool.answer(node)
    before = dict(pool.leases)
    effects = pool.tell(ev.Spoilt(0, "n3 went"))
    assert [effect.plan.index for effect in effects if isinstance(effect, ev.Reopen)] == [0]
    for node in {f"n{number}" for number in range(4)} - set(answered):
        pool.tell(ev.Dropped(node, before[node].id))
    assert sorted(lease.span for lease in pool.core.leases) == [Span(i, i + 1) for i in range(4)]
    assert not {lease.id for lease in pool.core.leases} & {lease.id for lease in before.values()}
    for node in list(pool.leases):
        pool.answer(node)
    assert pool.core.version == 1


def test_a_step_that_is_complete_is_not_spoilt_any_more() -> None:
    pool = Pool(2)
    pool.answer("n0")
    pool.answer("n1")
    assert not any(isinstance(effect, ev.Reopen) for effect in pool.tell(ev.Spoilt(0, "n1 went")))


def test_of_a_large_model_nobody_holds_a_lease_that_waits() -> None:
    """Somebody who is idle would copy it, and both updates would travel."""
    plan = Plan(step_batches=8, epoch_limit=9, step_limit=None, samples=8, batch_size=1)
    core = CoordinatorCore(plan, CoreSettings("sync", is_large=True))
    lent = core.handle(ev.Joined("a"), 0.0)
    for now in range(40):
        for effect in list(lent):
            match effect:
                case ev.Assign():
                    assert len(effect.leases) == 1
                    assert len(core.leases.of_node("a")) <= 1
                    lent += core.handle(ev.Answered("a", [effect.leases[0].id], 0.1), now / 10)
                case ev.Step():
                    lent += core.handle(ev.Stepped([effect.plan.index]), now / 10)
            lent.remove(effect)
    assert core.progress.epochs > 1
