"""Updates on their way to the core: each answer is told once, and nothing unfit is taken."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch

from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import StepPlan
from w5xde.learn.model.layout import Vector
from w5xde.learn.model.route import LARGE_BYTES_MIN
from w5xde.learn.step.incoming import DiscardedVector
from w5xde.messages import Answer, Message, Rejected, SampleList, Update
from w5xde.runtime.pipeline.peer import Peer, SentWork
from w5xde.runtime.pipeline.ports import ModelPorts, Ports
from w5xde.runtime.pipeline.updates import UNFIT, Updates
from w5xde.runtime.telemetry.meters import Meters
from w5xde.tree import Span

NOTHING = Vector(torch.zeros(0, dtype=torch.uint8), [])


class Surroundings:
    """All that updates meet: a table of peers, a reader, inline tasks, a view, and ears."""

    trained = frozenset({0, 1})
    weighs = False

    def __init__(self, vector_bytes: int = 8) -> None:
        self.vector_bytes = vector_bytes
        self.told: list[ev.Event] = []
        self.evicted: list[str] = []
        self.norms: list[float] = []
        self.counts = True
        self.connected: dict[str, Peer] = {}
        self.leases: dict[int, Lease] = {}
        ports = Ports(
            clock=lambda: 0.0,
            tasks=cast(Any, self),
            peers=cast(Any, self),
            batches=cast(Any, None),
            model=ModelPorts(cast(Any, None), cast(Any, None), cast(Any, self), cast(Any, None)),
            verifier=cast(Any, None),
        )
        self.updates = Updates(ports, cast(Any, self), Meters(), self.told.append, one_by_one=False)

    def call(self, function: Any, done: Any) -> None:
        done(function())

    def read(self, body: Any, specs: Any, lengths: Any, count: int) -> list[tuple[Vector, float]]:
        return [(NOTHING, norm) for norm in (self.norms or [1.0] * count)]

    def stream(self, spec: str, body_bytes: int) -> Any:
        return None

    def discard(self) -> Any:
        return DiscardedVector()

    def allocate(self, count: int) -> bytearray:
        return bytearray(count)

    def lease(self, number: int) -> Lease | None:
        return self.leases.get(number)

    def may_count(self, number: int, node: str) -> bool:
        return self.counts

    def get(self, name: str) -> Peer | None:
        return self.connected.get(name)

    def evict(self, peer: Peer, reason: str, *, abruptly: bool = False) -> None:
        self.evicted.append(reason)


class Line:
    """A connection, as far as updates use it."""

    link = reported_link = 0.0
    round_trip_seconds = None

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.is_reading = False

    def go_on(self) -> None:
        self.is_reading = True

    def send(self, message: Message) -> None:
        self.sent.append(message)


def peer(leases: list[int]) -> Peer:
    node = Peer(cast(Any, Line()), cast(Any, None), name="a", is_ready=True)
    node.works.append(SentWork(leases, 1, 0.0))
    return node


def receive(around: Surroundings, leases: list[int], *answers: Answer) -> Peer:
    """One update with these answers, and as many bytes as they need."""
    vectors = sum(not (answer.dropped or answer.failure) for answer in answers)
    node = peer(leases)
    around.updates.received(node, Update(0, list(answers)), bytearray(vectors * around.vector_bytes))
    return node


def test_a_lease_whose_samples_are_missing_is_dropped_and_memory_is_not_blamed() -> None:
    around = Surroundings()
    node = peer([7, 8])
    part = SampleList(bytes(8), b"\x01", bytes(16))
    node.works[0] = SentWork([7, 8], 2, 0.0, {7: [(2, part)], 8: [(2, part)]})
    answers = [Answer(7, dropped=True, missing=b"\x02"), Answer(8, dropped=True)]
    around.updates.received(node, Update(0, answers), bytearray())
    assert around.told == [ev.Dropped("a", 7), ev.Dropped("a", 8)]
    assert not around.evicted


def test_samples_beyond_the_last_bit_may_be_missing_although_others_came() -> None:
    around = Surroundings()
    node = peer([7])
    lists = [(8, SampleList(bytes(32), b"\xff", bytes(16))), (9, SampleList(bytes(36), b"\x01", bytes(16)))]
    node.works[0] = SentWork([7], 2, 0.0, {7: lists})
    around.updates.received(node, Update(0, [Answer(7, dropped=True, missing=b"\x00")]), bytearray())
    assert around.told == [ev.Dropped("a", 7)]
    assert not around.evicted


@pytest.mark.parametrize(
    ("answer", "listed"),
    [
        (Answer(7, dropped=True, missing=b"\x01"), None),
        (Answer(7, dropped=True, missing=b"\x01"), SampleList(bytes(8), b"\x03", bytes(16))),
        (Answer(7, dropped=True, missing=b"\x01"), SampleList(bytes(8), b"\x01", bytes(16))),
        (Answer(7, dropped=True, missing=b"\x03"), SampleList(bytes(8), b"\x01", bytes(16))),
        (Answer(7, dropped=True, missing=b"\x00"), SampleList(bytes(8), b"\x01", bytes(16))),
        (Answer(7, missing=b"\x01"), SampleList(bytes(8), b"", bytes(16))),
    ],
    ids=["sent whole", "all sent", "only what was sent", "also what was sent", "nothing", "and yet computed"],
)
def test_a_node_cannot_miss_what_came_with_its_lease(answer: Answer, listed: SampleList | None) -> None:
    around = Surroundings()
    node = peer([7])
    node.works[0] = SentWork([7], 1, 0.0, {7: [(2, listed)]})
    around.updates.received(node, Update(0, [answer]), bytearray(0 if answer.dropped else 8))
    assert around.evicted == [UNFIT]
    assert not around.told


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf, 1e31])
def test_a_loss_that_is_not_finite_fails(wild: float) -> None:
    around = Surroundings()
    receive(around, [7], Answer(7, loss_sum=wild))
    assert [type(event) for event in around.told] == [ev.Failed]
    assert around.updates.look_at("a", 7) is None


def test_a_gradient_that_is_not_finite_fails() -> None:
    around = Surroundings()
    around.norms = [math.inf]
    receive(around, [7], Answer(7))
    (failed,) = around.told
    assert isinstance(failed, ev.Failed)
    assert failed.norm == math.inf


@pytest.mark.parametrize(
    ("answer", "fits"), [(Answer(1), True), (Answer(1, absent=[9]), False), (Answer(2), False)]
)
def test_an_answer_must_fit_what_was_lent(answer: Answer, fits: bool) -> None:
    around = Surroundings()
    receive(around, [1], answer)
    assert around.evicted == ([] if fits else [UNFIT])
    assert len(around.told) == fits


def test_a_body_that_is_too_short_or_too_long_is_refused() -> None:
    for length in (0, 7, 9, 16):
        around = Surroundings()
        around.updates.received(peer([1]), Update(0, [Answer(1)]), bytearray(length))
        assert (around.evicted, around.told) == ([UNFIT], [])


def test_answers_of_one_update_are_one_event_and_the_others_follow() -> None:
    around = Surroundings()
    lent = [1, 2, 3, 4]
    receive(around, lent, Answer(1), Answer(2, dropped=True), Answer(3, failure="no"), Answer(4))
    answered, dropped, failed = around.told
    assert isinstance(answered, ev.Answered)
    assert list(answered.leases) == [1, 4]
    assert dropped == ev.Dropped("a", 2)
    assert failed == ev.Failed("a", 3, "no")


def test_a_rejected_update_is_forgotten() -> None:
    around = Surroundings()
    receive(around, [7], Answer(7))
    assert around.updates.look_at("a", 7) is not None
    around.updates.reject(ev.Reject("b", 7, "it was lent to a"))
    assert around.updates.look_at("a", 7) is not None
    around.updates.reject(ev.Reject("a", 7, "somebody else was sooner"))
    assert around.updates.look_at("a", 7) is None


def test_a_node_that_reconnected_hears_of_its_old_answer_only_when_it_is_ready() -> None:
    """Before that a `Rejected` is against the protocol, and our own session refuses to send it."""
    around = Surroundings()
    around.connected["a"] = node = peer({})
    sent = cast(Line, node.connection).sent
    node.is_ready = False
    around.updates.reject(ev.Reject("a", 7, "lease 7 is not outstanding", fenced=True))
    assert sent == []
    node.is_ready = True
    around.updates.reject(ev.Reject("a", 7, "lease 7 is not outstanding", fenced=True))
    assert sent == [Rejected(7, "lease 7 is not outstanding")]


def test_an_update_is_not_taken_for_a_large_one_that_is_about_to_come() -> None:
    """The memory of the large one has not been filled."""
    around = Surroundings(LARGE_BYTES_MIN)
    around.counts = False
    node = peer([7])
    assert around.updates.may_send(node, Update(0, [Answer(7)]), LARGE_BYTES_MIN)
    around.updates.received(node, Update(0, [Answer(7)]), bytearray())
    assert (around.evicted, around.told) == ([UNFIT], [])


def test_an_update_that_was_thrown_away_and_is_wanted_after_all_is_lent_again() -> None:
    around = Surroundings(LARGE_BYTES_MIN)
    around.counts = False
    node, update = peer([7]), Update(0, [Answer(7)])
    assert around.updates.may_send(node, update, LARGE_BYTES_MIN)
    assert isinstance(around.updates.place(node, LARGE_BYTES_MIN), DiscardedVector)
    around.counts = True
    around.updates.received(node, update, bytearray())
    assert around.told == [ev.Dropped("a", 7)]


def test_when_the_run_ends_what_still_comes_is_read_and_thrown_away() -> None:
    """A connection that is not read does not notice that its node has closed it."""
    around = Surroundings(LARGE_BYTES_MIN)
    first, second, third = (peer({number: 0}) for number in (1, 2, 3))
    assert around.updates.may_send(first, Update(0, [Answer(1)]), LARGE_BYTES_MIN)
    assert not around.updates.may_send(second, Update(0, [Answer(2)]), LARGE_BYTES_MIN)
    around.updates.close()
    assert cast(Line, second.connection).is_reading
    assert around.updates.may_send(third, Update(0, [Answer(3)]), LARGE_BYTES_MIN)
    for node in (second, third):
        assert isinstance(around.updates.place(node, LARGE_BYTES_MIN), DiscardedVector)
        around.updates.lost(node)
    assert not around.updates.is_waiting(second)


# --- norms of batches, for advice -----------------------------------------------------------------


def squares_after(squares: list[float], *answers: Answer) -> list[tuple[float, ...]]:
    """The norms that the contributions have for a lease of two batches, 7, and one of one batch, 8."""
    around = Surroundings()
    plan = StepPlan(0, 0, 0, (4, 4, 4, 4), ends_epoch=False)
    for number, span in ((7, Span(0, 2)), (8, Span(2, 3))):
        around.leases[number] = Lease(number, "a", plan, span, 0, 0.0, 0.0)
    given = [answer for answer in answers if not answer.dropped]
    body = bytearray(len(given) * around.vector_bytes)
    update = Update(0, list(answers), squares=squares)
    around.updates.received(peer([answer.lease for answer in answers]), update, body)
    assert around.evicted == []
    return [around.updates.take("a", answer.lease).squares for answer in given]


def test_each_lease_gets_the_norms_of_its_batches() -> None:
    assert squares_after([1.0, 2.0, 3.0], Answer(7), Answer(8)) == [(1.0, 2.0), (3.0,)]
    assert squares_after([], Answer(7), Answer(8)) == [(), ()]


@pytest.mark.parametrize("squares", [[1.0], [1.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
def test_norms_that_do_not_fit_are_not_used_and_the_update_counts(squares: list[float]) -> None:
    assert squares_after(squares, Answer(7), Answer(8)) == [(), ()]


def test_norms_of_a_lease_that_ended_meanwhile_are_not_used() -> None:
    assert squares_after([1.0], Answer(9)) == [()]


# --- weights of batches -------------------------------------------------------------------------------


def weighing(*weights: float, step: tuple[int, ...] = (4, 4, 4, 4)) -> Surroundings:
    """A node that answers a lease of two batches, 7, and one of one batch, 8, with these weights."""
    around = Surroundings()
    around.weighs = True
    plan = StepPlan(0, 0, 0, step, ends_epoch=False)
    for number, span in ((7, Span(0, 2)), (8, Span(2, 3))):
        around.leases[number] = Lease(number, "a", plan, span, 0, 0.0, 0.0)
    update = Update(0, [Answer(7), Answer(8)], weights=list(weights))
    around.updates.received(peer([7, 8]), update, bytearray(2 * around.vector_bytes))
    return around


def test_each_answer_has_the_weight_of_its_batches() -> None:
    around = weighing(8.0, 4.0)
    assert [around.updates.take("a", number).weight for number in (7, 8)] == [8.0, 4.0]
    (answered,) = around.told
    assert isinstance(answered, ev.Answered)
    assert list(answered.norms) == [1.0, 1.0]


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, 2.0, 3.0]])
def test_a_weight_for_each_answer_or_the_node_is_turned_out(weights: list[float]) -> None:
    assert weighing(*weights).evicted == [UNFIT]


def test_without_a_weight_in_the_job_a_node_may_not_say_any() -> None:
    around = Surroundings()
    around.updates.received(peer([7]), Update(0, [Answer(7)], weights=[1.0]), bytearray(8))
    assert around.evicted == [UNFIT]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e31])
def test_a_weight_that_is_none_is_a_failure(weight: float) -> None:
    around = weighing(8.0, weight)
    assert not around.evicted
    failed = [event for event in around.told if isinstance(event, ev.Failed)]
    assert [(event.lease, event.reason) for event in failed] == [(8, f"its weight is {weight:g}")]


def test_an_update_that_says_it_weighs_little_is_judged_by_what_it_makes_of_the_step() -> None:
    """A step is divided by what its batches weigh: a thousandth of that is a gradient a thousand times."""
    (answered,) = weighing(8.0 / 1000, 400.0).told
    assert isinstance(answered, ev.Answered)
    assert list(answered.norms) == [1000.0, 1.0]
    # Of batches that weigh nothing, or almost nothing, no gradient is used.
    for nothing in (0.0, 1e-300):
        around = weighing(nothing, 4.0)
        (answered,) = around.told
        assert isinstance(answered, ev.Answered)
        assert list(answered.norms) == [0.0, 1.0]
        assert around.updates.take("a", 7).weight == 0.0


def test_an_answer_without_a_vector_needs_no_weight() -> None:
    around = Surroundings()
    around.weighs = True
    around.updates.received(peer([7]), Update(0, [Answer(7, dropped=True)]), bytearray())
    assert around.told == [ev.Dropped("a", 7, 1)]
