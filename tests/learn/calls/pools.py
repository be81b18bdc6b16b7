"""A small pool in one process: its setup, its nodes, and calls, without sockets and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from w5xde.config import Settings
from w5xde.learn.data.parts import Part
from w5xde.learn.job.node_setup import NodeParts, prepare_node
from w5xde.learn.job.pool_job import PoolJob
from w5xde.learn.job.pool_setup import PoolSetup, prepare_pool
from w5xde.message_types import Call
from w5xde.messages import Welcome

CPU = torch.device("cpu")
ROWS = 8
BATCH = torch.linspace(-1, 1, ROWS * 4).view(ROWS, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"g": nn.Sequential(nn.Linear(4, 4)), "d": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))}
    )


def d_loss(net: Any, rows: Tensor) -> Tensor:
    return mse_loss(net["d"](rows), torch.ones(len(rows), 1))


def g_loss(net: Any, rows: Tensor) -> Tensor:
    return net["d"](net["g"](rows)).square().mean()


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"d": d_loss, "g": g_loss}


def prepared(
    build: Callable[[], nn.Module] = model,
    losses: dict[str, Callable[[Any, Any], Tensor]] = LOSSES,
    batch: Any = BATCH,
    **settings: Any,
) -> PoolSetup:
    """A pool whose first call is of its first loss."""
    net = build()
    trained = {name for name, each in net.named_parameters() if each.requires_grad}
    job = PoolJob(model=build, losses=losses)
    return prepare_pool(job, net, trained, Settings(**settings), next(iter(losses)), Part(ROWS, batch))


def welcome_of(setup: PoolSetup) -> Welcome:
    """The greeting of a node, after its journey as bytes."""
    prepared = setup.prepared
    canary = prepared.canary.message if prepared.canary is not None else None
    layout = prepared.learner.flat.blueprint.layout
    greeting = Welcome("pool", 1, "node", layout, prepared.rules, canary=canary)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(greeting), type=Welcome)


def node_of(setup: PoolSetup, job: PoolJob | None = None) -> NodeParts:
    """A node that has the pool's first version, and passed its canary if there is one."""
    parts = prepare_node(job or PoolJob(model=model, losses=LOSSES), welcome_of(setup), CPU)
    expected = setup.prepared.canary
    if expected is not None:
        parts.prove(welcome_of(setup), bytearray(expected.body))
        assert parts.proof is not None
        assert expected.find_mismatch(bytearray(parts.proof.body)) == ""
    parts.trainer.load(bytearray(setup.learner.snapshot(whole=True)), whole=True)
    return parts


def call(loss: str, frozen: bytes = b"", evaluating: bytes = b"") -> Call:
    return Call(loss, frozen, evaluating)
