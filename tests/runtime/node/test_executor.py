"""The executor of a node: what becomes of an answer when the connection is no longer what it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from tests.system.jobs import data, job
from w5xde.callbacks.status import NodeReport
from w5xde.config import Settings
from w5xde.learn.data.payload import pack_batch
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.model.layout import Vector
from w5xde.messages import Batch, Loan, Params, Rules, Welcome, Work
from w5xde.protocol.session import CLOSED, NODE, WORKING
from w5xde.runtime.net.connection import Connection, Owner
from w5xde.runtime.node.executor import WorkExecutor
from w5xde.runtime.telemetry.callback_runner import CallbackRunner

SAMPLES = 8


def left(executor: WorkExecutor, connection: Connection) -> None:
    """The node has said its last word."""
    connection.session.state = CLOSED


def lost(executor: WorkExecutor, connection: Connection) -> None:
    executor.disconnect()


def nothing(executor: WorkExecutor, connection: Connection) -> None:
    pass


def work() -> tuple[Work, bytearray]:
    packed = pack_batch(SAMPLES, list(data()[:SAMPLES]))
    loan = Loan(7, 0, 0, 1, 1, SAMPLES, [Batch(0, SAMPLES, 0, packed.item)])
    return Work(0, [loan]), bytearray(b"".join(packed.pieces))


@pytest.mark.parametrize("meanwhile", [nothing, lost, left])
def test_the_vector_of_an_answer_is_free_again_whether_it_is_sent_or_not(
    meanwhile: Callable[[WorkExecutor, Connection], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each broken connection would take a slot of the memory that is shared with the coordinator."""
    learner = prepare(job, Settings()).learner
    rules = Rules("sync", 0, "fp32", 1, "stream")
    welcome = Welcome("run", 1, "node", learner.flat.blueprint.layout, rules)
    parts = prepare_node(job, welcome, torch.device("cpu"))
    returned: list[Vector] = []
    monkeypatch.setattr(parts.trainer, "recycle", returned.append)
    failures: list[BaseException] = []

    async def story() -> None:
        finished = asyncio.Event()
        executor = WorkExecutor(
            NodeReport("node"),
            CallbackRunner([], failures.append),  # type: ignore[arg-type]
            failures.append,
            finished.set,
            lambda lease: False,
        )
        owner = Owner(
            opened=lambda connection: None,
            heard=lambda connection, message, body: None,
            lost=lambda connection, reason: None,
            alive=lambda: None,
        )
        connection = Connection(NODE, owner)
        connection.session.state = WORKING
        executor.begin(parts, None, connection)
        state = learner.flat.snapshot(whole=True)
        executor.execute(Params(0, whole=True), state)
        await asyncio.wait_for(finished.wait(), 30)
        finished.clear()
        executor.execute(*work())
        # The answer comes by way of the loop, and so after this.
        meanwhile(executor, connection)
        await asyncio.wait_for(finished.wait(), 30)
        executor.actor.stop()

    asyncio.run(story())
    assert not failures
    assert len(returned) == 1
