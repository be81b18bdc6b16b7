"""A hostile coordinator that asks for measures: a node refuses what makes no sense, and survives the rest."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import welcome_of
from w5xde.errors import RemoteProtocolError
from w5xde.learn.data.payload import Packer
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.node_setup import NodeParts, prepare_node
from w5xde.message_types import StepRates, Value
from w5xde.messages import Batch, Loan, Work
from w5xde.runtime.node.limits import NodeLimits
from w5xde.runtime.node.worker import NodeWorker

CPU = torch.device("cpu")
PLAIN = make(mlp(), optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
JOB = replace(PLAIN, validation=PLAIN.data, measure=PLAIN.loss)


def node(mode: str = "sync", data: str = "stream") -> NodeParts:
    return prepare_node(JOB, welcome_of(prepare(JOB, settings(mode=mode, data=data))), CPU)


def loan(*, batches: int = 1, stop: int = 1, apart: bool = False, validates: bool = True) -> Loan:
    given = [Batch(i, 4, 0, Value(None)) for i in range(batches)]
    return Loan(1, 0, 0, stop, 4, 16, given, apart, 0, validates)


NONSENSE: dict[str, Work] = {
    "rates": Work(0, [loan()], rates=StepRates(0, [[0.1]])),
    "a stretch": Work(0, [loan(apart=True)]),
    "a step besides": Work(0, [loan(), loan(validates=False)]),
    "fewer batches than it names": Work(0, [loan(stop=2)]),
    "no batches": Work(0, [loan(batches=0, stop=0)]),
}


@pytest.mark.parametrize("mode", ["sync", "rounds"])
@pytest.mark.parametrize("kind", NONSENSE)
def test_a_validation_that_makes_no_sense_is_refused(kind: str, mode: str) -> None:
    parts = node(mode)
    limits = NodeLimits(parts.trainer.blueprint, 2**30, 0, parts.columns)
    limits.take(Work(0, [loan()]), bytearray())
    with pytest.raises(RemoteProtocolError) as caught:
        limits.take(NONSENSE[kind], bytearray())
    assert caught.value.code == "W5-120"


def answers(parts: NodeParts, value: torch.Tensor) -> str:
    packer = Packer()
    batch = Batch(0, 4, 0, packer.pack(value))
    asked = Work(0, [Loan(1, 0, 0, 1, 4, 16, [batch], False, 0, True)])
    worker = NodeWorker(parts, lambda: 0.0, lambda lease: False)
    (answer,) = worker.compute(asked, bytearray(b"".join(packer.pieces))).answers
    assert answer.metrics == []
    return answer.failure


def test_samples_that_the_nodes_own_validation_set_does_not_have_are_refused() -> None:
    parts = node(data="local")
    assert "does not name 4 of our samples" in answers(parts, torch.tensor([0, 1, 2, 10**9]))
    assert "does not name 4 of our samples" in answers(parts, torch.tensor([0, -1, 2, 3]))


def test_a_batch_that_measure_cannot_use_is_a_failure_and_no_more() -> None:
    assert answers(node(), torch.zeros(3))


def test_metrics_that_the_job_does_not_measure_are_a_failure() -> None:
    parts = node()
    rules = msgspec.structs.replace(parts.welcome.rules, metrics=["secret"])
    other = prepare_node(JOB, msgspec.structs.replace(parts.welcome, rules=rules), CPU)
    value = next(iter(PLAIN.data()))  # a sample, not a batch: whatever it measures, it is not that
    assert answers(other, torch.as_tensor(value[0]))
