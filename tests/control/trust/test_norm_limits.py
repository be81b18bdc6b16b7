"""Whether an update is too large to be believed, and whose fault it was."""

from __future__ import annotations

import math
import random

import pytest

from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import StepPlan
from w5xde.control.trust.norm_limits import AUTO, FAULTS_MAX, KNOWN_MIN, OFF, USUAL_FACTOR, Judge, Median
from w5xde.tree import Span

ONE = Span(0, 1)


def lease(node: str = "a", *, step: int = 0, span: Span = ONE, count: int = 8) -> Lease:
    return Lease(1, node, StepPlan(step, 0, 0, (4,) * count, ends_epoch=False), span, 0, 0.0, 0.0)


def taught(setting: str = AUTO, *, norm: float = 1.0, span: Span = ONE) -> Judge:
    """A judge who has seen enough updates of that mean norm."""
    judge = Judge(setting)
    for _ in range(2 * KNOWN_MIN):
        assert judge.doubt(lease(span=span), norm * span.count / 8, is_alone=False) == ""
    return judge


def test_nothing_is_unusual_before_enough_is_known() -> None:
    judge = Judge(AUTO)
    for i in range(KNOWN_MIN):
        assert judge.doubt(lease(), 10.0**i, is_alone=False) == ""


def test_what_is_more_than_ten_times_the_median_is_doubted() -> None:
    judge = taught()
    assert judge.doubt(lease(), 0.9 * USUAL_FACTOR / 8, is_alone=False) == ""
    assert "norm is 11" in judge.doubt(lease(), 11 / 8, is_alone=False)


def test_a_span_is_compared_by_its_mean_gradient() -> None:
    judge = taught(span=Span(0, 4))
    assert judge.doubt(lease(span=Span(4, 8)), 9 * 4 / 8, is_alone=False) == ""
    assert judge.doubt(lease(span=Span(4, 8)), 11 * 4 / 8, is_alone=False)


def test_a_single_batch_may_be_larger_than_means_of_many() -> None:
    """By the root of how many: as much as chance makes of it."""
    judge = taught(span=Span(0, 4))
    assert judge.doubt(lease(), 19 / 8, is_alone=False) == ""
    assert judge.doubt(lease(), 21 / 8, is_alone=False)


def test_one_that_was_turned_out_and_is_let_in_again_begins_anew_and_nobody_else() -> None:
    judge = Judge(OFF)

    def fault_of(node: str, step: int) -> int:
        judge.refused(lease(node, step=step), math.inf)
        [fault] = judge.close(step, [(0, 1, "good", 2)])
        return fault.count

    counts = []
    for step in range(FAULTS_MAX + 1):
        # Coming back is no excuse.
        judge.joined("a")
        counts.append(fault_of("a", step))
    assert counts == [1, 2, 3, 1]


def test_zeros_never_make_everything_unusual() -> None:
    judge = Judge(AUTO)
    for _ in range(100):
        assert judge.doubt(lease(), 0.0, is_alone=False) == ""
    assert judge.doubt(lease(), 1.0, is_alone=False) == ""


def test_off_believes_everything_and_a_number_nothing_above_it() -> None:
    assert taught(OFF).doubt(lease(), 1e30, is_alone=False) == ""
    fixed = Judge("2.5")
    assert fixed.doubt(lease(), 2.4 / 8, is_alone=False) == ""
    for node in "abc":
        assert fixed.doubt(lease(node), 2.6 / 8, is_alone=True)
        fixed.refused(lease(node), 2.6 / 8)


def test_what_two_nodes_find_is_in_the_data() -> None:
    judge = taught()
    assert judge.doubt(lease("a"), 50 / 8, is_alone=False)
    judge.refused(lease("a"), 50 / 8)
    # Its own word is worth nothing, as long as there is anybody else.
    assert judge.doubt(lease("a"), 50 / 8, is_alone=False)
    assert judge.doubt(lease("b"), 50 / 8, is_alone=False) == ""
    assert judge.close(0, [(0, 1, "b", 2)]) == []
    # From then on nobody wonders.
    assert judge.doubt(lease("a", step=1), 60 / 8, is_alone=False) == ""


def test_a_lone_node_confirms_itself() -> None:
    judge = taught()
    assert judge.doubt(lease("a"), 50 / 8, is_alone=True)
    judge.refused(lease("a"), 50 / 8)
    assert judge.doubt(lease("a"), 50 / 8, is_alone=True) == ""


def test_a_second_opinion_that_is_quite_another_confirms_nothing() -> None:
    judge = taught()
    judge.refused(lease("a"), 1000 / 8)
    assert judge.doubt(lease("b"), 50 / 8, is_alone=False)


def test_whoever_is_far_from_what_others_found_is_at_fault() -> None:
    judge = taught()
    for step in range(FAULTS_MAX):
        judge.refused(lease("a", step=step), 1000 / 8)
        assert judge.doubt(lease("b", step=step), 1 / 8, is_alone=False) == ""
        [fault] = judge.close(step, [(0, 1, "b", 2), (1, 8, "a", 3)])
        assert (fault.node, fault.count) == ("a", step + 1)


def test_whoever_is_near_the_limit_is_not() -> None:
    judge = taught()
    judge.refused(lease("a"), 11 / 8)
    assert judge.doubt(lease("b"), 9.5 / 8, is_alone=False) == ""
    assert judge.close(0, [(0, 1, "b", 2)]) == []


@pytest.mark.parametrize(
    "shares",
    [
        [(0, 2, "b", 2), (2, 4, "a", 3)],  # it gave a part of it itself
        [(0, 2, "b", 2), (3, 4, "c", 3)],  # a batch of it was set aside
        [],
    ],
)
def test_nobody_is_blamed_for_what_others_did_not_compute(shares: list[tuple[int, int, str, int]]) -> None:
    judge = Judge(AUTO)
    judge.refused(lease("a", span=Span(0, 4)), math.inf)
    assert judge.close(0, shares) == []


def test_a_span_that_was_not_finite_is_blamed_if_others_gave_all_its_batches() -> None:
    judge = Judge(OFF)
    judge.refused(lease("a", span=Span(0, 4)), math.inf)
    [fault] = judge.close(0, [(0, 2, "b", 2), (2, 4, "c", 3), (4, 8, "a", 4)])
    assert fault.node == "a"


def test_the_median_follows_what_it_sees_and_no_single_number() -> None:
    chance = random.Random(1)
    median = Median()
    for _ in range(2000):
        median.add(math.exp(chance.gauss(0, 1)))
    assert 0.7 < median.value < 1.4
    before = median.value
    median.add(1e30)
    assert median.value < 1.03 * before
    for _ in range(500):
        median.add(100 * math.exp(chance.gauss(0, 1)))
    assert 70 < median.value < 140


def test_one_who_found_a_batch_large_is_no_proof_that_nobody_can_compute_it() -> None:
    judge = taught()
    large = lease("b", step=1, count=1)
    assert judge.doubt(large, 50.0, is_alone=False)
    judge.refused(large, 50.0)
    assert judge.needs_another(large, is_alone=False)
    assert not judge.needs_another(large, is_alone=True)
    # Somebody else finds the same: it is believed.
    assert not judge.doubt(lease("a", step=1, count=1), 50.0, is_alone=False)
    judge.refused(lease("a", step=1, count=1), 5000.0)
    assert not judge.needs_another(large, is_alone=False)
