"""Statistics that average all batches: a mean of every pass once, in whatever order and however late."""

from __future__ import annotations

import torch
from torch import nn

from tests.learn.jobs import FEATURES, make, settings
from tests.learn.pool import CPU, welcome_of
from tests.learn.summing import whole_step
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.step.sums import Contribution
from w5xde.learn.train.trainer import Task
from w5xde.tree import Span


def normalized() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(FEATURES, momentum=None), nn.Linear(FEATURES, 3))


def test_late_updates_of_async_mode_count_like_all_others() -> None:
    """All are computed on the first version, and applied one after another."""
    job = make(normalized)
    prepared = prepare(job, settings(mode="async"))
    learner = prepared.learner
    trainer = prepare_node(job, welcome_of(prepared), CPU).trainer
    trainer.load(bytearray(learner.snapshot(whole=True)), whole=True)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, FEATURES, generator=generator) * (1 + i) + i for i in range(6)]
    for index, batch in enumerate(batches):
        labels = torch.zeros(8, dtype=torch.int64)
        given = trainer.compute(Task(0, Span(0, 1), 1, 8, [(index, 8, (batch, labels))]))
        body = bytearray(given.vector.raw.numpy())
        vector = learner.vectors.vectors(body, 1)[0]
        learner.apply(whole_step(prepared.sums, index, Contribution(vector, frozenset(), 0.0), index))
    norm = learner.flat.module.get_submodule("0")
    means, variances = [b.mean(0) for b in batches], [b.var(0) for b in batches]
    assert int(norm.get_buffer("num_batches_tracked")) == len(batches)
    torch.testing.assert_close(norm.get_buffer("running_mean"), torch.stack(means).mean(0))
    torch.testing.assert_close(norm.get_buffer("running_var"), torch.stack(variances).mean(0))
