"""Which answers are verified, how many are counted, and how many leases a node holds meanwhile."""

from __future__ import annotations

import pytest

from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import Plan
from w5xde.control.trust.norm_limits import AUTO


def a_core(settings: CoreSettings) -> tuple[CoordinatorCore, list[ev.Assign]]:
    """A core with one node, and what that node is lent."""
    plan = Plan(step_batches=1, epoch_limit=9, step_limit=None, samples=8, batch_size=4)
    core = CoordinatorCore(plan, settings)
    return core, assigned(core.handle(ev.Joined("a"), 0.0))


def assigned(effects: list[ev.Effect]) -> list[ev.Assign]:
    return [effect for effect in effects if isinstance(effect, ev.Assign)]


def test_an_answer_that_could_not_be_computed_again_is_counted_and_reported() -> None:
    core, [assign] = a_core(CoreSettings("sync", verify=1.0))
    [lease] = assign.leases
    assert core.handle(ev.Answered("a", [lease.id], 1.0), 0.0)[0] == ev.Verify(lease)
    note, fold, *_ = core.handle(ev.Verified("a", lease.id, unknown="no memory"), 0.0)
    assert isinstance(note, ev.Note)
    assert note.kind == "unverified"
    assert "no memory" in note.text
    assert isinstance(fold, ev.Fold)
    assert (core.view.progress.verified_batches, core.view.progress.unverified_batches) == (0, 1)


def test_a_verified_answer_is_counted() -> None:
    core, [assign] = a_core(CoreSettings("sync", verify=1.0))
    [lease] = assign.leases
    core.handle(ev.Answered("a", [lease.id], 1.0), 0.0)
    core.handle(ev.Verified("a", lease.id), 0.0)
    assert (core.view.progress.verified_batches, core.view.progress.unverified_batches) == (1, 0)


@pytest.mark.parametrize("wrong", ["", "its norm is 1e+08"])
def test_a_lone_node_whose_update_is_doubted_is_compared_with_the_coordinator(wrong: str) -> None:
    core, [assign] = a_core(CoreSettings("sync", max_update_norm=AUTO, own_norm=1.0))
    assert not assign.verify
    first = assign.leases[0].id
    [again] = assigned(core.handle(ev.Answered("a", [first], 1.0, norms=[1e8]), 0.0))
    [lease] = again.leases
    assert again.verify == [lease.id]
    # Its word alone is not enough: the coordinator computes the same.
    assert core.handle(ev.Answered("a", [lease.id], 1.0, norms=[1e8]), 0.0)[0] == ev.Verify(lease)
    effects = core.handle(ev.Verified("a", lease.id, wrong), 0.0)
    assert any(isinstance(effect, ev.Step) for effect in effects) == (not wrong)
    assert any(isinstance(effect, ev.Ban) for effect in effects) == bool(wrong)


@pytest.mark.parametrize(("is_large", "verify", "held"), [(True, 1.0, 1), (False, 1.0, 2), (True, 0.0, 2)])
def test_a_node_of_a_large_model_that_is_verified_holds_one_lease(
    is_large: bool, verify: float, held: int
) -> None:
    """In async mode each may be of another version, and of each the coordinator keeps a copy."""
    _, lent = a_core(CoreSettings("async", verify=verify, is_large=is_large))
    leases: list[Lease] = [lease for assign in lent for lease in assign.leases]
    assert len(leases) == held
