"""Recomputing: honest updates are never called wrong, and lies are, by the layer that differs most."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.learn import jobs
from tests.learn.jobs import make, mlp, settings
from tests.learn.verified import HONEST, STEP, Bench, blamed, spans
from w5xde.errors import JobError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.model.layout import Vector
from w5xde.learn.trust.recompute import DIFFERENCE_MAX, ROUNDING
from w5xde.tree import Span

# Ten thousand in all; most of them where they cost least.
BATCHES = dict.fromkeys(HONEST, 500) | {"dropout and batch norm": 8_500}


@pytest.mark.parametrize("kind", HONEST)
def test_no_honest_node_is_blamed_in_ten_thousand_batches(kind: str) -> None:
    assert blamed(HONEST[kind](), BATCHES[kind]) == []


LIES: dict[str, Callable[[Vector], None]] = {
    "sign flipped": lambda vector: vector.parts[0].neg_(),
    "a thousand times": lambda vector: vector.parts[0].mul_(1000),
    "a tenth more": lambda vector: vector.parts[0].mul_(1.1),
    "zeros": lambda vector: vector.parts[0].zero_(),
    "noise": lambda vector: vector.parts[0].add_(torch.randn(vector.parts[0].shape)),
    "buffers": lambda vector: vector.parts[1].add_(1.0),
    "counters": lambda vector: vector.parts[2].add_(1),
}  # type: ignore[assignment]


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_after_any_number_of_honest_ones(lie: str) -> None:
    bench = Bench(make(mlp(lambda: nn.BatchNorm1d(16))))
    for number, span in zip(range(100), spans(random.Random(lie)), strict=False):
        task = bench.task(span)
        given = bench.given(task)
        if number % 10 == 9:
            LIES[lie](given)
            assert "differs by" in bench.wrong(task, given)
        else:
            assert bench.wrong(task, given) == ""


def test_the_layer_that_differs_most_is_named() -> None:
    bench = Bench(make(mlp()))
    task = bench.task(Span(0, 4))
    given = bench.given(task)
    blueprint = bench.prepared.learner.flat.blueprint
    names = [entry.name for entry in blueprint.layout.entries]
    place = blueprint.offsets[names.index("2.weight")] // 4
    given.parts[0][place] += 10
    assert "most in 2.weight" in bench.wrong(task, given)


def test_the_gradient_of_another_batch_is_found() -> None:
    bench = Bench(make(mlp()))
    old = bench.given(bench.task(Span(0, 1)))
    assert bench.wrong(bench.task(Span(0, 1)), old) == ""
    assert bench.wrong(bench.task(Span(5, 6)), old)


def test_tolerance_is_learned_from_those_that_agree_and_has_an_end() -> None:
    bench = Bench(make(mlp()))
    assert bench.recomputer.tolerance == ROUNDING["fp32"]
    for number in range(200):
        task = bench.task(Span(number % STEP, number % STEP + 1))
        given = bench.given(task)
        # Somebody who tries how far it may go.
        given.parts[0].mul_(1 + 0.9 * bench.recomputer.tolerance)
        bench.wrong(task, given)
    assert bench.recomputer.tolerance <= DIFFERENCE_MAX


def test_what_cannot_be_computed_here_is_nobodys_fault_and_not_called_right() -> None:
    bench = Bench(make(mlp()))
    task = bench.task(Span(0, 1))
    given = bench.given(task)
    given.parts[0].zero_()
    task.batches = [(0, 4, ["no batch at all"])]
    opinion = bench.check(task, given)
    assert opinion.wrong == ""
    assert "cannot be computed here" in opinion.unknown


def unrepeatable(model: nn.Module, batch: Any) -> torch.Tensor:
    """Draws from a generator that no seed of ours reaches."""
    return jobs.classify(model, batch) * (1 + torch.rand(1, generator=OWN).sum())


OWN = torch.Generator().manual_seed(1)


def test_what_comes_out_differently_each_time_is_not_called_right() -> None:
    bench = Bench(make(mlp(), loss=unrepeatable), mode="async")
    task = bench.task(Span(0, 1))
    opinion = bench.check(task, bench.given(task))
    assert opinion.wrong == ""
    assert "differently each time" in opinion.unknown


def test_a_run_that_verifies_needs_a_loss_that_repeats_in_async_mode_too() -> None:
    prepare(make(mlp(), loss=unrepeatable), settings(mode="async"))
    with pytest.raises(JobError) as caught:
        prepare(make(mlp(), loss=unrepeatable), settings(mode="async", verify=0.1))
    assert caught.value.code == "W5-231"


@pytest.mark.parametrize(("factor", "is_wrong"), [(1.0, False), (-1.0, False), (3.0, False), (5.0, True)])
def test_sizes_alone_can_be_compared(factor: float, is_wrong: bool) -> None:
    """For updates that were compressed with loss, or from devices that draw other random numbers."""
    bench = Bench(make(mlp()))
    task = bench.task(Span(0, 2))
    given = bench.given(task)
    given.parts[0].mul_(factor)
    opinion = bench.check_size(task, given)
    assert bool(opinion.wrong) == is_wrong
    assert opinion.unknown == ""
