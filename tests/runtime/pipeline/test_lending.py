"""Lending: a node computes on the parameters of the version that its lease names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from w5xde.compression import NONE
from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import StepPlan
from w5xde.learn.data.payload import Packed, ReadBatch, UnreadableBatch
from w5xde.learn.rounds.replica import Replica
from w5xde.message_types import Value
from w5xde.messages import Message, Params, Work
from w5xde.runtime.pipeline.lending import Lending
from w5xde.runtime.pipeline.peer import Peer, SentParams
from w5xde.runtime.pipeline.ports import ModelPorts, ParameterFrame, Ports, SentLease, Snapshot
from w5xde.runtime.telemetry.gradient_noise import GradientNoise
from w5xde.runtime.telemetry.meters import Meters
from w5xde.tree import Span

PACKED = Packed(1, Value(None), [], 0)


class Around:
    """One peer, a learner at some version, batches that come when the test says so, and a view of leases."""

    link = reported_link = 0.0
    round_trip_seconds = None
    bytes_sent = 0

    def __init__(self, version: int) -> None:
        self.version = version
        self.sent: list[Message] = []
        # The parameters that were sent.
        self.bodies: list[str] = []
        self.verifier = Kept()
        self.leases: dict[int, Lease] = {}
        self.reading: list[Callable[[], None]] = []
        # This is not rounds mode.
        self.plan = SimpleNamespace(rounds=None, number_of=lambda step: step.index)
        self.peer = Peer(cast(Any, self), cast(Any, None), name="a", is_ready=True)
        self.peer.params = self.peer.params_asked = SentParams(version)
        ports = Ports(
            clock=lambda: 0.0,
            tasks=cast(Any, self),
            peers=cast(Any, self),
            batches=cast(Any, self),
            model=ModelPorts(cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, Newest(self))),
            verifier=cast(Any, self.verifier),
        )
        self.meters = Meters()
        # What the core was told.
        self.told: list[ev.Event] = []
        # Batches that cannot be read.
        self.torn: set[int] = set()
        self.lending = Lending(ports, cast(Any, self), self.meters, self.told.append)

    def lend(self, number: int, version: int, ahead: float = 0.0, *, verify: bool = False) -> None:
        plan = StepPlan(number, 0, number, (1,), ends_epoch=False)
        lease = Lease(number, "a", plan, Span(0, 1), version, 0.0, 0.0, ahead=ahead)
        self.leases[number] = lease
        self.lending.lend(ev.Assign("a", [lease], [number] if verify else []))

    def roll_back(self, version: int) -> None:
        """As the core and the pipeline do."""
        self.leases = {number: replace(lease, version=version) for number, lease in self.leases.items()}
        self.lending.rewind()

    def read(self) -> None:
        """All batches that were asked for are here."""
        reading, self.reading = self.reading, []
        for done in reading:
            done()

    # --- the ports

    def call(self, function: Any, done: Any) -> None:
        done(function())

    def get(self, key: Any, done: Callable[[ReadBatch], None] | None = None) -> Any:
        if done is None:
            return self.peer
        is_torn = key[1] in self.torn
        self.reading.append(lambda: done(UnreadableBatch("it is torn") if is_torn else PACKED))
        return None

    def at_once(self, keys: Any) -> None:
        return None

    def __iter__(self) -> Any:
        return iter([self.peer])

    def lease(self, number: int) -> Lease | None:
        return self.leases.get(number)

    def allow_vectors(self, peer: Peer, count: int) -> None:
        """Nothing is received here."""

    def send(self, message: Message, pieces: Any = (), sent: Any = None, *, hold: bool = False) -> None:
        self.sent.append(message)
        if isinstance(message, Params):
            self.bodies.append(b"".join(pieces).decode())


class Newest:
    """The parameters of the learner's version."""

    def __init__(self, around: Around) -> None:
        self._around = around

    def get(self, peer: Peer, *, whole: bool, ahead: float) -> Snapshot:
        text = f"version {self._around.version}, {ahead} ahead"
        message = Params(self._around.version, whole, NONE)
        return Snapshot(self._around.version, [ParameterFrame(message, [memoryview(text.encode())])], 0)

    def kept_copy(self, ahead: float) -> Replica:
        return Replica(memoryview(f"version {self._around.version}, {ahead} ahead".encode()))

    def rates(self, steps: int) -> None:
        """This is not rounds mode."""


class Kept:
    """What a verifier is given: the parameters to keep, and those that each lease was sent with."""

    def __init__(self) -> None:
        self.params: dict[SentParams, str] = {}
        self.of_lease: dict[int, SentParams] = {}

    def keep(self, sent: SentParams, params: Replica) -> None:
        self.params[sent] = bytes(params.state).decode()

    def sent(self, sent: SentParams, lease: Lease, work: SentLease) -> None:
        self.of_lease[lease.id] = sent


def versions(sent: list[Message]) -> list[tuple[str, int]]:
    return [(type(each).__name__, each.version) for each in sent if isinstance(each, Params | Work)]


def test_a_lease_that_was_read_for_a_version_that_never_came_does_not_stand_for_its_parameters() -> None:
    around = Around(version=6)
    around.lend(1, version=7)
    # The step that was to make version 7 is rolled back while the batch of the lease is read.
    around.roll_back(6)
    around.read()
    assert versions(around.sent) == [("Params", 6), ("Work", 6)]
    around.sent.clear()
    around.version = 7
    around.lend(2, version=7)
    around.read()
    assert versions(around.sent) == [("Params", 7), ("Work", 7)]


def test_parameters_are_sent_once_for_each_version() -> None:
    around = Around(version=6)
    around.version = 7
    around.lend(1, version=7)
    around.lend(2, version=7)
    around.read()
    assert versions(around.sent) == [("Params", 7), ("Work", 7), ("Work", 7)]


def test_the_same_version_is_sent_again_if_it_looks_ahead_otherwise() -> None:
    """A node that is alone all at once computes on the version as it is."""
    around = Around(version=6)
    for number, ahead in enumerate([1.0, 1.0, 0.0, 0.0]):
        around.lend(number, 6, ahead)
        around.read()
    assert versions(around.sent) == [
        ("Params", 6),
        ("Work", 6),
        ("Work", 6),
        ("Params", 6),
        ("Work", 6),
        ("Work", 6),
    ]
    assert around.bodies == ["version 6, 1.0 ahead", "version 6, 0.0 ahead"]


def test_an_answer_is_verified_with_the_parameters_that_its_node_was_sent() -> None:
    around = Around(version=6)
    for number, ahead in enumerate([1.0, 1.0, 0.5, 0.0]):
        around.version = 7 if number else 6
        around.lend(number, around.version, ahead, verify=True)
        around.read()
        assert around.verifier.params[around.verifier.of_lease[number]] == around.bodies[-1]
    assert len(around.bodies) == 4


def test_a_version_that_never_came_is_not_asked_for_however_far_it_looks_ahead() -> None:
    around = Around(version=6)
    around.lend(1, 7, 1.0)
    around.roll_back(6)
    around.read()
    assert around.bodies == ["version 6, 1.0 ahead"]
    around.version = 7
    around.lend(2, 7, 1.0)
    around.read()
    assert around.bodies[1:] == ["version 7, 1.0 ahead"]


def test_a_lease_that_ended_while_it_was_read_needs_no_parameters() -> None:
    around = Around(version=6)
    around.lend(1, version=7)
    around.leases.clear()
    around.read()
    assert around.sent == []


def test_a_node_is_asked_for_norms_in_the_steps_that_are_measured() -> None:
    around = Around(0)
    around.meters.noise = GradientNoise(1, every=2)
    for number in (1, 2, 3):
        around.lend(number, 0)
        around.read()
    assert [each.measures for each in around.sent if isinstance(each, Work)] == [False, True, False]


def test_after_a_rollback_the_same_version_is_sent_again() -> None:
    """A local node may have copied the shared parameters while the step that was rolled back was in them."""
    around = Around(version=5)
    around.lend(1, version=5)
    around.read()
    assert versions(around.sent) == [("Work", 5)]
    around.roll_back(5)
    around.lend(2, version=5)
    around.read()
    assert versions(around.sent) == [("Work", 5), ("Params", 5), ("Work", 5)]


def test_a_lease_with_a_batch_that_cannot_be_read_is_not_sent_and_others_are() -> None:
    around = Around(version=6)
    around.torn = {2}
    plans = [StepPlan(number, 0, number, (1,), ends_epoch=False) for number in (1, 2, 3)]
    leases = [Lease(plan.index, "a", plan, Span(0, 1), 6, 0.0, 0.0) for plan in plans]
    around.leases = {lease.id: lease for lease in leases}
    around.lending.lend(ev.Assign("a", leases))
    around.read()
    (work,) = around.sent
    assert isinstance(work, Work)
    assert [(loan.lease, loan.step) for loan in work.loans] == [(1, 1), (3, 3)]
    assert around.told == [ev.Unreadable("a", 2, {2: "it is torn"})]


def test_a_node_is_told_how_many_of_its_batches_counted_since_it_joined() -> None:
    around = Around(version=6)
    meter = around.meters.node("a")
    meter.batches = 100  # of an earlier connection
    around.peer.count_by(meter)
    for number, batches in enumerate((100, 103, 102)):
        meter.batches = batches
        around.lend(number, 6)
        around.read()
    assert [each.counted for each in around.sent if isinstance(each, Work)] == [0, 3, 2]
