"""Updates: the way of an update from the header of its frame to the core's verdict.

Each connection has at most one `Upload` at a time. It waits for its turn if it is large, goes to its place
while it arrives, is checked, and is then kept until the core decides: folded into its step, verified, or
rejected. Whether it counts is decided by the core alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from w5xde.compression import NONE
from w5xde.control import events as ev
from w5xde.control.uploads import Announced, UploadQueue
from w5xde.control.view import CoreView
from w5xde.errors import RemoteProtocolError
from w5xde.learn.data.samples import chosen_of
from w5xde.learn.model.route import is_large
from w5xde.learn.step.incoming import Checked, IncomingVector
from w5xde.learn.step.sums import Contribution
from w5xde.learn.train.weighing import WEIGHT_MAX, counted
from w5xde.messages import Answer, Rejected, Update
from w5xde.protocol.wire import Body
from w5xde.runtime.pipeline.measures import Measures
from w5xde.runtime.pipeline.peer import NO_REPLICA, NOTHING_SENT, Peer, SentWork
from w5xde.runtime.pipeline.ports import Ports
from w5xde.runtime.telemetry.meters import Meters
from w5xde.sanitize import sane_seconds

# What a node says of its losses only feeds the metrics; sums of numbers below this stay finite.
LOSS_MAX = 1e30
# All large updates that arrive at a time fit into this part of the memory that was free at the start.
ARRIVING_PART = 0.25

# In rounds mode a node whose parameters went wrong gets them anew; one that always asks is broken, or lies.
REPLICAS_LOST_MAX = 3

UNFIT = "its answer does not fit what it was lent"
_NONE_ABSENT: frozenset[int] = frozenset()


class Timing(NamedTuple):
    """How long a batch took: in all, computing, and which share of that on a core."""

    batch_seconds: float
    compute_seconds: float
    core_share: float


@dataclass(slots=True)
class Upload:
    """An update whose body is large, from its header to its last byte."""

    update: Update
    body_bytes: int
    # Where its bytes go; None until its turn comes, or if it can be read only when it is complete.
    place: IncomingVector | None = None


class Updates:
    """Receives updates from ready peers and tells the core of each answer."""

    def __init__(
        self,
        ports: Ports,
        view: CoreView,
        meters: Meters,
        dispatch: Callable[[ev.Event], None],
        *,
        one_by_one: bool,
        budget_bytes: float = math.inf,
    ) -> None:
        """With `one_by_one` each answer is an event of its own: its step needs its own cut, for the log."""
        self._ports = ports
        self._reader = ports.model.reader
        self._view = view
        self._meters = meters
        self._dispatch = dispatch
        self._one_by_one = one_by_one
        self._queue: UploadQueue[Peer] = UploadQueue(budget_bytes)
        self._uploads: dict[Peer, Upload] = {}
        self._is_closed = False
        # Updates on which the core has not decided, by node and lease.
        self._undecided: dict[tuple[str, int], Contribution] = {}
        self.measures = Measures(view, ports.validation)

    # --- while a large body arrives ---------------------------------------------------------------

    def may_send(self, peer: Peer, update: Update, body_bytes: int) -> bool:
        """A body is about to come. False: it must wait until its connection is told to go on."""
        if not is_large(body_bytes) or peer.is_gone:
            return True
        self._uploads[peer] = Upload(update, body_bytes)
        if self._is_closed:
            self._uploads[peer].place = self._reader.discard()
            return True
        announced = Announced(self._order_of(update), body_bytes, peer.expected_link(update))
        if not self._queue.ask(peer, announced, self._ports.clock()):
            return False
        self._begin(peer)
        return True

    def _order_of(self, update: Update) -> tuple[int, ...]:
        """Its step and first batch: updates that are added up first come first."""
        lease = self._view.lease(update.answers[0].lease) if update.answers else None
        return (lease.step.index, lease.span.start) if lease is not None else ()

    def _begin(self, peer: Peer) -> None:
        """Choose where the body goes: nowhere, if it cannot count any more."""
        upload = self._uploads[peer]
        given = self._given(peer, upload.update)
        is_single = given is not None and len(given) == len(upload.update.answers) == 1
        if given is None or not is_single:
            return
        answer = given[0]
        if self._length_of(answer) != upload.body_bytes:
            return
        if not self._view.may_count(answer.lease, peer.name):
            upload.place = self._reader.discard()
        elif is_large(self._reader.vector_bytes):
            upload.place = self._reader.stream(answer.codec, upload.body_bytes)

    def place(self, peer: Peer, body_bytes: int) -> Body | IncomingVector:
        """Where the connection puts the body that arrives."""
        upload = self._uploads.get(peer)
        if upload is not None and upload.place is not None:
            return upload.place
        return self._reader.allocate(body_bytes)

    def is_waiting(self, peer: Peer) -> bool:
        """Whether the coordinator keeps this peer waiting, so that its silence is not its fault."""
        return self._queue.is_waiting(peer)

    def tick(self, now: float) -> list[Peer]:
        """Let those continue whose turn has come. Returns the peers that must still wait."""
        self._continue(self._queue.tick(now))
        return self._queue.waiting

    def _continue(self, peers: list[Peer]) -> None:
        for peer in peers:
            self._begin(peer)
            peer.connection.go_on()

    def _end_upload(self, peer: Peer) -> Upload | None:
        upload = self._uploads.pop(peer, None)
        if upload is not None:
            self._continue(self._queue.end(peer, self._ports.clock()))
        return upload

    def lost(self, peer: Peer) -> None:
        """The connection is gone, and the rest of its upload with it."""
        self._end_upload(peer)

    def close(self) -> None:
        """The run is over: read what still comes, and throw it away.

        A connection that is not read would not notice that its node closes it.
        """
        self._is_closed = True
        for peer in self._queue.waiting:
            self._queue.end(peer, self._ports.clock())
            self._uploads[peer].place = self._reader.discard()
            peer.connection.go_on()

    # --- a complete update ------------------------------------------------------------------------

    def received(self, peer: Peer, update: Update, body: Body) -> None:
        """All of an update is here. Its numbers are checked where the learner lives, then the core hears."""
        current = self._uploads.get(peer)
        # A small update may be complete while the next one, a large one, already waits.
        upload = current if current is not None and current.update is update else None
        place = upload.place if upload is not None else None
        given = self._given(peer, update)
        if given is None:
            self._refuse(peer, UNFIT)
            return
        lengths = [self._length_of(answer) for answer in given]
        if place is None and len(body) != sum(lengths):
            self._refuse(peer, UNFIT)
            return
        batches, validates = peer.works[0].batches, peer.works[0].validates
        if self._ports.samples is not None and peer.samples is not None:
            self._ports.samples.answered(peer, peer.works[0], update)
        if peer.works_forgiven:
            peer.works_forgiven -= 1
        elif update.differs and not self._forgive_replica(peer):
            return
        timing = self._measure(peer, update)
        meter = self._meters.node(peer.name)
        meter.moved_vectors(len(given) * self._reader.vector_bytes, sum(lengths))
        if all(answer.dropped for answer in update.answers):
            # A node that drops a whole message may have no memory for it, unless it lacks something else.
            is_lacking = update.differs or any(answer.missing for answer in update.answers)
            for answer in update.answers:
                self._dispatch(ev.Dropped(peer.name, answer.lease, 0 if is_lacking else batches))
        elif validates:
            self._answered(peer.name, update, [], timing, validates=True)
        elif place is not None:
            self._checked(peer.name, update, place, timing)
        else:
            specs = [answer.codec for answer in given]
            read = partial(self._reader.read, body, specs, lengths, len(given))
            self._check(peer, update, read, timing)
        if upload is not None:
            self._end_upload(peer)

    def _forgive_replica(self, peer: Peer) -> bool:
        """Send the peer all parameters with its next lease; False if it has asked for that too often."""
        peer.params = peer.params_asked = NOTHING_SENT
        peer.replica = NO_REPLICA
        # What was sent to it already comes back for the same reason.
        peer.works_forgiven = len(peer.works) - 1
        peer.replicas_lost += 1
        if peer.replicas_lost > REPLICAS_LOST_MAX:
            self._refuse(peer, "its parameters differ from ours again and again")
            return False
        self._ports.peers.note_replica(peer)
        return True

    def _given(self, peer: Peer, update: Update) -> list[Answer] | None:
        """The answers that have a vector in the body; None: they do not fit what the peer was lent."""
        if not peer.works or peer.works[0].leases != [answer.lease for answer in update.answers]:
            return None
        if peer.works[0].validates:
            return [] if all(map(self.measures.fit, update.answers)) else None
        if not all(_may_miss(answer, peer.works[0]) for answer in update.answers if answer.missing):
            return None
        given = [answer for answer in update.answers if not answer.dropped and not answer.failure]
        trained = self._reader.trained
        if given and len(update.weights) != (len(update.answers) if self._reader.weighs else 0):
            return None
        return given if all(trained.issuperset(answer.absent) for answer in given) else None

    def _length_of(self, answer: Answer) -> int:
        return self._reader.vector_bytes if answer.codec == NONE else answer.body_bytes

    def _measure(self, peer: Peer, update: Update) -> Timing:
        """How long the work took that this update answers; the meters count it."""
        now = self._ports.clock()
        work = peer.works.popleft()
        # Two answers may be read at once, the second in no time: then the node's own measurement counts.
        computed = sum([sane_seconds(answer.seconds) for answer in update.answers])
        batch_seconds = max(1e-6, computed, now - max(work.sent_at, peer.answered_at)) / work.batches
        peer.answered_at = now
        self._meters.node(peer.name).answered(update, computed)
        self._meters.trace.answered(update.answers, now)
        if 0 < update.link < math.inf:
            peer.choice.link(update.link)
        on_core = sane_seconds(update.core_seconds)
        return Timing(batch_seconds, computed / work.batches, on_core / (computed or 1.0))

    def _check(self, peer: Peer, update: Update, read: Callable[[], list[Checked]], timing: Timing) -> None:
        """Decode and check a complete body where the learner lives, then tell the core."""

        def try_to_read() -> list[Checked] | RemoteProtocolError:
            try:
                return read()
            except RemoteProtocolError as error:
                return error

        def done(checked: list[Checked] | RemoteProtocolError) -> None:
            if isinstance(checked, RemoteProtocolError):
                self._refuse(peer, checked.what)
            else:
                self._answered(peer.name, update, checked, timing)

        self._ports.tasks.call(try_to_read, done)

    def _checked(self, node: str, update: Update, place: IncomingVector, timing: Timing) -> None:
        """One large vector is here, and was checked while it arrived."""
        lease = update.answers[0].lease
        if place.vector is not None:
            self._answered(node, update, [(place.vector, place.norm)], timing)
        elif self._view.may_count(lease, node):
            # It was thrown away, and is wanted after all: its lease is given back, and lent again.
            self._dispatch(ev.Dropped(node, lease))
        else:
            self._dispatch(ev.Answered(node, [lease], *timing, norms=[place.norm]))

    def _refuse(self, peer: Peer, reason: str) -> None:
        self._end_upload(peer)
        self._ports.peers.evict(peer, reason, abruptly=True)

    def _answered(
        self, node: str, update: Update, checked: list[Checked], timing: Timing, *, validates: bool = False
    ) -> None:
        """Tell the core of each answer: usable, failed, or dropped."""
        vectors = iter(checked)
        squares = self._squares_of(update) if update.squares else {}
        usable: dict[int, float] = {}
        others: list[ev.Event] = []
        for number, answer in enumerate(update.answers):
            if answer.dropped:
                others.append(ev.Dropped(node, answer.lease))
                continue
            if answer.failure:
                others.append(ev.Failed(node, answer.lease, answer.failure))
                continue
            if validates:
                others.append(self.measures.received(node, answer))
                continue
            vector, norm = next(vectors)
            weight = update.weights[number] if update.weights else None
            wild = _find_wild(norm, answer.loss_sum, weight)
            if wild:
                others.append(ev.Failed(node, answer.lease, wild, math.inf))
                continue
            absent = frozenset(answer.absent) if answer.absent else _NONE_ABSENT
            measured = squares.get(answer.lease, ())
            if weight is not None:
                weight = counted(weight)
            found = Contribution(vector, absent, answer.loss_sum, norm, measured, weight)
            self._undecided[node, answer.lease] = found
            usable[answer.lease] = norm if weight is None else self._judged_norm(answer.lease, norm, weight)
        if self._one_by_one:
            for lease, norm in usable.items():
                self._dispatch(ev.Answered(node, [lease], *timing, norms=[norm]))
        elif usable:
            self._dispatch(ev.Answered(node, list(usable), *timing, norms=list(usable.values())))
        for event in others:
            self._dispatch(event)

    def _judged_norm(self, lease: int, norm: float, weight: float) -> float:
        """The norm by which an update is judged, if nodes say what their batches weigh.

        Its step is divided by all weights: a node that said too little would make its gradient larger.
        """
        held = self._view.lease(lease)
        if held is None or held.step.count == 1 or held.step.apart:
            return norm
        return norm * max(1.0, held.samples / weight) if weight else 0.0

    def _squares_of(self, update: Update) -> dict[int, tuple[float, ...]]:
        """The squared norms of each lease's batches; none if they do not fit: they are for advice alone."""
        leases = [self._view.lease(answer.lease) for answer in update.answers]
        counts = [lease.batches if lease is not None else 0 for lease in leases]
        if 0 in counts or sum(counts) != len(update.squares):
            return {}
        squares = iter(update.squares)
        return {
            answer.lease: tuple(islice(squares, count))
            for answer, count in zip(update.answers, counts, strict=True)
        }

    # --- the core's verdict -----------------------------------------------------------------------

    def take(self, node: str, lease: int) -> Contribution:
        """The update of a lease that the core accepted."""
        return self._undecided.pop((node, lease))

    def look_at(self, node: str, lease: int) -> Contribution | None:
        """The update of a lease on which the core has not decided."""
        return self._undecided.get((node, lease))

    def reject(self, effect: ev.Reject) -> None:
        self._undecided.pop((effect.node, effect.lease), None)
        self.measures.forget(effect.node, effect.lease)
        peer = self._ports.peers.get(effect.node)
        # Its node may have reconnected while the answer was checked or verified: then it must not hear this
        # before it is ready.
        if peer is not None and peer.is_ready:
            peer.connection.send(Rejected(effect.lease, effect.reason[:4000]))


def _find_wild(norm: float, loss_sum: float, weight: float | None) -> str:
    """What is wrong with the numbers of an answer; empty if nothing is."""
    if norm == math.inf:
        return "its gradient is not finite"
    # So that a NaN is found, too.
    if not abs(loss_sum) < LOSS_MAX:
        return f"its loss is {loss_sum:g}"
    return f"its weight is {weight:g}" if weight is not None and not 0 <= weight < WEIGHT_MAX else ""


def _may_miss(answer: Answer, work: SentWork) -> bool:
    """Whether what a lease is said to miss can be missing: samples that came with it cannot."""
    batches = work.listed.get(answer.lease, ())
    lacked = [
        ~chosen_of(listed.sent, samples) if listed is not None else np.zeros(samples, bool)
        for samples, listed in batches
    ]
    if not answer.dropped or not lacked:
        return False
    unsent = np.concatenate(lacked)
    named = chosen_of(answer.missing, len(unsent))
    # Samples without a bit are missing too, but for those that came.
    missing = chosen_of(answer.missing, len(unsent), beyond=True)
    return bool((missing & unsent).any()) and not (named & ~unsent).any()
