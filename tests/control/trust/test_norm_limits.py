"""Whether an update is too large to be accepted, and whose fault it was."""

from __future__ import annotations

import math
import random

import pytest

from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import StepPlan
from w5xde.control.trust.norm_limits import (
    AUTO,
    FAULTS_MAX,
    KNOWN_MIN,
    OFF,
    USUAL_FACTOR,
    NormCheck,
    NormLimits,
)
from w5xde.tree import Span

ONE = Span(0, 1)


def lease(node: str = "a", *, step: int = 0, span: Span = ONE, count: int = 8) -> Lease:
    return Lease(1, node, StepPlan(step, 0, 0, (4,) * count, ends_epoch=False), span, 0, 0.0, 0.0)


def taught(setting: str = AUTO, *, norm: float = 1.0, span: Span = ONE) -> NormCheck:
    """A check that has seen enough updates of that mean norm."""
    checks = NormCheck(NormLimits(setting, norm))
    for _ in range(2 * KNOWN_MIN):
        assert checks.check(lease(span=span), norm * span.count / 8) == ""
    return checks


def test_while_the_usual_norm_is_not_known_our_own_gradient_decides() -> None:
    checks = NormCheck(NormLimits(AUTO, own_norm=1.0))
    assert checks.check(lease(), 9 / 8) == ""
    assert "norm is 1e+08" in checks.check(lease(), 1e8 / 8)
    # For spans of any size: the mean of more batches is not larger.
    assert checks.check(lease(span=Span(0, 4)), 1e8)
    assert checks.check(lease(span=Span(0, 4)), 9 / 2) == ""


def test_without_a_gradient_of_our_own_the_first_updates_need_a_second_opinion() -> None:
    checks = NormCheck(NormLimits(AUTO))
    assert checks.check(lease("a"), 1.0)
    checks.reject(lease("a"), 1.0)
    assert checks.check(lease("b"), 1.0) == ""
    # Now a size is known, and no second opinion is needed.
    assert checks.check(lease("a", step=1), 1.0) == ""
    assert checks.check(lease("a", step=1), 1e8)


def test_what_is_usual_of_small_spans_limits_large_ones() -> None:
    checks = taught()
    assert checks.check(lease(span=Span(0, 4)), 9 * 4 / 8) == ""
    assert checks.check(lease(span=Span(0, 4)), 11 * 4 / 8)


def test_what_is_usual_survives_a_restart() -> None:
    before = taught(norm=1e-3).limits
    for _ in range(3):
        before.learn(1e-4, 4)
    after = NormLimits(AUTO, own_norm=1.0)
    after.resume(before.state())
    assert after.state() == before.state()
    assert after.of(1) == before.of(1) < 0.02
    # A copy: the run that was saved goes on.
    before.learn(1e-4, 4)
    assert after.state() != before.state()


def test_what_is_more_than_ten_times_the_median_is_doubted() -> None:
    checks = taught()
    assert checks.check(lease(), 0.9 * USUAL_FACTOR / 8) == ""
    assert "norm is 11" in checks.check(lease(), 11 / 8)


def test_a_span_is_compared_by_its_mean_gradient() -> None:
    checks = taught(span=Span(0, 4))
    assert checks.check(lease(span=Span(4, 8)), 9 * 4 / 8) == ""
    assert checks.check(lease(span=Span(4, 8)), 11 * 4 / 8)


def test_a_single_batch_may_be_larger_than_means_of_many() -> None:
    """By the root of how many: as much as chance makes of it."""
    checks = taught(span=Span(0, 4))
    assert checks.check(lease(), 19 / 8) == ""
    assert checks.check(lease(), 21 / 8)


def test_one_that_was_turned_out_and_is_let_in_again_begins_anew_and_nobody_else() -> None:
    checks = NormCheck(NormLimits(OFF))

    def fault_of(node: str, step: int) -> int:
        checks.reject(lease(node, step=step), math.inf)
        [(_, count)] = checks.complete(step, [(0, 1, "good", 2)])
        return count

    counts = []
    for step in range(FAULTS_MAX + 1):
        # Coming back is no excuse.
        checks.joined("a")
        counts.append(fault_of("a", step))
    assert counts == [1, 2, 3, 1]


def test_zeros_never_make_everything_unusual() -> None:
    checks = NormCheck(NormLimits(AUTO, own_norm=8.0))
    for _ in range(100):
        assert checks.check(lease(), 0.0) == ""
    assert checks.check(lease(), 1.0) == ""


def test_off_believes_everything_and_a_number_nothing_above_it() -> None:
    assert taught(OFF).check(lease(), 1e30) == ""
    fixed = NormCheck(NormLimits("2.5"))
    assert fixed.check(lease(), 2.4 / 8) == ""
    for node in "abc":
        assert fixed.check(lease(node), 2.6 / 8)
        fixed.reject(lease(node), 2.6 / 8)


def test_what_two_nodes_find_is_in_the_data() -> None:
    checks = taught()
    assert checks.check(lease("a"), 50 / 8)
    checks.reject(lease("a"), 50 / 8)
    # Its own word is worth nothing, as long as there is anybody else.
    assert checks.check(lease("a"), 50 / 8)
    assert checks.check(lease("b"), 50 / 8) == ""
    assert list(checks.complete(0, [(0, 1, "b", 2)])) == []
    # From then on nobody wonders.
    assert checks.check(lease("a", step=1), 60 / 8) == ""


def test_nobody_confirms_itself_and_a_lone_node_is_compared_with_the_coordinator() -> None:
    checks = taught()
    assert not checks.needs_coordinator(lease("a"), is_alone=True)
    assert checks.check(lease("a"), 50 / 8)
    checks.reject(lease("a"), 50 / 8)
    assert checks.check(lease("a"), 50 / 8)
    assert checks.needs_coordinator(lease("a"), is_alone=True)
    assert not checks.needs_coordinator(lease("a"), is_alone=False)
    assert checks.check(lease("a"), 50 / 8, is_verified=True) == ""
    # A number that was set is a limit, whoever agrees.
    assert NormCheck(NormLimits("2.5")).check(lease("a"), 3 / 8, is_verified=True)


def test_the_coordinator_decides_between_nodes_that_disagree() -> None:
    checks = taught()
    checks.reject(lease("a"), 1000 / 8)
    assert not checks.needs_coordinator(lease("b"), is_alone=False)
    checks.reject(lease("b"), 50 / 8)
    assert checks.needs_coordinator(lease("c"), is_alone=False)


def test_a_second_opinion_that_is_quite_another_confirms_nothing() -> None:
    checks = taught()
    checks.reject(lease("a"), 1000 / 8)
    assert checks.check(lease("b"), 50 / 8)


def test_whoever_is_far_from_what_others_found_is_at_fault() -> None:
    checks = taught()
    for step in range(FAULTS_MAX):
        checks.reject(lease("a", step=step), 1000 / 8)
        assert checks.check(lease("b", step=step), 1 / 8) == ""
        [(update, count)] = checks.complete(step, [(0, 1, "b", 2), (1, 8, "a", 3)])
        assert (update.node, count) == ("a", step + 1)


def test_a_mean_of_more_batches_proves_nothing_about_one_of_them() -> None:
    checks = taught()
    checks.reject(lease("a"), 50 / 8)
    # Another node computed the whole step, in which one large gradient hardly shows.
    assert checks.check(lease("b", span=Span(0, 8)), 1.5) == ""
    assert list(checks.complete(0, [(0, 8, "b", 2)])) == []


def test_whoever_is_near_the_limit_is_not() -> None:
    checks = taught()
    checks.reject(lease("a"), 11 / 8)
    assert checks.check(lease("b"), 9.5 / 8) == ""
    assert list(checks.complete(0, [(0, 1, "b", 2)])) == []


@pytest.mark.parametrize(
    "shares",
    [
        [(0, 2, "b", 2), (2, 4, "a", 3)],  # it gave a part of it itself
        [(0, 2, "b", 2), (3, 4, "c", 3)],  # a batch of it was set aside
        [],
    ],
)
def test_nobody_is_blamed_for_what_others_did_not_compute(shares: list[tuple[int, int, str, int]]) -> None:
    checks = NormCheck(NormLimits(AUTO))
    checks.reject(lease("a", span=Span(0, 4)), math.inf)
    assert list(checks.complete(0, shares)) == []


def test_a_span_that_was_not_finite_is_blamed_if_others_gave_all_its_batches() -> None:
    checks = NormCheck(NormLimits(OFF))
    checks.reject(lease("a", span=Span(0, 4)), math.inf)
    [(update, _)] = checks.complete(0, [(0, 2, "b", 2), (2, 4, "c", 3), (4, 8, "a", 4)])
    assert update.node == "a"


def test_the_median_follows_what_it_sees_and_no_single_number() -> None:
    chance = random.Random(1)
    limits = NormLimits(AUTO)
    for _ in range(2000):
        limits.learn(math.exp(chance.gauss(0, 1)), 1)
    assert 0.7 < limits.of(1) / USUAL_FACTOR < 1.4
    before = limits.of(1)
    limits.learn(1e30, 1)
    assert limits.of(1) < 1.03 * before
    for _ in range(500):
        limits.learn(100 * math.exp(chance.gauss(0, 1)), 1)
    assert 70 < limits.of(1) / USUAL_FACTOR < 140


def test_one_who_found_a_batch_large_is_no_proof_that_nobody_can_compute_it() -> None:
    checks = taught()
    large = lease("b", step=1, count=1)
    assert checks.check(large, 50.0)
    checks.reject(large, 50.0)
    assert checks.needs_second_node(large, is_alone=False)
    assert not checks.needs_second_node(large, is_alone=True)
    # Somebody else finds the same: it is believed.
    assert not checks.check(lease("a", step=1, count=1), 50.0)
    checks.reject(lease("a", step=1, count=1), 5000.0)
    assert not checks.needs_second_node(large, is_alone=False)
