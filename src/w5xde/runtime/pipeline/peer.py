"""A peer: one node's connection, its identity, and the work that was sent over it. Decides nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from w5xde.control.codec_choice import CodecChoice
from w5xde.control.pool.patience import Patience, Signs
from w5xde.learn.codecs.sender import CodecSender
from w5xde.learn.data.samples import SampleSet
from w5xde.message_types import SampleList
from w5xde.messages import Message, Ready, Update
from w5xde.protocol.session import Session
from w5xde.protocol.wire import Limits
from w5xde.runtime.net.connection import SharedMemory
from w5xde.runtime.net.listener import Candidate
from w5xde.runtime.telemetry.meters import NodeMeter


class Link(Protocol):
    """What is used of a connection."""

    limits: Limits
    session: Session
    # Bytes a second at which large bodies arrive; 0: none has yet.
    link: float
    # The code of the peer's fault, if it broke the protocol.
    fault: str
    bytes_sent: int
    bytes_received: int

    @property
    def reported_link(self) -> float:
        """The link as the peer is told, to choose a codec by."""
        ...

    @property
    def round_trip_seconds(self) -> float | None: ...
    def send(
        self,
        message: Message,
        pieces: Sequence[bytes | bytearray | memoryview] = (),
        sent: Callable[[], None] | None = None,
        *,
        hold: bool = False,
    ) -> None: ...
    def share(self, memory: SharedMemory) -> None: ...
    def go_on(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...

    @property
    def stuck_since(self) -> float | None: ...
    @property
    def frame_began(self) -> int | None: ...


class SentWork(NamedTuple):
    """A Work message whose answers have not come."""

    leases: list[int]
    batches: int
    sent_at: float
    # To a node that keeps samples: the batches of each lease, as they were listed (None: sent whole).
    listed: Mapping[int, Sequence[tuple[int, SampleList | None]]] = {}
    # Whether its leases are of a validation: their answers have numbers, and no vectors.
    validates: bool = False


class SentParams(NamedTuple):
    """Parameters that were sent: of a version, looking so many updates ahead. The same are the same bits."""

    version: int
    ahead: float = 0.0


NOTHING_SENT = SentParams(-1)
NO_REPLICA = (-1, b"")


class AnnouncedCache(NamedTuple):
    """A cache as its node describes it: nodes of one machine share a cache, and its id."""

    id: bytes
    slots: int
    held: bytes


@dataclass(slots=True, eq=False)
class Peer:
    """One node, from its connection to its end."""

    connection: Link
    candidate: Candidate
    name: str = ""
    # The id of its credential; empty for local nodes.
    node_id: bytes = b""
    # It came only to look (`w5xde doctor`), and is never lent work.
    is_looking: bool = False
    # How many bytes it then wants and may send, to measure the link.
    probe_bytes: int = 0
    device: str = ""
    machine: str = ""
    cores: int = 0
    welcomed_at: float = 0.0
    heard_at: float = 0.0
    is_ready: bool = False
    is_gone: bool = False
    # How long a batch may take it, by the time its canary took.
    guess_seconds: float | None = None
    # The parameters that it was last sent, and the newest that were asked for it.
    params: SentParams = NOTHING_SENT
    params_asked: SentParams = NOTHING_SENT
    # In rounds mode, the version of the parameters with which it came back (-1: it had none), and their hash.
    # And how often it said that its parameters are not those that it should have, and how many of `works`
    # were sent before it said so.
    replica: tuple[int, bytes] = NO_REPLICA
    replicas_lost: int = 0
    works_forgiven: int = 0
    # What it has computed in all its connections, and how many of its batches had counted before this one.
    meter: NodeMeter | None = None
    counted_before: int = 0
    # Answers come in the order of these.
    works: deque[SentWork] = field(default_factory=deque)
    answered_at: float = 0.0
    # Which samples its cache held when it joined, and what is known to be there now; None: it has no cache.
    announced: AnnouncedCache | None = None
    samples: SampleSet | None = None
    # Its answers in a row that missed samples and computed nothing.
    misses: int = 0
    # How many vectors its largest answer may have.
    frame_vectors: int = 1
    # How parameters are encoded for it.
    sender: CodecSender | None = None
    choice: CodecChoice = field(default_factory=CodecChoice)
    patience: Patience = field(default_factory=Patience)

    def become_ready(self, ready: Ready) -> None:
        """Note that its model and data match, and which parameters it has from before."""
        self.is_ready = True
        self.replica = (ready.version, ready.replica) if ready.replica else NO_REPLICA

    def count_by(self, meter: NodeMeter) -> None:
        """It has joined, and this meter counts its batches that are in steps of the model."""
        self.meter, self.counted_before = meter, meter.batches

    @property
    def counted(self) -> int:
        """How many batches of this connection are in steps of the model."""
        return max(0, self.meter.batches - self.counted_before) if self.meter is not None else 0

    def expected_link(self, update: Update) -> float:
        """Bytes a second to expect from it; 0 if unknown."""
        # Before anything large has come from it, the node's own measurement of the other direction must do.
        said = update.link if 0 < update.link < math.inf else 0.0
        return self.connection.link or said

    def complaint(self, now: float, awake_since: float) -> str:
        """Why to close its connection now, or nothing."""
        connection = self.connection
        signs = Signs(
            self.is_ready,
            self.heard_at,
            connection.stuck_since,
            connection.frame_began,
            connection.bytes_received,
        )
        return self.patience.complaint(signs, now, awake_since)
