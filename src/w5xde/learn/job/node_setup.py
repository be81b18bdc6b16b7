"""The node's side of a job: its own copy of the model and the data, checked against the coordinator's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from w5xde.compression import AUTO, AUTO_LOSSY
from w5xde.errors import JoinError, RemoteProtocolError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.data.sources import MapSource
from w5xde.learn.job.build import build_model, build_source
from w5xde.learn.job.job import Job
from w5xde.learn.model import layout as layouts
from w5xde.learn.model.device import core_count, use_threads
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.model.seeding import as_before
from w5xde.learn.train.trainer import Trainer
from w5xde.learn.trust.canary import CanaryAnswer, compute_canary
from w5xde.messages import MOVING, Rules, Welcome

# More threads than cores are only slow; this many more are a mistake, or an attack. Any machine bears a few.
THREADS_PER_CORE_MAX, THREADS_MAX = 4, 64


@dataclass(slots=True)
class NodeParts:
    """A node's copy of the model, and of the data if it reads its own."""

    trainer: Trainer
    source: MapSource | None
    layout_digest: str
    welcome: Welcome
    make_trainer: Callable[[], Trainer]
    # What the canary of this connection gave, if there is one.
    proof: CanaryAnswer | None = None

    def prove(self, welcome: Welcome, body: bytearray | memoryview) -> None:
        """Compute the canary of a welcome, on a model that is thrown away.

        The one that we train may keep what it computed first (an encoding, a mask) for good.
        """
        self.proof = None
        if welcome.canary is not None:
            with as_before():
                trainer = self.make_trainer()
            self.proof = compute_canary(trainer, welcome.canary, body)

    def fits(self, welcome: Welcome) -> bool:
        """Whether these parts also serve another connection."""
        return self.welcome.layout == welcome.layout and self.welcome.rules == welcome.rules


def prepare_node(job: Job, welcome: Welcome, device: torch.device) -> NodeParts:
    """Build the node's model and data and check them against the coordinator's."""
    rules = welcome.rules
    _require_sane(rules)
    use_threads(rules.threads)
    module = build_model(job, rules.seed)
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
    source = _own_source(job, rules) if rules.data == "local" else None

    def trainer_of(module: torch.nn.Module) -> Trainer:
        return Trainer(job, FlatModel(module, layout, device), rules, device)

    return NodeParts(
        trainer_of(module), source, digest, welcome, lambda: trainer_of(build_model(job, rules.seed))
    )


def _require_sane(rules: Rules) -> None:
    """Refuse what no honest coordinator asks for, before anything is built for it."""
    threads_max = max(THREADS_MAX, THREADS_PER_CORE_MAX * core_count())
    if rules.threads > threads_max:
        raise JoinError(
            f"the run computes with {rules.threads} threads in each node, and this machine has"
            f" {core_count()} cores",
            code="W5-213",
            fix="start the run with fewer --threads, or join with a larger machine",
        )
    if rules.compress not in (AUTO, AUTO_LOSSY):
        try:
            parse(rules.compress)
        except ValueError as error:
            raise RemoteProtocolError(
                f"updates are to be encoded as {rules.compress!r}: {error}", code="W5-122"
            ) from None


def _own_source(job: Job, rules: Rules) -> MapSource:
    source = build_source(job, rules.seed, 1, shuffle=False)
    if not isinstance(source, MapSource) or source.samples != rules.data_samples:
        raise JoinError(
            f"your data set has {source.samples} samples, the run's has {rules.data_samples}",
            code="W5-209",
            fix="copy the coordinator's data here, or let it send batches with --data stream",
        )
    if source.fingerprint() != rules.data_digest:
        raise JoinError(
            "your data set has as many samples as the run's, but other ones",
            code="W5-209",
            fix="copy the coordinator's data here, or let it send batches with --data stream",
        )
    return source
