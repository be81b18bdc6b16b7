"""Fakes for the ports of the update pipeline: virtual time, a model that counts, batches that take time.

What the pipeline itself does (order, turns, sums, versions) is real; only what ports stand for is not.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tests.sim.books import require
from tests.sim.counter import LIE, Counter, Sum, column, leaves_of, start_of
from tests.sim.scenario import Scenario
from tests.sim.validation import is_true
from w5xde.compression import NONE
from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.learn.data.payload import Packed, ReadBatch, UnreadableBatch
from w5xde.learn.model.layout import Blueprint
from w5xde.learn.model.route import is_large
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.step.incoming import DiscardedVector
from w5xde.learn.step.sums import Contribution, Decided, Leased, StepNotFinite, Total, TreeSums
from w5xde.message_types import Call, MetricRows, StepRates, Value
from w5xde.messages import Layout, Params, Update
from w5xde.runtime.coordinator.call_ports import NOTHING, WHOLE, part_lacked
from w5xde.runtime.coordinator.round_parameters import RoundParameters
from w5xde.runtime.pipeline.peer import Peer, SentParams
from w5xde.runtime.pipeline.ports import ParameterFrame, SentLease, Snapshot

if TYPE_CHECKING:
    from tests.sim.coordinator import SimulatedCoordinator

Key = tuple[int, int]


class SumVector:
    """A vector whose numbers are the expression by which it was summed."""

    parts: Sequence[Any] = ()

    def __init__(self, total: Sum) -> None:
        self.total = total
        # Of which leases it is the sum.
        self.leases: set[int] = set()

    def add_(self, other: SumVector) -> SumVector:
        self.total = (self.total, other.total)
        self.leases |= other.leases
        return self


class Arriving:
    """The body of an update on its way: its sums and their norms, and how long it would be in bytes."""

    def __init__(
        self, update: Update, sums: Sequence[Sum], norms: Sequence[float], vector_bytes: int
    ) -> None:
        self.update = update
        self.sums = tuple(sums)
        self.norms = tuple(norms)
        self.has_begun = False
        self._bytes = len(self.sums) * vector_bytes

    def __len__(self) -> int:
        return self._bytes

    @property
    def is_large(self) -> bool:
        return is_large(self._bytes)

    def vectors(self) -> list[tuple[Any, float]]:
        return [(SumVector(total), norm) for total, norm in zip(self.sums, self.norms, strict=True)]


class ArrivingVector:
    """The place of one large vector."""

    def __init__(self) -> None:
        self.body = b""
        self.vector: Any = None
        self.norm = 0.0

    def fill(self, arriving: Arriving) -> None:
        ((self.vector, self.norm),) = arriving.vectors()


class FakeReader:
    """Reads sums instead of numbers."""

    trained: frozenset[int] = frozenset()
    weighs = False

    def __init__(self, scenario: Scenario) -> None:
        self.vector_bytes = scenario.vector_bytes

    def allocate(self, count: int) -> Any:
        return None

    def stream(self, spec: str, body_bytes: int) -> Any:
        require(body_bytes == self.vector_bytes, f"{body_bytes} bytes are read as one vector")
        return ArrivingVector()

    def discard(self) -> Any:
        return DiscardedVector()

    def read(self, body: Any, specs: Sequence[str], lengths: Sequence[int], count: int) -> list[Any]:
        require(len(body.sums) == count, f"{count} vectors are read of {len(body.sums)}")
        return list(body.vectors())


class WatchedSums(TreeSums):
    """The real sums, of vectors that are expressions; of the right updates, and none of them a lie."""

    def __init__(self, *, is_pool: bool = False) -> None:
        super().__init__(Blueprint(Layout([])), cast(Any, None))
        self.is_pool = is_pool

    def add(self, lease: Leased, given: Contribution, staleness: int) -> None:
        vector = cast(SumVector, given.vector)
        require(vector.total != LIE, f"a lie is folded: {lease}")
        oldest = min(version for _, _, version in leaves_of(vector.total))
        # The leaves of a pool have the number of the caller's weights instead, which the books compare.
        is_old = not self.is_pool and oldest < cast(Lease, lease).version
        require(not is_old, f"{lease} was computed on version {oldest}: versions old")
        vector.leases.add(lease.id)
        super().add(lease, given, staleness)

    def total(self, step: Decided) -> Total:
        total = super().total(step)
        summed = cast(SumVector, total.contribution.vector).leases
        decided = {lease for _, _, _, lease in step.shares}
        require(summed == decided, f"step {step.plan.index} is the sum of leases {summed}, not {decided}")
        return total


class CountingLearner:
    """Applies sums to the model that counts, checks them, and takes its time."""

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        self._coordinator = coordinator
        self._world = coordinator.world
        self._counter: Counter = coordinator.counter
        # How long what it was just asked for takes.
        self.busy_seconds = 0.0

    @property
    def version(self) -> int:
        return self._counter.version

    is_whole = True
    learning_rates: Sequence[float] = ()
    # Of the layout of its vectors nothing is asked here.
    vector_bytes = 0
    flat = SimpleNamespace(blueprint=SimpleNamespace(groups=[]))

    @property
    def can_roll_back(self) -> bool:
        return not self._world.scenario.is_large

    def apply(self, totals: list[Total]) -> list[float]:
        step = self._coordinator.decided[self.version]
        if self.can_roll_back and self._world.spoils(step.plan.index):
            raise StepNotFinite(f"step {step.plan.index} is spoiled")
        (total,) = map(self._sum, totals)
        is_open = self._coordinator.validation.open_version is not None
        require(not is_open, f"step {step.plan.index} is made in the middle of a validation")
        self._coordinator.books.summed(step, total)
        self._world.point("apply")
        self._coordinator.apply(step, total)
        self._coordinator.books.applied(step, self._world.now)
        self._coordinator.released.may_release(step.plan.keys)
        self.busy_seconds += self._coordinator.rng.uniform(0, self._world.scenario.learner_seconds)
        return [0.0] * len(totals)

    def skip(self) -> None:
        self._counter.version += 1

    def apply_all(self, totals: list[Total]) -> tuple[list[float], BaseException | None]:
        losses: list[float] = []
        try:
            for total in totals:
                losses += self.apply([total])
        except StepNotFinite as error:
            return losses, error
        return losses, None

    def body_of(self, total: Total) -> bytes:
        return json.dumps(self._sum(total)).encode()

    @staticmethod
    def _sum(total: Total) -> Sum:
        return cast(SumVector, total.contribution.vector).total


class FakeTasks:
    """A thread that works on one call after another. Without anything that takes time it is inline."""

    def __init__(self, coordinator: SimulatedCoordinator, learner: CountingLearner) -> None:
        self._coordinator = coordinator
        self._learner = learner
        self._calls: deque[tuple[Callable[[], Any], Callable[[Any], None] | None]] = deque()
        self._is_busy = False

    @property
    def inline(self) -> bool:
        return not self._coordinator.world.scenario.learner_seconds

    def call(self, function: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None:
        self._calls.append((function, done))
        self._work()

    def _work(self) -> None:
        while self._calls and not self._is_busy:
            function, done = self._calls.popleft()
            self._is_busy = True
            result = function()
            seconds, self._learner.busy_seconds = self._learner.busy_seconds, 0.0
            if seconds:
                self._coordinator.later(seconds, self._finished, done, result)
                return
            self._is_busy = False
            if done is not None:
                done(result)

    def _finished(self, done: Callable[[Any], None] | None, result: Any) -> None:
        self._is_busy = False
        if done is not None:
            done(result)
        self._work()


class Released:
    """Which batches the loader may forget, and has forgotten."""

    def __init__(self) -> None:
        self._allowed: set[Key] = set()
        self._gone: set[Key] = set()

    def may_release(self, keys: Sequence[Key]) -> None:
        self._allowed.update(keys)

    def release(self, keys: Sequence[Key]) -> None:
        early = [key for key in keys if key not in self._allowed]
        require(not early, f"batches {early} are released before they are applied")
        self._gone.update(keys)

    def require_kept(self, key: Key) -> None:
        require(key not in self._gone, f"batch {key} is lent after it was released")


class FakeBatches:
    """Batches without samples; reading one takes a while."""

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        self._coordinator = coordinator
        self._seconds = coordinator.world.scenario.reading_seconds

    def at_once(self, keys: list[Key]) -> dict[Key, Packed] | None:
        must_read = self._seconds or any(map(self._coordinator.world.is_unreadable, keys))
        return None if must_read else {key: self._read(key) for key in keys}

    def get(self, key: Key, done: Callable[[ReadBatch], None]) -> None:
        read: ReadBatch = self._read(key)
        if self._coordinator.world.is_unreadable(key):
            read = UnreadableBatch("it is torn")
        self._coordinator.later(self._coordinator.rng.uniform(0, self._seconds), done, read)

    def release(self, keys: list[Key]) -> None:
        self._coordinator.released.release(keys)

    def _read(self, key: Key) -> Packed:
        self._coordinator.released.require_kept(key)
        epoch, batch = key
        call = Call("loss") if self._coordinator.caller is not None else None
        samples = self._coordinator.world.scenario.epochs[epoch][batch]
        return Packed(samples, Value(None), [], 0, call=call)


class FakeParameters:
    """The parameters of a version are its number; encoding them keeps the learner's thread busy.

    In rounds mode nodes have a replica, and the real parameters choose what each of them lacks.
    """

    def __init__(self, coordinator: SimulatedCoordinator, learner: CountingLearner) -> None:
        self._coordinator = coordinator
        self._counter: Counter = coordinator.counter
        self._learner = learner
        self._rounds: RoundParameters | None = None
        if coordinator.world.scenario.is_rounds:
            self._rounds = RoundParameters(cast(Any, learner), coordinator.rounds, NONE)

    def get(self, peer: Peer, *, whole: bool, ahead: float) -> Snapshot:
        seconds = self._coordinator.world.scenario.learner_seconds
        self._learner.busy_seconds += self._coordinator.rng.uniform(0, seconds)
        if self._rounds is not None:
            return self._rounds.get(peer, whole=whole, ahead=ahead)
        caller = self._coordinator.caller
        if caller is not None:
            lacked, weights = part_lacked(caller, peer.params.version), str(caller.weights).encode()
            frame = ParameterFrame(Params(self._counter.version, lacked == WHOLE), [memoryview(weights)])
            return Snapshot(self._counter.version, [] if lacked == NOTHING else [frame], 0)
        before, version = peer.params.version, self._counter.version
        require(whole == (before < 0), f"{peer.name} is sent whole={whole} after {before}")
        return Snapshot(version, [ParameterFrame(Params(version, whole), [])], 0)

    def kept_copy(self, ahead: float) -> Replica:
        return self._rounds.kept_copy(ahead) if self._rounds is not None else Replica(memoryview(b""))

    def rates(self, steps: int) -> StepRates | None:
        return self._rounds.rates(steps) if self._rounds is not None else None


class FakeRecheck:
    """Knows a lie when it sees one, after a while."""

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        self._coordinator = coordinator
        self._kept: dict[SentParams, Replica] = {}
        # The parameters that each lease was sent with.
        self._sent: dict[int, SentParams] = {}

    def keep(self, sent: SentParams, params: Replica) -> None:
        # Parameters that no outstanding lease needs are forgotten, as in the real one.
        lease_of = self._coordinator.core.view.lease
        self._sent = {lease: of for lease, of in self._sent.items() if lease_of(lease) is not None}
        needed = set(self._sent.values())
        self._kept = {of: kept for of, kept in self._kept.items() if of in needed} | {sent: params}

    def sent(self, sent: SentParams, lease: Lease, work: SentLease) -> None:
        require(sent in self._kept, f"{sent} of {lease} was not kept")
        require(sent.ahead == lease.ahead, f"{lease} was sent with parameters that look {sent.ahead} ahead")
        require(len(work.batches) == lease.batches, f"{lease} was sent with {len(work.batches)} batches")
        self._sent[lease.id] = sent

    def verify(self, lease: Lease, given: Contribution) -> None:
        require(lease.id in self._sent, f"{lease} is verified, and was not kept for that")
        total = cast(SumVector, given.vector).total
        is_lie = total == LIE
        if not is_lie and self._coordinator.world.scenario.is_rounds:
            # The replica that was kept is the one on which the node computed.
            state, last = self._kept[self._sent[lease.id]]
            kept = last.numpy().tobytes().decode() if last is not None else ""
            start = start_of(bytes(state).decode().removeprefix("="), kept)
            require(total == column(start, leaves_of(total)), f"{lease} is verified on another replica")
        seconds = self._coordinator.rng.uniform(0, self._coordinator.world.scenario.verifying_seconds)
        event = ev.Verified(lease.node, lease.id, "it is a lie" if is_lie else "")
        self._coordinator.later(seconds, self._coordinator.tell, event)

    def verify_measures(self, lease: Lease, rows: MetricRows) -> None:
        require(lease.id in self._sent, f"{lease} is verified, and was not kept for that")
        seconds = self._coordinator.rng.uniform(0, self._coordinator.world.scenario.verifying_seconds)
        event = ev.Verified(lease.node, lease.id, "" if is_true(lease, rows) else "it is a lie")
        self._coordinator.later(seconds, self._coordinator.tell, event)


class Writer:
    """A thread that waits for the disk."""

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        self._coordinator = coordinator
        self._free_at = 0.0
        self._waiting: deque[Callable[[], None]] = deque()

    def drain(self) -> None:
        """Do now what is still to be done."""
        while self._waiting:
            self._waiting.popleft()()

    def call(self, function: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None:
        world = self._coordinator.world
        seconds = self._coordinator.rng.uniform(0, world.scenario.writing_seconds)
        self._free_at = max(world.now, self._free_at) + seconds

        def act() -> None:
            result = function()
            if done is not None:
                done(result)

        def due() -> None:
            # Unless it was drained meanwhile.
            if self._waiting and self._waiting[0] is act:
                self._waiting.popleft()()

        self._waiting.append(act)
        world.at(self._free_at, self._coordinator.gate.enter, due)


def tupled(value: Any) -> Any:
    return tuple(map(tupled, value)) if isinstance(value, list) else value
