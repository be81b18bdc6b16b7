"""A hostile coordinator in rounds mode: a node refuses what makes no sense before it computes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import welcome_of
from w5xde.errors import RemoteProtocolError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.node_setup import NodeParts, prepare_node
from w5xde.message_types import StepRates, Value
from w5xde.messages import Batch, Difference, Loan, Work
from w5xde.runtime.node.limits import NodeLimits
from w5xde.runtime.node.worker import NodeWorker

CPU = torch.device("cpu")
JOB = make(mlp(), optimizer=lambda params: torch.optim.Adam(params, lr=0.01))


def node() -> NodeParts:
    return prepare_node(JOB, welcome_of(prepare(JOB, settings(mode="rounds"))), CPU)


def work(
    rates: StepRates | None, *, batches: int = 2, start: int = 0, stop: int = 1, apart: bool = False
) -> Work:
    given = [Batch(i, 4, 0, Value(None)) for i in range(batches)]
    return Work(0, [Loan(1, 0, start, stop, 2, 16, given, apart)], rates=rates)


RATES = [[0.1], [0.1]]
NONSENSE: dict[str, Work] = {
    "no rates": work(None),
    "rates for another number of steps": work(StepRates(0, [[0.1]])),
    "rates for another number of groups": work(StepRates(0, [[0.1, 0.2], [0.1, 0.2]])),
    "a rate that is no number": work(StepRates(0, [[0.1], [float("nan")]])),
    "an infinite movement": work(StepRates(0, RATES, sums_before=[float("inf")])),
    "momenta for fewer steps": work(StepRates(0, RATES, [[0.9]])),
    "two columns at once": work(StepRates(0, RATES), stop=2),
    "a column that the round does not have": work(StepRates(0, RATES), start=2, stop=3),
    "a stretch": work(StepRates(0, RATES), apart=True),
    "no batches": work(StepRates(0, []), batches=0),
    "more steps than any round has": work(StepRates(0, [[0.1]] * 5000), batches=5000),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_work_that_makes_no_sense_is_refused(kind: str) -> None:
    parts = node()
    limits = NodeLimits(parts.trainer.blueprint, 2**30, 0, parts.columns)
    limits.take(work(StepRates(0, RATES)), bytearray())
    with pytest.raises(RemoteProtocolError) as caught:
        limits.take(NONSENSE[kind], bytearray())
    assert caught.value.code == "W5-120"


def test_rounds_are_refused_in_other_modes() -> None:
    parts = prepare_node(JOB, welcome_of(prepare(JOB, settings())), CPU)
    limits = NodeLimits(parts.trainer.blueprint, 2**30)
    for message in (work(StepRates(0, RATES)), Difference(0, 2, "none", bytes(16))):
        with pytest.raises(RemoteProtocolError):
            limits.take(message, bytearray())


def too_long(parts: NodeParts) -> tuple[Difference, int]:
    assert parts.columns is not None
    return Difference(0, 2, "none", bytes(16)), parts.columns.vectors.moving_bytes + 1


def of_no_codec(parts: NodeParts) -> tuple[Difference, int]:
    return Difference(0, 2, "q5", bytes(16)), 100


def of_a_bomb(parts: NodeParts) -> tuple[Difference, int]:
    return Difference(0, 2, "q4 | zstd:1", bytes(16)), 2**40


@pytest.mark.parametrize("made", [too_long, of_no_codec, of_a_bomb])
def test_a_difference_of_an_impossible_size_is_refused_before_it_is_read(
    made: Callable[[NodeParts], tuple[Difference, int]],
) -> None:
    parts = node()
    limits = NodeLimits(parts.trainer.blueprint, 2**30, 0, parts.columns)
    message, count = made(parts)
    with pytest.raises(RemoteProtocolError) as caught:
        limits.check_size(message, count)
    assert caught.value.code == "W5-122"


@pytest.mark.parametrize(
    "message",
    [
        Difference(7, 9, "none", bytes(16)),
        Difference(0, 0, "none", bytes(16)),
        Difference(2**61, 1, "none", bytes(16)),
        Difference(0, 2, "none", bytes(16)),
        Difference(0, 2, "none", bytes(16), adds=False),
    ],
)
def test_a_difference_that_does_not_fit_makes_the_node_ask_anew(message: Difference) -> None:
    parts = node()
    assert parts.columns is not None
    worker = NodeWorker(parts, lambda: 0.0, lambda lease: False)
    parts.columns.loaded(0)
    worker.load(message, bytearray(parts.columns.vectors.moving_bytes))
    done = worker.compute(work(StepRates(0, RATES)), bytearray())
    assert done.differs
    assert [answer.dropped for answer in done.answers] == [True]


@pytest.mark.parametrize("spec", ["", "other", "mean:", "mean:a,b,c,d,e", "factored:x", "none:1"])
def test_an_unknown_hand_over_is_refused(spec: str) -> None:
    welcome = welcome_of(prepare(JOB, settings(mode="rounds")))
    rules = msgspec.structs.replace(welcome.rules, hand_over=spec)
    with pytest.raises(RemoteProtocolError) as caught:
        prepare_node(JOB, msgspec.structs.replace(welcome, rules=rules), CPU)
    assert caught.value.code == "W5-120"
