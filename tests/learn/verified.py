"""A node and the one who verifies it, in one process: what is honest must never be called wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from tests.learn import jobs
from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import welcome_of
from w5xde import Job
from w5xde.learn.data.sources import MapSource
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.model.device import use_threads
from w5xde.learn.model.layout import Vector
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.train.trainer import Task, Trainer
from w5xde.learn.trust.recompute import GradientComputer, LeasedWork, Opinion, Recomputer
from w5xde.tree import Span, halves

STEP = 64
# Kinds of model that could be taken for a liar: they draw, keep statistics, or round in many ways.
HONEST: dict[str, Callable[[], Job]] = {
    "dropout and batch norm": lambda: make(mlp(lambda: nn.Dropout(0.2), lambda: nn.BatchNorm1d(16))),
    "convolutions": lambda: make(jobs.convolutions, data=jobs.images),
    "a transformer": lambda: make(jobs.Attention, data=jobs.tokens, loss=jobs.foretell),
    "an LSTM": lambda: make(jobs.Recurrent, data=jobs.tokens, loss=jobs.foretell),
}


class Bench:
    """A node and the one who verifies it, with the same parameters and batches."""

    def __init__(self, job: Job, mode: str = "sync") -> None:
        self.prepared: Prepared = prepare(job, settings(batches_per_step=STEP, mode=mode))
        source = self.prepared.source
        assert isinstance(source, MapSource)
        self._source = source
        self._node: Trainer = prepare_node(job, welcome_of(self.prepared), torch.device("cpu")).trainer
        self.recomputer = Recomputer(GradientComputer(self.prepared.make_trainer()), "fp32")
        self.params = self.prepared.learner.snapshot(whole=True)
        self._node.load(bytearray(self.params), whole=True)

    def task(self, span: Span, epoch: int = 0) -> Task:
        count = -(-(self._source.samples or 0) // 4)
        read = [(i, 4, self._source.read(epoch, i % (count - 1))) for i in range(span.start, span.stop)]
        return Task(epoch, span, STEP, 4 * STEP, read)

    def given(self, task: Task) -> Vector:
        """What the node sends, after its journey as bytes."""
        return Vector.over(self._node.compute(task).vector.raw.clone(), self.prepared.learner.flat.blueprint)

    def check(self, task: Task, given: Vector) -> Opinion:
        return self.recomputer.check(given, Replica(self.params), LeasedWork([task]))

    def check_size(self, task: Task, given: Vector) -> Opinion:
        return self.recomputer.check_size(given, Replica(self.params), LeasedWork([task]))

    def wrong(self, task: Task, given: Vector) -> str:
        return self.check(task, given).wrong


def spans(chance: random.Random) -> Iterator[Span]:
    """Aligned parts of a step, of every size."""
    while True:
        span = Span(0, STEP)
        while span.count > 1 and chance.random() < 0.7:
            span = chance.choice(halves(span))
        yield span


def blamed(job: Job, batches: int) -> list[str]:
    """What an honest node is blamed for in so many batches.

    Bits are the same on one machine; other threads, or another kind of machine, round differently.
    """
    bench, chance = Bench(job), random.Random(1)
    found, done = [], 0

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
            opinion = bench.check(task, given)
            found += [text for text in opinion if text]
            done += span.count
            if done >= batches:
                break
    return found
