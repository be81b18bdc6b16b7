"""Weights of batches: what a job may say, what a node computes from it, and what a liar gains by it."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tests.learn import jobs
from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import welcome_of
from tests.learn.summing import Complete, Lent, planned
from tests.learn.verified import Bench
from w5xde import Job
from w5xde.errors import JobError, JoinError, RemoteProtocolError
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.job.job import BatchFailed
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.model.layout import Vector
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.step.robust_mean import RobustSums
from w5xde.learn.step.sums import Contribution, StepSums, Total, TreeSums
from w5xde.learn.train.trainer import Task
from w5xde.learn.train.weighing import add_weights, unit_of
from w5xde.learn.trust.recompute import LeasedWork
from w5xde.specs.robust_rule import Robust
from w5xde.tree import PairwiseTree, Span, halves

CPU = torch.device("cpu")
COUNTED = itertools.count(1)


def weighed(weight: Any, *between: Any) -> Job:
    return make(mlp(*between), weight=weight)


def task_of(prepared: Prepared, span: Span, count: int) -> Task:
    source = prepared.source
    batches = [(i, 4, source.read(0, i)) for i in range(span.start, span.stop)]  # type: ignore[union-attr]
    return Task(0, span, count, 4 * count, batches)


# --- what a job may say -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        (lambda batch: -1, "gave -1 for the first batch"),
        (lambda batch: math.nan, "gave nan for the first batch"),
        (lambda batch: torch.tensor(math.inf), "gave inf for the first batch"),
        (lambda batch: batch[7], "weight() failed on the first batch: IndexError"),
        (lambda batch: batch[0], "weight() failed on the first batch: "),
        (lambda batch: None, "weight() failed on the first batch: TypeError"),
        (lambda batch: next(COUNTED), "and then"),
    ],
)
def test_what_is_no_weight_is_refused_before_any_node_is_used(weight: Any, what: str) -> None:
    with pytest.raises(JobError) as caught:
        prepare(weighed(weight), settings())
    assert caught.value.code == "W5-255"
    assert what in caught.value.what
    assert caught.value.fix


def test_rounds_have_steps_of_one_batch_and_refuse_weights() -> None:
    with pytest.raises(JobError, match="cannot be trained in rounds") as caught:
        prepare(weighed(lambda batch: 1), settings(mode="rounds", local_steps=2))
    assert caught.value.code == "W5-257"


@pytest.mark.parametrize("ours", [True, False])
def test_a_node_weighs_if_the_run_does(ours: bool) -> None:
    plain, weighs = make(mlp()), weighed(lambda batch: 1)
    welcome = welcome_of(prepare(weighs if ours else plain, settings()))
    with pytest.raises(JoinError, match="one job weighs its batches") as caught:
        prepare_node(plain if ours else weighs, welcome, CPU)
    assert caught.value.code == "W5-256"


@pytest.mark.parametrize("unit", [-1.0, math.inf, math.nan])
def test_a_unit_that_makes_no_sense_is_refused(unit: float) -> None:
    job = weighed(lambda batch: 1)
    welcome = welcome_of(prepare(job, settings()))
    rules = msgspec.structs.replace(welcome.rules, weight_unit=unit)
    with pytest.raises(RemoteProtocolError, match="weights in units"):
        prepare_node(job, msgspec.structs.replace(welcome, rules=rules), CPU)


def test_weights_are_counted_in_a_power_of_two_that_is_about_a_sample() -> None:
    assert unit_of(100.0, 4) == 32.0
    assert unit_of(0.3, 4) == 0.0625
    assert unit_of(4.0, 4) == 1.0
    assert unit_of(0.0, 4) == 1.0
    assert prepare(weighed(lambda batch: 1000 * len(batch[0])), settings()).rules.weight_unit == 1024.0
    assert prepare(make(mlp()), settings()).rules.weight_unit == 0.0


def test_weights_are_added_in_the_canonical_tree() -> None:
    chance = random.Random(1)
    for count in (1, 2, 3, 5, 8, 13):
        weights = [chance.uniform(0, 1) ** 9 for _ in range(count)]
        tree: PairwiseTree[float] = PairwiseTree(count, lambda one, other: one + other)
        for i, weight in enumerate(weights):
            tree.put(Span(i, i + 1), weight)
        assert add_weights(weights, Span(0, count)) == tree.take(Span(0, count))
    left, right = halves(Span(0, 13))
    assert add_weights(weights, Span(0, 13)) == (
        add_weights(weights[: left.stop], left) + add_weights(weights[left.stop :], right)
    )


# --- what a node computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_batch_without_a_weight_fails_with_the_code(bad: float) -> None:
    prepared = prepare(weighed(lambda batch: bad if batch[0][0, 0] == 77 else 1.0), settings())
    trainer, task = prepared.make_trainer(), task_of(prepared, Span(0, 2), 4)
    task.batches[1][2][0][0, 0] = 77
    trainer.compute_together([task])  # says nothing: there is more to compute
    with pytest.raises(BatchFailed, match=rf"weight\(\) gave {bad:g} for batch 1.*W5-255"):
        trainer.compute(task)


def test_a_batch_that_weighs_nothing_changes_buffers_alone_and_its_loss_may_be_nothing() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return jobs.classify(model, batch) / (batch[0][0, 0] != 77)

    job = make(mlp(lambda: nn.BatchNorm1d(16)), loss=loss, weight=lambda batch: batch[0][0, 0] != 77)
    prepared = prepare(job, settings())
    trainer, task = prepared.make_trainer(), task_of(prepared, Span(0, 1), 4)
    task.batches[0][2][0][0, 0] = 77
    found = trainer.compute(task)
    assert (found.loss_sum, found.weight) == (0.0, 0.0)
    assert found.absent == list(trainer.blueprint.trained)
    gradients, *buffers = found.vector.parts
    assert not gradients.any()
    assert all(part.any() for part in buffers)
    # The next batch starts from the version's buffers again.
    other = task_of(prepared, Span(1, 2), 4)
    alone = prepare(job, settings()).make_trainer().compute(task_of(prepared, Span(1, 2), 4))
    assert trainer.compute(other).vector.is_same(alone.vector)


@pytest.mark.parametrize(("weight", "counts"), [(1e-30, 0.0), (1e-6, 1e-6 * 2.0**22), (0.0, 0.0)])
def test_what_is_far_below_a_sample_counts_as_nothing(weight: float, counts: float) -> None:
    """A step is divided by its weights, and must stay in the range of its numbers."""
    prepared = prepare(weighed(lambda batch: weight if batch[0][0, 0] == 77 else 1e-6), settings())
    assert prepared.rules.weight_unit == 2.0**-22
    task = task_of(prepared, Span(0, 1), 4)
    task.batches[0][2][0][0, 0] = 77
    assert prepared.make_trainer().compute(task).weight == counts


@pytest.mark.parametrize("recording", ["auto", "off"])
def test_recorded_batches_have_their_own_weights(recording: str) -> None:
    """Replays of one shape, one after another and together, each multiplied by what its batch weighs."""
    how = settings(recording=recording)
    prepared = prepare(weighed(lambda batch: 1.0 + batch[0].abs().sum()), how)
    plain = prepare(weighed(lambda batch: 1.0 + batch[0].abs().sum()), settings(recording="off"))
    one, other = prepared.make_trainer(), plain.make_trainer()
    for _ in range(12):
        task, again = task_of(prepared, Span(0, 8), 8), task_of(prepared, Span(0, 8), 8)
        one.compute_together([task])
        assert one.compute(task).vector.is_same(other.compute(again).vector)


# --- what the coordinator makes of it ---------------------------------------------------------------


def updates(prepared: Prepared, spans: list[Span], count: int) -> dict[Span, Contribution]:
    trainer = prepared.make_trainer()
    found = {}
    for span in spans:
        outcome = trainer.compute(task_of(prepared, span, count))
        vector = Vector.over(outcome.vector.raw.clone(), prepared.learner.flat.blueprint)
        norm = prepared.learner.gauge.norm(vector)
        absent = frozenset(outcome.absent)
        found[span] = Contribution(vector, absent, outcome.loss_sum, norm, weight=outcome.weight)
    return found


def summed(
    sums: StepSums, given: dict[Span, Contribution], count: int, *, aside: tuple[Span, ...] = ()
) -> Total:
    step = planned(0, [4] * count)
    sums.leave_empty(step, aside)
    shares = []
    for lease, (span, contribution) in enumerate(given.items()):
        sums.add(Lent(lease, step, span), contribution, 0)
        shares.append((*span, f"node {lease}", lease))
    return sums.total(Complete(step, shares))


def by_numbers(batch: Any) -> Any:
    return batch[0].abs().sum()


def test_batches_that_were_set_aside_do_not_count() -> None:
    prepared = prepare(weighed(by_numbers), settings())
    learner = prepared.learner
    alone = updates(prepared, [Span(0, 1), Span(1, 2)], 3)
    total = summed(TreeSums(learner.vectors, learner.gauge), alone, 3, aside=(Span(2, 3),))
    both = updates(prepared, [Span(0, 1), Span(1, 2)], 2)
    expected = summed(TreeSums(learner.vectors, learner.gauge), both, 2)
    torch.testing.assert_close(
        total.contribution.vector.parts[0], expected.contribution.vector.parts[0], rtol=1e-5, atol=1e-7
    )
    assert total.contribution.loss_sum == pytest.approx(expected.contribution.loss_sum)
    assert total.contribution.norm >= float(total.contribution.vector.parts[0].norm()) * (1 - 1e-6)


def test_a_robust_mean_compares_means_whatever_each_node_weighs() -> None:
    """Three nodes with one gradient and unlike weights agree, and an extreme one is left out."""
    prepared = prepare(weighed(by_numbers), settings())
    learner, blueprint = prepared.learner, prepared.learner.flat.blueprint
    gradient = torch.linspace(-1, 1, learner.vectors.new_vector().parts[0].numel())
    given = {}
    for place, (weight, factor) in enumerate([(1.0, 1.0), (10.0, 1.0), (0.1, 1.0), (3.0, 1000.0)]):
        vector = blueprint.new_vector()
        vector.raw.zero_()
        # As a node sends it: the mean of its batch times weight over samples of the step.
        vector.parts[0].copy_(gradient * factor * weight / 16)
        given[Span(place, place + 1)] = Contribution(vector, frozenset(), 2.0 * weight, 1.0, weight=weight)
    total = summed(RobustSums(blueprint, learner.gauge, Robust(1)), given, 4)
    torch.testing.assert_close(total.contribution.vector.parts[0], gradient, rtol=1e-5, atol=1e-6)
    assert total.contribution.loss_sum == pytest.approx(2.0 * 16)


def test_a_node_whose_batches_weigh_nothing_has_no_voice_in_a_robust_mean() -> None:
    prepared = prepare(weighed(by_numbers), settings())
    learner, blueprint = prepared.learner, prepared.learner.flat.blueprint
    given = {}
    for place, (weight, number) in enumerate([(0.0, 99.0), (2.0, 1.0), (2.0, 1.0), (2.0, 1.0)]):
        vector = blueprint.new_vector()
        vector.raw.zero_()
        vector.parts[0].fill_(number * (weight or 1.0) / 16)
        given[Span(place, place + 1)] = Contribution(vector, frozenset(), weight, 1.0, weight=weight)
    total = summed(RobustSums(blueprint, learner.gauge, Robust(1)), given, 4)
    torch.testing.assert_close(total.contribution.vector.parts[0], torch.ones_like(vector.parts[0]))


@pytest.mark.parametrize("rule", [None, Robust(1)])
def test_a_step_without_any_weight_has_no_gradient_and_a_lie_in_it_is_dropped(rule: Robust | None) -> None:
    prepared = prepare(weighed(by_numbers), settings())
    learner = prepared.learner
    blueprint, gauge = learner.vectors, learner.gauge
    sums: StepSums = TreeSums(blueprint, gauge) if rule is None else RobustSums(blueprint, gauge, rule)
    given = {}
    for place in range(4):
        vector = blueprint.new_vector()
        vector.raw.zero_()
        vector.parts[0].fill_(1e6)
        given[Span(place, place + 1)] = Contribution(vector, frozenset(), 5.0, 1.0, weight=0.0)
    total = summed(sums, given, 4).contribution
    assert not total.vector.parts[0].any()
    assert total.absent == frozenset(blueprint.trained)
    assert total.loss_sum == 0.0
    before = learner.weights_sha256()
    learner.apply([Total(4, total)])
    assert learner.weights_sha256() == before


# --- verification -------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.01, 0.5, 1e6, 0.0])
def test_a_weight_that_is_a_lie_is_found(factor: float) -> None:
    bench = Bench(weighed(by_numbers))
    task = bench.task(Span(0, 4))
    given, weight = bench.given(task), task.weight
    assert weight is not None
    for check in (bench.recomputer.check, bench.recomputer.check_size):
        assert check(given, Replica(bench.params), LeasedWork([task]), weight) == ("", "")
        found = check(given, Replica(bench.params), LeasedWork([task]), weight * factor)
        assert "its batches weigh" in found.wrong
