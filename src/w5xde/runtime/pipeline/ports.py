"""Ports: all that the update pipeline needs from the rest of the program.

The coordinator's body fills them with sockets, threads and tensors; the simulator fills them with a virtual
network, virtual time and a model that counts. The pipeline cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.learn.data.payload import Packed, ReadBatch
from w5xde.learn.data.sources import Key
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.step.incoming import Checked, IncomingVector
from w5xde.learn.step.sums import Contribution, StepSums, Total
from w5xde.message_types import MetricRows, StepRates
from w5xde.messages import Difference, Params, Update
from w5xde.runtime.pipeline.peer import Peer, SentParams, SentWork


class Tasks(Protocol):
    """Calls functions one after another, where the learner lives, and their `done` on the loop."""

    @property
    def inline(self) -> bool: ...
    def call(self, function: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None: ...


class PeerTable(Protocol):
    """The nodes that are connected."""

    def get(self, name: str) -> Peer | None: ...
    def __iter__(self) -> Iterator[Peer]: ...
    def allow_vectors(self, peer: Peer, count: int) -> None:
        """The peer's next answers may have this many vectors."""

    def evict(self, peer: Peer, reason: str, *, abruptly: bool = False) -> None:
        """Close the connection of a peer that broke the rules."""

    def note_replica(self, peer: Peer) -> None:
        """Log that the parameters of this peer went wrong, and that it gets them anew."""


class Batches(Protocol):
    """The loader: packed batches by (epoch, batch)."""

    def at_once(self, keys: list[Key]) -> dict[Key, Packed] | None: ...
    def get(self, key: Key, done: Callable[[ReadBatch], None]) -> None: ...
    def release(self, keys: list[Key]) -> None: ...


class Samples(Protocol):
    """The samples that nodes keep, with `--data cached`."""

    def needs_reading(self, peer: Peer, key: Key) -> bool:
        """Whether a batch must be read to be sent to this peer; if not, its sample numbers suffice."""

    def as_sent(self, peer: Peer, key: Key, packed: Packed | None) -> Packed:
        """A batch as it is sent to this peer: with the samples that it lacks, and numbers for all."""

    def answered(self, peer: Peer, work: SentWork, update: Update) -> None:
        """Note which samples the peer stored, and which it misses."""


class StepMaker(Protocol):
    """The learner: makes optimizer steps from sums. Used only where `Tasks` calls."""

    @property
    def version(self) -> int: ...
    @property
    def can_roll_back(self) -> bool: ...
    @property
    def is_whole(self) -> bool:
        """Whether its state is that of a version: not if it failed in the middle of a step."""

    @property
    def learning_rates(self) -> list[float]: ...
    def apply(self, totals: list[Total]) -> list[float]: ...
    def skip(self) -> None:
        """Go on to the next version without a step."""

    def apply_all(self, totals: list[Total]) -> tuple[list[float], BaseException | None]: ...
    def body_of(self, total: Total) -> bytes | memoryview:
        """The sum of a step as bytes, for the step log."""


class Reader(Protocol):
    """Turns bodies of updates into checked vectors."""

    @property
    def vector_bytes(self) -> int: ...
    @property
    def trained(self) -> frozenset[int]: ...
    @property
    def weighs(self) -> bool:
        """Whether nodes say what their batches weigh."""

    def allocate(self, count: int) -> bytearray | memoryview: ...
    def stream(self, spec: str, body_bytes: int) -> IncomingVector | None: ...
    def discard(self) -> IncomingVector: ...
    def read(
        self, body: bytearray | memoryview, specs: Sequence[str], lengths: Sequence[int], count: int
    ) -> list[Checked]: ...


class ParameterFrame(NamedTuple):
    """A message with parameters, or with what a round changed in them; and its body."""

    message: Params | Difference
    pieces: list[memoryview]

    @property
    def encoded_bytes(self) -> int:
        return sum(map(len, self.pieces))


class Snapshot(NamedTuple):
    """What brings a peer to one version; the frames do not change until `sent` is called."""

    version: int
    frames: list[ParameterFrame]
    # The bytes of a vector that is not encoded.
    raw_bytes: int
    sent: Callable[[], None] | None = None


class Parameters(Protocol):
    """Encodes the newest version for a peer. Used only where `Tasks` calls."""

    def get(self, peer: Peer, *, whole: bool, ahead: float) -> Snapshot:
        """The newest version; its trained parameters look `ahead` by so many updates."""

    def kept_copy(self, ahead: float) -> Replica:
        """All that a lease on that version is computed from, in memory that does not change."""

    def rates(self, steps: int) -> StepRates | None:
        """The rates of the round that begins with it; None: this is not rounds mode."""


class SentLease(NamedTuple):
    """What a lease was sent with: its batches, and in rounds mode the rates of its steps."""

    # How many steps are planned before its step, or before the first of its steps.
    step: int
    batches: list[Packed]
    rates: StepRates | None = None


class Verifier(Protocol):
    """Computes leases a second time, with `--verify`."""

    def keep(self, sent: SentParams, params: Replica) -> None:
        """Keep these parameters: leases that will be verified are about to be sent with them."""

    def sent(self, sent: SentParams, lease: Lease, work: SentLease) -> None:
        """A lease that will be verified was sent, with parameters that are kept."""

    def verify(self, lease: Lease, given: Contribution) -> None:
        """Compare this answer with our own; the core hears of it as `Verified`."""

    def verify_measures(self, lease: Lease, rows: MetricRows) -> None:
        """Compare what was measured for a validation lease with our own; the core hears as `Verified`."""


class MeasuredSet(Protocol):
    """The validation set that nodes measure."""

    @property
    def batches(self) -> Batches: ...
    def fits(self, rows: MetricRows) -> bool:
        """Whether each of these rows has a number for each metric."""

    def keep(self, lease: Lease, rows: MetricRows) -> None:
        """Keep what a node measured in the batches of a lease."""

    def conclude(self, effect: ev.Conclude) -> None:
        """A validation has ended: report its result, or why it has none."""


class ModelPorts(NamedTuple):
    """The model that is trained."""

    learner: StepMaker
    sums: StepSums
    reader: Reader
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class Ports:
    """All of them."""

    clock: Callable[[], float]
    tasks: Tasks
    peers: PeerTable
    batches: Batches
    model: ModelPorts
    verifier: Verifier
    # None: every batch is sent whole.
    samples: Samples | None = None
    # None: nodes measure nothing.
    validation: MeasuredSet | None = None
