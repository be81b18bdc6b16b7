"""Sets a job up on a node: builds its model and data, and checks them against the coordinator's.

Knows no sockets: it gets the welcome, and the caller sends the answer.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import Module

from w5xde.compression import AUTO, AUTO_LOSSY
from w5xde.errors import JoinError, RemoteProtocolError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.data.recipe import Recipe
from w5xde.learn.data.sources import MapSource, Source
from w5xde.learn.job.build import build_columns, build_model, build_optimizer, build_source
from w5xde.learn.job.job import Job
from w5xde.learn.job.pool_job import PoolJob
from w5xde.learn.model import layout as layouts
from w5xde.learn.model.device import core_count, use_threads
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.model.route import VectorRoute
from w5xde.learn.model.seeding import as_before
from w5xde.learn.model.state_memory import StateView
from w5xde.learn.rounds.columns import Columns
from w5xde.learn.step.local_steps import LocalSteps
from w5xde.learn.train.flags import adopt_roles
from w5xde.learn.train.trainer import Trainer
from w5xde.learn.train.validation_set import open_validation
from w5xde.learn.train.vectors import Slots
from w5xde.learn.trust.canary import CanaryAnswer, compute_canary
from w5xde.messages import MOVING, Rules, Welcome
from w5xde.specs.planned_run import PlannedRun

# More threads than cores are slow; this many more are a mistake or an attack. Any machine can run a few.
THREADS_PER_CORE_MAX, THREADS_MAX = 4, 64


class CoordinatorMemory(Slots, Protocol):
    """Memory that a local node shares with its coordinator."""

    @property
    def state(self) -> StateView | None:
        """The state of the coordinator's model; None: parameters are sent."""


@dataclass(slots=True)
class NodeParts:
    """A node's model, and its data if it reads its own."""

    trainer: Trainer
    source: MapSource | None
    # The validation set, if it reads its own data.
    validation: MapSource | None
    layout_digest: str
    welcome: Welcome
    make_trainer: Callable[[], Trainer]
    make_local_steps: Callable[[], LocalSteps]
    # In rounds mode: computes columns, and keeps the replica.
    columns: Columns | None = None
    # The answer to the canary of this connection, if it has one.
    proof: CanaryAnswer | None = None
    # Made when they are first needed: few nodes make steps of their own.
    _local_steps: LocalSteps | None = None

    @property
    def local_steps(self) -> LocalSteps:
        """The node's own optimizer."""
        if self._local_steps is None:
            self._local_steps = self.make_local_steps()
        return self._local_steps

    def prove(self, welcome: Welcome, body: bytearray | memoryview) -> None:
        """Compute the canary of a welcome on a new model.

        The model in training could keep for good what it computes first (an encoding, a mask).
        """
        self.proof = None
        if welcome.canary is not None:
            with as_before():
                trainer = self.make_trainer()
            self.proof = compute_canary(trainer, welcome.canary, body)
            is_large = VectorRoute(trainer.blueprint.moving_bytes).is_large
            del trainer
            if is_large:
                # Its parts refer to each other: without this its memory would stay for a long time.
                gc.collect()

    def fits(self, welcome: Welcome) -> bool:
        """Whether these parts fit the welcome of another connection."""
        return self.welcome.layout == welcome.layout and self.welcome.rules == welcome.rules


def prepare_node(
    job: Job, welcome: Welcome, device: torch.device, share: CoordinatorMemory | None = None
) -> NodeParts:
    """Build model and data; JoinError if they differ from those of the coordinator.

    `share` is memory that this node shares with the coordinator.
    """
    rules = welcome.rules
    _require_sane(rules)
    if bool(rules.weight_unit) != (job.weight is not None):
        one, other = ("the run's", "yours") if rules.weight_unit else ("yours", "the run's")
        raise JoinError(
            f"one job weighs its batches (Job(weight=…)), {one}, and {other} does not",
            code="W5-256",
            fix="use the coordinator's job file",
        )
    use_threads(rules.threads)
    _require_losses(job, rules)

    def build() -> Module:
        made = build_model(job, rules.seed)
        if rules.losses:
            # Code before the loop may freeze parameters, and a node runs none of it.
            adopt_roles(made, welcome.layout)
        return made

    module = build()
    moving = {entry.name for entry in welcome.layout.entries if entry.role == MOVING}
    layout = layouts.describe(module, moving)
    digest = layout.digest()
    if digest != welcome.layout.digest():
        found = layouts.differences(welcome.layout, layout)
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise JoinError(
            f"your model differs from the run's: {'; '.join(found[:3])}{more}",
            code="W5-201",
            fix="use the coordinator's job file",
        )
    if rules.metrics and job.measure is None:
        raise JoinError(
            "the run measures a validation set, and your job has no measure()",
            code="W5-201",
            fix="use the coordinator's job file",
        )
    source = _own_source(job, rules) if rules.data == "local" else None
    validation = _own_validation(job, source.recipe, rules) if source is not None else None

    def make_trainer() -> Trainer:
        return Trainer(job, FlatModel(build(), layout, device), rules, device)

    flat = FlatModel(module, layout, device, view=share.state if share is not None else None)
    trainer = Trainer(job, flat, rules, device, share)
    run = PlannedRun(steps=rules.steps)

    def make_local_steps() -> LocalSteps:
        return LocalSteps(trainer, lambda: build_optimizer(job, module, run))

    try:
        columns = build_columns(job, trainer, rules, run) if rules.mode == "rounds" else None
    except ValueError as error:
        raise RemoteProtocolError(f"rounds that this node does not know: {error}", code="W5-120") from None
    return NodeParts(trainer, source, validation, digest, welcome, make_trainer, make_local_steps, columns)


def _require_losses(job: Job, rules: Rules) -> None:
    """Refuse a pool if this job has not all its losses, and a run if this job is a pool's."""
    own = sorted(job.losses) if isinstance(job, PoolJob) else []
    missing = sorted(set(rules.losses) - set(own))
    if missing or bool(own) != bool(rules.losses):
        theirs = f"a pool with the losses {', '.join(rules.losses)}" if rules.losses else "a run"
        ours = f"a pool with the losses {', '.join(own)}" if own else "a job"
        raise JoinError(
            f"the ticket is for {theirs}, and your file has {ours}",
            code="W5-275",
            fix="use the coordinator's file",
        )


def _require_sane(rules: Rules) -> None:
    """Refuse rules that no honest coordinator sends, before anything is built for them."""
    threads_max = max(THREADS_MAX, THREADS_PER_CORE_MAX * core_count())
    if rules.threads > threads_max:
        raise JoinError(
            f"the run computes with {rules.threads} threads in each node, and this machine has"
            f" {core_count()} cores",
            code="W5-213",
            fix="start the run with fewer --threads, or join with a larger machine",
        )
    if not 0 <= rules.weight_unit < math.inf:
        raise RemoteProtocolError(f"weights in units of {rules.weight_unit}", code="W5-120")
    if rules.compress not in (AUTO, AUTO_LOSSY):
        try:
            parse(rules.compress)
        except ValueError as error:
            raise RemoteProtocolError(
                f"updates are to be encoded as {rules.compress!r}: {error}", code="W5-122"
            ) from None


def _own_source(job: Job, rules: Rules) -> MapSource:
    source = build_source(job, rules.seed, 1, shuffle=False)
    return _require_same(source, "data set", rules.data_samples, rules.data_digest)


def _own_validation(job: Job, training: Recipe, rules: Rules) -> MapSource | None:
    """The node's own copy of the validation set, if the run measures one."""
    if not rules.metrics:
        return None
    with as_before():
        source = open_validation(job, training, rules.seed, 1)
        found = rules.validation_samples, rules.validation_digest
        return _require_same(source, "validation set", *found) if source is not None else None


def _require_same(source: Source, name: str, samples: int, digest: str) -> MapSource:
    if not isinstance(source, MapSource) or source.samples != samples:
        what = f"your {name} has {source.samples} samples, the run's has {samples}"
    elif source.fingerprint() != digest:
        what = f"your {name} has as many samples as the run's, but other ones"
    else:
        return source
    fix = "copy the coordinator's data here, or let it send batches with --data stream"
    raise JoinError(what, code="W5-209", fix=fix)
