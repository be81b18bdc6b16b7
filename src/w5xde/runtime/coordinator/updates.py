"""The intake: what nodes send, on its way to the learner. Checked, then the core is told.

Holds no rule: whether an answer counts is the core's to say.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from w5xde.compression import NONE
from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs.receiver import CodecReceiver
from w5xde.learn.model.layout import Vector
from w5xde.learn.step.incoming import Added, Arrival
from w5xde.learn.step.learner import Contribution, Learner
from w5xde.messages import Answer, Rejected, Update
from w5xde.protocol.wire import Body
from w5xde.runtime.coordinator.arrivals import Arrivals
from w5xde.runtime.coordinator.peer import Peer
from w5xde.runtime.coordinator.peers import Reception
from w5xde.runtime.coordinator.steps import Stepping
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.telemetry.meters import Meters, sane_seconds

# What a node says of its losses only feeds the metrics; sums of such numbers stay numbers.
LOSS_MAX = 1e30


UNFIT = "its answer does not fit what it was lent"


def _fits(answer: Answer, apart: int, trained: frozenset[int]) -> bool:
    """Whether an answer is for so many batches that are apart, or (0) for batches that are not."""
    if not all(trained.issuperset(absent) for absent in (answer.absent, *answer.absents) if absent):
        return False
    if not apart:
        return not answer.losses and not answer.absents
    return answer.codec == NONE and len(answer.losses) == apart and len(answer.absents) in (0, apart)


def _contributions(
    answer: Answer, arrived: Iterator[tuple[Vector, float]], added_in: int | None
) -> list[Contribution]:
    """What an answer gave: one for all its batches, or one for each that is apart."""
    if not answer.losses:
        vector, norm = next(arrived)
        return [Contribution(vector, frozenset(answer.absent), answer.loss_sum, norm, added_in)]
    absents = [frozenset(each) for each in answer.absents] or [_NONE_ABSENT] * len(answer.losses)
    return [
        Contribution(vector, absent, loss, norm)
        for loss, absent, (vector, norm) in zip(answer.losses, absents, arrived, strict=False)
    ]


_NONE_ABSENT: frozenset[int] = frozenset()


class Took(NamedTuple):
    """What a batch took: in all, computing, and how much of the latter on a core."""

    batch_seconds: float
    compute_seconds: float
    core_share: float


class Intake:
    """Takes updates; `dispatch` tells the core of each answer."""

    def __init__(
        self,
        core: CoordinatorCore,
        reception: Reception,
        learner: Learner,
        actor: Actor,
        meters: Meters,
        dispatch: Callable[[ev.Event], None],
        receiver: CodecReceiver,
        stepping: Stepping,
    ) -> None:
        self._reception = reception
        self._learner = learner
        self._actor = actor
        self._meters = meters
        self._dispatch = dispatch
        self._receiver = receiver
        self._stepping = stepping
        self._loop = asyncio.get_running_loop()
        self._core = core
        self.arrivals = Arrivals(
            core, learner, actor, receiver, reception.buffers.take, dispatch, self._loop.time
        )

    def place_of(self, update: Update) -> tuple[int, ...]:
        """Where an update belongs among others: what is added first comes first."""
        lease = self._core.leases.get(update.answers[0].lease) if update.answers else None
        return (lease.step.index, lease.span.start) if lease is not None else ()

    def expect(self, peer: Peer, update: Update, body_bytes: int) -> bool:
        """An update's body is about to come: whether it may at once, or when the peer is told to go on."""
        given = self._given(peer, update)
        is_one = given is not None and len(given) == len(update.answers) == 1
        if given is None or not is_one or given[0].losses or self._length(given[0], 1) != body_bytes:
            return True
        peer.arrival_of = update
        return self.arrivals.expect(peer, given[0], body_bytes, peer.link(update))

    def broken_off(self, peer: Peer) -> None:
        """The rest of an update will never come."""
        self.arrivals.broken_off(peer)

    def _given(self, peer: Peer, update: Update) -> list[Answer] | None:
        """The answers that have something in the body; None: they do not fit what the peer was lent."""
        lent = peer.works[0][0] if peer.works else None
        if lent is None or list(lent) != [answer.lease for answer in update.answers]:
            return None
        given = [answer for answer in update.answers if not answer.dropped and not answer.failure]
        trained = self._learner.trained
        return given if all(_fits(answer, lent[answer.lease], trained) for answer in given) else None

    def updated(self, peer: Peer, update: Update, body: Body) -> None:
        given = self._given(peer, update)
        is_other = peer.arrival is not None and peer.arrival_of is not update
        if given is None or is_other:
            self._reception.turn_out(peer, UNFIT, abruptly=True)
            return
        arrival, peer.arrival = peer.arrival, None
        lent = peer.works[0][0]
        counts = [max(1, lent[answer.lease]) for answer in given]
        lengths = [self._length(answer, count) for answer, count in zip(given, counts, strict=True)]
        if arrival is None and len(body) != sum(lengths):
            self._reception.turn_out(peer, UNFIT, abruptly=True)
            return
        now = self._loop.time()
        _, batches, sent_at = peer.works.popleft()
        # Two answers may be read in one go, the second in no time: then what the node itself measured counts.
        computed = sum(sane_seconds(answer.seconds) for answer in update.answers)
        batch_seconds = max(1e-6, computed, now - max(sent_at, peer.answered_at)) / batches
        peer.answered_at = now
        meter = self._meters.node(peer.name)
        meter.seconds_waiting += sane_seconds(update.waited_seconds)
        meter.seconds_on_core += sane_seconds(update.core_seconds)
        meter.seconds_network += sane_seconds(update.network_seconds)
        meter.seconds_codec += sane_seconds(update.codec_seconds)
        meter.moved_vectors(sum(counts) * self._learner.vector_bytes, sum(lengths))
        if 0 < update.link < math.inf:
            peer.choice.link(update.link)
        for answer in update.answers:
            meter.seconds_busy += sane_seconds(answer.seconds)
        if all(answer.dropped for answer in update.answers):
            for answer in update.answers:
                self._dispatch(ev.Dropped(peer.name, answer.lease, batches))
            return
        took = Took(batch_seconds, computed / batches, sane_seconds(update.core_seconds) / (computed or 1.0))
        if arrival is not None:
            self._arrived(peer.name, update.answers, arrival, took)
            return
        specs = [answer.codec for answer in given]
        self._actor.call(
            lambda: self._check(body, specs, lengths, sum(counts)),
            lambda checked: self._checked(peer, update.answers, checked, took),
        )

    def _length(self, answer: Answer, count: int) -> int:
        return count * self._learner.vector_bytes if answer.codec == NONE else answer.body_bytes

    def _check(
        self, body: Body, specs: list[str], lengths: list[int], count: int
    ) -> list[tuple[Vector, float]] | RemoteProtocolError:
        """The vectors of an update, and the norm of each, if finite. Where the learner is."""
        gauge = self._learner.gauge
        if all(spec == NONE for spec in specs):
            vectors = self._learner.vectors(body, count)
            return list(zip(vectors, gauge.norms(body, vectors), strict=True))
        view, at, vectors = memoryview(body), 0, []
        for spec, length in zip(specs, lengths, strict=True):
            try:
                raw = self._receiver.decode(spec, view[at : at + length])
            except RemoteProtocolError as error:
                return error
            vectors.append(self._learner.vector(raw))
            at += length
        return [(vector, gauge.norm(vector)) for vector in vectors]

    def _arrived(self, node: str, answers: list[Answer], arrival: Arrival, took: Took) -> None:
        """One vector is here, looked at already, and maybe added already."""
        lease = answers[0].lease
        added_in = self.arrivals.complete(lease) if isinstance(arrival, Added) else None
        is_lost = isinstance(arrival, Added) and added_in is None
        if arrival.vector is not None and not is_lost:
            self._answered(node, answers, [(arrival.vector, arrival.norm)], took, added_in)
        elif self._core.adding.is_needless(lease, node):
            self._dispatch(ev.Answered(node, [lease], *took, norms=[arrival.norm]))
        else:
            # What is of no use to us is wanted: so it is lent again.
            self._dispatch(ev.Dropped(node, lease))

    def _checked(
        self,
        peer: Peer,
        answers: list[Answer],
        checked: list[tuple[Vector, float]] | RemoteProtocolError,
        took: Took,
    ) -> None:
        if isinstance(checked, RemoteProtocolError):
            self._reception.turn_out(peer, checked.what, abruptly=True)
        else:
            self._answered(peer.name, answers, checked, took)

    def _answered(
        self,
        node: str,
        answers: list[Answer],
        checked: list[tuple[Vector, float]],
        took: Took,
        added_in: int | None = None,
    ) -> None:
        arrived = iter(checked)
        usable: dict[int, float] = {}
        others: list[ev.Event] = []
        spoilt: int | None = None
        for answer in answers:
            if answer.dropped:
                others.append(ev.Dropped(node, answer.lease))
                continue
            if answer.failure:
                others.append(ev.Failed(node, answer.lease, answer.failure))
                continue
            given = _contributions(answer, arrived, added_in)
            if self.arrivals.is_claimed(answer.lease):
                # Somebody else's is being added just now: if that fails, this is lent again.
                others.append(ev.Dropped(node, answer.lease))
                continue
            norm = max([each.norm for each in given])
            # Not by the largest: what is not a number is larger than nothing.
            wild = [each.loss_sum for each in given if not abs(each.loss_sum) < LOSS_MAX]
            if norm < math.inf and not wild:
                self._stepping.arrived(answer.lease, given)
                usable[answer.lease] = norm
            else:
                what = "its gradient is not finite" if norm == math.inf else f"its loss is {wild[0]:g}"
                others.append(ev.Failed(node, answer.lease, what, math.inf))
                spoilt = added_in
        if self._stepping.takes_many and usable:
            self._dispatch(ev.Answered(node, list(usable), *took, norms=list(usable.values())))
        else:
            for lease, norm in usable.items():
                self._dispatch(ev.Answered(node, [lease], *took, norms=[norm]))
        for event in others:
            self._dispatch(event)
        if spoilt is not None:
            self.arrivals.spoil(node, spoilt, f"what {node} gave is not finite")

    def reject(self, effect: ev.Reject) -> None:
        for given in self._stepping.forget(effect.lease):
            if given.added_in is not None:
                self.arrivals.spoil(effect.node, given.added_in, f"what {effect.node} gave is refused")
        peer = self._reception.get(effect.node)
        if peer is not None:
            peer.connection.send(Rejected(effect.lease, effect.reason[:4000]))
