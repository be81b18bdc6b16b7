"""A pool in rounds mode, in one process: the real learner, plan and node workers, and chance as the network.

Columns go to nodes in an order that a seed decides; some are computed twice, some answers are lost, nodes
join late, miss rounds, and come back. All that travels is turned into bytes and back.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, cast

import msgspec
import torch

from tests.learn.pool import COPY, LOSE, NODE_COUNTS, Trained, welcome_of
from tests.learn.reference import differences, initial
from tests.learn.rounds.plain import train_rounds_plainly
from tests.learn.summing import Complete, Lent
from w5xde import Job
from w5xde.config import Settings
from w5xde.control.steps.plan import StepPlan
from w5xde.learn.data.payload import pack_batch
from w5xde.learn.data.sources import MapSource
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.step.incoming import UpdateReader
from w5xde.learn.step.sums import Contribution
from w5xde.message_types import StepRates
from w5xde.messages import Batch, Loan, Message, Work
from w5xde.runtime.coordinator.round_parameters import RoundParameters
from w5xde.runtime.coordinator.setup import build_plan, build_reader
from w5xde.runtime.node.worker import NodeWorker
from w5xde.runtime.pipeline.peer import Peer, SentParams
from w5xde.tree import Span

CPU = torch.device("cpu")
# How often a node leaves and comes back with the parameters that it has, or as a new process.
RETURN, RENEW = 0.1, 0.05


class RoundsNode:
    """One machine, and the coordinator's side of its connection."""

    def __init__(self, job: Job, prepared: Prepared, parameters: RoundParameters) -> None:
        parts = prepare_node(job, welcome_of(prepared), CPU)
        self.worker = NodeWorker(parts, lambda: 0.0, lambda lease: False)
        self._prepared = prepared
        self._parameters = parameters
        self.sent: Counter[str] = Counter()
        self.return_()

    def return_(self) -> None:
        """Connect again, with the parameters of before."""
        self.peer = Peer(cast(Any, None), cast(Any, None))
        columns = self.worker.parts.columns
        if columns is not None and columns.version >= 0:
            self.peer.replica = columns.version, columns.digest

    def compute(self, reader: UpdateReader, step: StepPlan, column: int) -> tuple[Any, Contribution]:
        snapshot = self._parameters.get(self.peer, whole=self.peer.params.version < 0, ahead=0.0)
        if self.peer.params.version != snapshot.version:
            self.peer.params = SentParams(snapshot.version)
            for frame in snapshot.frames:
                self.sent[type(frame.message).__name__] += 1
                self.worker.load(travelled(frame.message), bytearray(b"".join(frame.pieces)))
        work, body = self._work(step, column, self._parameters.rates(step.steps))
        done = self.worker.compute(travelled(work), body)
        (answer,) = done.answers
        if answer.failure or answer.dropped:
            raise AssertionError(answer)
        ((vector, norm),) = reader.read(
            bytearray(b"".join(done.pieces)), [answer.codec], [answer.body_bytes or reader.vector_bytes], 1
        )
        return answer, Contribution(vector, frozenset(answer.absent), answer.loss_sum, norm)

    def _work(self, step: StepPlan, column: int, rates: StepRates) -> tuple[Work, bytearray]:
        source = self._prepared.source
        assert isinstance(source, MapSource)
        batches, pieces, at = [], [], 0
        for epoch, index in step.keys_of(Span(column, column + 1)):
            packed = pack_batch(len(source.indices(epoch, index)), source.read(epoch, index))
            batches.append(Batch(index, packed.samples, at, packed.item))
            pieces += packed.pieces
            at += packed.body_bytes
        place = (step.epoch, column, column + 1, step.count, step.samples)
        loan = Loan(1, *place, batches, step=step.index)
        return Work(self.peer.params.version, [loan], rates=rates), bytearray(b"".join(pieces))


def travelled(message: Any) -> Any:
    """A message after its journey as bytes."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message)


def train_rounds(job: Job, settings: Settings, *, nodes: int, seed: int) -> Trained:
    """Train with this many nodes; the seed decides who computes what, and what is lost."""
    chance = random.Random(seed)
    prepared = prepare(job, settings)
    learner, rounds = prepared.learner, prepared.rounds
    assert rounds is not None
    parameters = RoundParameters(learner, rounds, settings.directions.down)
    reader = build_reader(learner, settings)
    plan = build_plan(prepared, settings)
    pool: dict[int, RoundsNode] = {}
    trained = Trained(learner.flat.module, "", learner)
    while (step := plan.next_step()) is not None:
        columns = list(range(step.count))
        columns += [k for k in columns if chance.random() < COPY]
        chance.shuffle(columns)
        taken: set[int] = set()
        shares = []
        while columns:
            column, number = columns.pop(0), chance.randrange(nodes)
            if number not in pool or chance.random() < RENEW:
                pool[number] = RoundsNode(job, prepared, parameters)
            if chance.random() < RETURN:
                pool[number].return_()
            _, contribution = pool[number].compute(reader, step, column)
            if chance.random() < LOSE:
                trained.answers["lost"] += 1
                columns.append(column)
            elif column in taken:
                trained.answers["late"] += 1
            else:
                trained.answers["taken"] += 1
                taken.add(column)
                shares.append((column, column + 1, f"node-{number}", column))
                prepared.sums.add(Lent(column, step, Span(column, column + 1)), contribution, 0)
        (loss,) = learner.apply([prepared.sums.total(Complete(step, shares))])
        trained.losses.append(loss / step.samples)
    for node in pool.values():
        trained.answers.update(node.sent)
    trained.sha256 = learner.weights_sha256()
    return trained


def same_for_any_pool(job: Job, settings: Settings) -> Trained:
    """Train with every number of nodes; the bits must be the same."""
    runs = [train_rounds(job, settings, nodes=n, seed=1000 * settings.seed + n) for n in NODE_COUNTS]
    hashes = {n: run.sha256 for n, run in zip(NODE_COUNTS, runs, strict=True)}
    if len(set(hashes.values())) != 1:
        raise AssertionError(f"the bits depend on the number of nodes: {hashes}")
    moved = differences(runs[0].module, initial(job, settings))
    if max(moved.values()) < 1e-3:
        raise AssertionError("nothing was trained, so nothing is shown")
    return runs[-1]


def check_rounds(job: Job, settings: Settings, *, within: float = 0.0) -> Trained:
    """Same bits for every number of nodes, and those of the plain program, or nearly: `within` that."""
    first = same_for_any_pool(job, settings)
    found = differences(first.module, train_rounds_plainly(job, settings))
    wrong = {name: value for name, value in found.items() if value > within}
    if wrong:
        raise AssertionError(f"not the model of the plain program: {wrong}")
    return first
