"""A second opinion: honest updates are never called wrong, and lies are, by the layer that differs most."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import welcome_of
from w5xde import Job
from w5xde.learn.data import MapSource
from w5xde.learn.device import use_threads
from w5xde.learn.enrol import prepare_node
from w5xde.learn.layout import Vector
from w5xde.learn.prepare import Prepared, prepare
from w5xde.learn.second import DIFFERENCE_MAX, ROUNDING, SecondOpinion, task_of
from w5xde.learn.trainer import Task, Trainer
from w5xde.tree import Span, halves

BATCHES = 10_000
STEP = 64


class Bench:
    """A node and the one who verifies it, with the same parameters and batches."""

    def __init__(self, job: Job) -> None:
        self.prepared: Prepared = prepare(job, settings(batches_per_step=STEP))
        source = self.prepared.source
        assert isinstance(source, MapSource)
        self._source = source
        self._node: Trainer = prepare_node(job, welcome_of(self.prepared), torch.device("cpu")).trainer
        self.second = SecondOpinion(self.prepared.make_trainer(), "fp32")
        self.params = self.prepared.learner.snapshot(whole=True)
        self._node.load(bytearray(self.params), whole=True)

    def task(self, span: Span, epoch: int = 0) -> Task:
        count = -(-(self._source.samples or 0) // 4)
        sizes = [4] * STEP
        batches = [self._source.read(epoch, i % (count - 1)) for i in range(span.start, span.stop)]
        return task_of(epoch, span, sizes, 0, batches)

    def given(self, task: Task) -> Vector:
        """What the node sends, after its journey as bytes."""
        return self.prepared.learner.vector(self._node.compute(task).vector.raw.clone())

    def wrong(self, task: Task, given: Vector) -> str:
        return self.second.wrong_with(given, self.params, task)


def spans(chance: random.Random) -> Iterator[Span]:
    """Aligned parts of a step, of every size."""
    while True:
        span = Span(0, STEP)
        while span.count > 1 and chance.random() < 0.7:
            span = chance.choice(halves(span))
        yield span


def test_no_honest_node_is_blamed_in_ten_thousand_batches() -> None:
    """Bits are the same on one machine; other threads, or another kind of machine, round differently."""
    bench = Bench(make(mlp(lambda: nn.Dropout(0.2), lambda: nn.BatchNorm1d(16))))
    chance, done = random.Random(1), 0

    def given_by(threads: int, task: Task) -> Vector:
        use_threads(threads)
        return bench.given(task)

    # On a thread of its own: where several of torch's threads were ever used, no process may be forked that
    # uses several too.
    with ThreadPoolExecutor(1) as node:
        for number, span in enumerate(spans(chance)):
            task = bench.task(span, epoch=number % 5)
            given = node.submit(given_by, chance.choice((1, 1, 2, 3)), task).result()
            if chance.random() < 0.3:
                for part in given.parts:
                    if part.dtype == torch.float32:
                        part.mul_(1 + 1e-5 * torch.randn(part.shape))
            assert bench.wrong(task, given) == ""
            done += span.count
            if done >= BATCHES:
                return


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
    assert bench.second.tolerance == ROUNDING["fp32"]
    for number in range(200):
        task = bench.task(Span(number % STEP, number % STEP + 1))
        given = bench.given(task)
        # Somebody who tries how far it may go.
        given.parts[0].mul_(1 + 0.9 * bench.second.tolerance)
        bench.wrong(task, given)
    assert bench.second.tolerance <= DIFFERENCE_MAX


def test_what_cannot_be_computed_here_is_nobodys_fault() -> None:
    bench = Bench(make(mlp()))
    task = bench.task(Span(0, 1))
    given = bench.given(task)
    given.parts[0].zero_()
    task.batches = [(0, 4, ["no batch at all"])]
    assert bench.wrong(task, given) == ""
