"""A pool in one process: the real learner, trainers and plan, with chance in place of the network.

Spans of each step go to nodes in an order and a shape that a seed decides; some are computed twice, some
answers are lost. Everything that travels is turned into bytes and back. Knows no sockets and no clock.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import torch
from torch import nn

from tests.learn.reference import differences, initial, train_plainly
from tests.learn.summing import Complete, Lent
from w5xde import Job
from w5xde.config import Settings
from w5xde.control.steps.plan import Plan, StepPlan
from w5xde.learn.data.payload import Packer, unpack
from w5xde.learn.data.sources import MapSource
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.job.node_setup import NodeParts, prepare_node
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.sums import Contribution
from w5xde.learn.train.trainer import Outcome, Task
from w5xde.messages import Batch, Welcome
from w5xde.runtime.coordinator.setup import build_plan
from w5xde.tree import PairwiseTree, Span, halves

NODE_COUNTS = (1, 2, 3, 7)
# How often chance splits a span, computes one twice, or loses an answer.
SPLIT, COPY, LOSE = 0.6, 0.3, 0.15
CPU = torch.device("cpu")


@dataclass
class Trained:
    """What came out of a pool."""

    module: nn.Module
    sha256: str
    learner: Learner
    losses: list[float] = field(default_factory=list)
    # How many answers each node gave, and what became of all of them.
    answers: Counter[str] = field(default_factory=Counter)


def welcome_of(prepared: Prepared) -> Welcome:
    """The greeting a node gets, after its journey as bytes."""
    layout = prepared.learner.flat.blueprint.layout
    canary = prepared.canary.message if prepared.canary is not None else None
    greeting = Welcome("run", 0, "node", layout, prepared.rules, canary=canary)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(greeting), type=Welcome)


def wrong_with(parts: NodeParts, prepared: Prepared) -> str:
    """Let a node compute the canary; what the coordinator finds wrong with it."""
    if prepared.canary is None:
        raise AssertionError(f"there is no canary: {prepared.canary_trouble}")
    parts.prove(welcome_of(prepared), bytearray(prepared.canary.body))
    body = parts.proof.body if parts.proof is not None else b""
    if len(body) != prepared.canary.answer_bytes:
        raise AssertionError(f"{len(body)} bytes, and not {prepared.canary.answer_bytes}")
    return prepared.canary.find_mismatch(bytearray(body))


class Node:
    """One machine: its own model, and the version it holds. Before anything else it proves itself."""

    def __init__(self, job: Job, prepared: Prepared) -> None:
        welcome = welcome_of(prepared)
        self.parts: NodeParts = prepare_node(job, welcome, CPU)
        wrong = wrong_with(self.parts, prepared)
        if wrong:
            raise AssertionError(f"an honest node was refused: {wrong}")
        self._version: int | None = None

    def compute(self, learner: Learner, source: MapSource, step: StepPlan, span: Span) -> Contribution:
        """One lease, from the bytes that go down to the bytes that come up."""
        if self._version != learner.version:
            whole = self._version is None
            self.parts.trainer.load(bytearray(learner.snapshot(whole=whole)), whole=whole)
            self._version = learner.version
        batches, body = self._sent(source, step, span)
        outcome = self.parts.trainer.compute(self._task(step, span, batches, body))
        return self._answered(learner, outcome)

    def _sent(self, source: MapSource, step: StepPlan, span: Span) -> tuple[list[Batch], bytearray]:
        packer, batches = Packer(), []
        is_local = self.parts.source is not None
        for position in range(span.start, span.stop):
            index, at = step.first + position, packer.body_bytes
            part = Packer(source.recipe.types)
            item = part.pack(
                source.indices(step.epoch, index) if is_local else source.read(step.epoch, index)
            )
            packer.pieces += part.pieces
            packer.body_bytes += part.body_bytes
            batch = Batch(index, step.sizes[position], at, item)
            batches.append(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch))
        return batches, bytearray(b"".join(packer.pieces))

    def _task(self, step: StepPlan, span: Span, batches: list[Batch], body: bytearray) -> Task:
        received = []
        for batch in batches:
            value = unpack(batch.item, body, batch.at, self.parts.trainer.types)
            if self.parts.source is not None:
                value = self.parts.source.read_indices(value, step.epoch, batch.index)
            received.append((batch.index, batch.samples, value))
        return Task(step.epoch, span, step.count, step.samples, received, step=step.index)

    def _answered(self, learner: Learner, outcome: Outcome) -> Contribution:
        body = bytearray(outcome.vector.raw.numpy())
        self.parts.trainer.recycle(outcome.vector)
        return Contribution(
            learner.flat.blueprint.vectors(body, 1)[0],
            frozenset(outcome.absent),
            outcome.loss_sum,
            weight=outcome.weight,
        )


def train_in_pool(job: Job, settings: Settings, *, nodes: int, seed: int) -> Trained:
    """Train with this many nodes; the seed decides who computes what, in which order, and what is lost."""
    chance = random.Random(seed)
    prepared = prepare(job, settings)
    learner, source, settings = prepared.learner, prepared.source, prepared.settings
    plan = build_plan(prepared, settings)
    discover(plan, source, settings.epochs or 1)
    pool: dict[int, Node] = {}
    trained = Trained(learner.flat.module, "", learner)
    while (step := plan.next_step()) is not None:
        leases = _leases(chance, step.count)
        taken: PairwiseTree[None] = PairwiseTree(step.count, lambda left, right: None)
        while leases:
            span = leases.pop(0)
            number = chance.randrange(nodes)
            # A node joins when it is first asked, which may be in the middle of the run.
            node = pool[number] if number in pool else pool.setdefault(number, Node(job, prepared))
            contribution = node.compute(learner, source, step, span)
            if chance.random() < LOSE:
                trained.answers["lost"] += 1
                leases.insert(chance.randint(0, len(leases)), span)
            elif taken.covers(span):
                trained.answers["late"] += 1
            else:
                trained.answers["taken"] += 1
                taken.put(span, None)
                prepared.sums.add(Lent(0, step, span), contribution, 0)
        complete = Complete(step, [(0, step.count, "node", 0)])
        trained.losses.append(learner.apply([prepared.sums.total(complete)])[0] / step.samples)
    trained.sha256 = learner.weights_sha256()
    return trained


def discover(plan: Plan, source: MapSource, epochs: int) -> None:
    """Tell the plan of batches that it cannot know of: those of epochs that may differ in their number."""
    if source.epoch_samples is None:
        for epoch in range(epochs):
            drawn = source.epoch(epoch)
            for batch in range(drawn.batches):
                plan.discovered(epoch, len(drawn.places(batch)))
            plan.discovered(epoch, 0)


def _leases(chance: random.Random, count: int) -> list[Span]:
    """Aligned spans that cover the step, some of them copies of others or of parts of them, in any order."""
    cover: list[Span] = []
    copies: list[Span] = []

    def split(span: Span) -> None:
        if span.count > 1 and chance.random() < SPLIT:
            if chance.random() < COPY:
                copies.append(span)
            for half in halves(span):
                split(half)
        else:
            cover.append(span)
            if chance.random() < COPY:
                copies.append(halves(span)[chance.randrange(2)] if span.count > 1 else span)

    split(Span(0, count))
    leases = cover + copies
    chance.shuffle(leases)
    return leases


def check_equivalence(job: Job, settings: Settings, *, within: float = 1e-6, **looser: float) -> Trained:
    """Same bits for every number of nodes, and the plain loop's model within a relative difference.

    `looser` names tensors that may differ more (dots written as double underscores), each with its bound.
    """
    runs = [train_in_pool(job, settings, nodes=n, seed=1000 * settings.seed + n) for n in NODE_COUNTS]
    hashes = {n: run.sha256 for n, run in zip(NODE_COUNTS, runs, strict=True)}
    if len(set(hashes.values())) != 1:
        raise AssertionError(f"the bits depend on the number of nodes: {hashes}")
    first = runs[0]
    moved = differences(first.module, initial(job, settings))
    if max(moved.values()) < 1e-3:
        raise AssertionError("nothing was trained, so nothing is shown")
    bounds = {name.replace("__", "."): bound for name, bound in looser.items()}
    found = differences(first.module, train_plainly(job, settings))
    wrong = {name: value for name, value in found.items() if not value <= bounds.get(name, within)}
    if wrong:
        raise AssertionError(f"not the plain loop's model: {wrong}")
    return first
