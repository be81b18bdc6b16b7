"""The norms that nodes report follow their update into the sum, and never without all others."""

from __future__ import annotations

import pytest
import torch

from tests.learn.jobs import make, mlp, settings
from tests.learn.summing import Complete, Lent, fold, planned
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.sums import Contribution, TreeSums
from w5xde.tree import Span


def sums_of() -> tuple[TreeSums, Learner]:
    learner = prepare(make(mlp()), settings()).learner
    return TreeSums(learner.flat.blueprint, learner.gauge), learner


def update(learner: Learner, number: float, *squares: float) -> Contribution:
    vector = learner.flat.blueprint.new_vector()
    vector.parts[0].fill_(number)
    return Contribution(vector, frozenset(), 1.0, learner.gauge.norm(vector), squares)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_sum_of_measured_updates_has_its_norm_and_theirs_in_the_order_of_batches(
    order: tuple[int, ...],
) -> None:
    sums, learner = sums_of()
    parts = [
        (Span(0, 2), update(learner, 0.5, 1.0, 2.0)),
        (Span(2, 3), update(learner, 0.25, 3.0)),
        (Span(3, 4), update(learner, 0.25, 4.0)),
    ]
    for place in order:
        step = fold(sums, 0, 4, *parts[place])
    total = sums.total(step)
    assert total.contribution.squares == (1.0, 2.0, 3.0, 4.0)
    count = total.contribution.vector.parts[0].numel()
    assert total.square == pytest.approx(count, rel=1e-5)
    assert torch.equal(total.contribution.vector.parts[0], torch.ones(count))


def test_a_sum_with_an_update_that_was_not_measured_has_no_norm() -> None:
    sums, learner = sums_of()
    fold(sums, 0, 4, Span(0, 2), update(learner, 0.5, 1.0, 2.0))
    total = sums.total(fold(sums, 0, 4, Span(2, 4), update(learner, 0.5)))
    assert (total.square, total.contribution.squares) == (None, ())


def test_a_sum_without_a_batch_that_was_set_aside_has_no_norm() -> None:
    sums, learner = sums_of()
    step = planned(0, [1] * 4)
    sums.leave_empty(step, [Span(3, 4)])
    sums.add(Lent(1, step, Span(0, 2)), update(learner, 0.5, 1.0, 2.0), 0)
    sums.add(Lent(2, step, Span(2, 3)), update(learner, 0.5, 3.0), 0)
    total = sums.total(Complete(step))
    assert total.square is None
