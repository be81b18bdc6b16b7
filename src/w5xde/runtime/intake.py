"""The intake: what nodes send, on its way to the learner. Checked, then the core is told.

Holds no rule: whether an answer counts is the core's to say.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import NamedTuple

from w5xde.compression import NONE
from w5xde.control import events as ev
from w5xde.control.leases import Leases
from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs.receiver import CodecReceiver
from w5xde.learn.layout import Vector
from w5xde.learn.learner import Contribution, Learner
from w5xde.messages import Answer, Rejected, Update
from w5xde.protocol.wire import Body
from w5xde.runtime.actor import Actor
from w5xde.runtime.metrics import Meters, sane_seconds
from w5xde.runtime.peer import Peer
from w5xde.runtime.reception import Reception
from w5xde.runtime.stepping import Stepping

# What a node says of its losses only feeds the metrics; sums of such numbers stay numbers.
LOSS_MAX = 1e30


class Took(NamedTuple):
    """What a batch took: in all, computing, and how much of the latter on a core."""

    batch_seconds: float
    compute_seconds: float
    core_share: float


class Intake:
    """Takes updates; `dispatch` tells the core of each answer."""

    def __init__(
        self,
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

    @staticmethod
    def place_of(update: Update, leases: Leases) -> tuple[int, ...]:
        """Where an update belongs among others: what is added first comes first."""
        lease = leases.get(update.answers[0].lease) if update.answers else None
        return (lease.step.index, lease.span.start) if lease is not None else ()

    def updated(self, peer: Peer, update: Update, body: Body) -> None:
        vectors = [answer for answer in update.answers if not answer.dropped and not answer.failure]
        expected = [answer.lease for answer in update.answers]
        lengths = [self._length(answer) for answer in vectors]
        is_known = all(self._learner.trained.issuperset(answer.absent) for answer in vectors if answer.absent)
        if not peer.works or peer.works[0][0] != expected or len(body) != sum(lengths) or not is_known:
            self._reception.turn_out(peer, "its answer does not fit what it was lent", abruptly=True)
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
        meter.moved_vectors(len(vectors) * self._learner.vector_bytes, len(body))
        if 0 < update.link < math.inf:
            peer.choice.link(update.link)
        for answer in update.answers:
            meter.seconds_busy += sane_seconds(answer.seconds)
        took = Took(batch_seconds, computed / batches, sane_seconds(update.core_seconds) / (computed or 1.0))
        specs = [answer.codec for answer in vectors]
        self._actor.call(
            lambda: self._check(body, specs, lengths),
            lambda checked: self._checked(peer, update.answers, checked, took),
        )

    def _length(self, answer: Answer) -> int:
        return self._learner.vector_bytes if answer.codec == NONE else answer.body_bytes

    def _check(
        self, body: Body, specs: list[str], lengths: list[int]
    ) -> list[tuple[Vector, float]] | RemoteProtocolError:
        """The vectors of an update, and the norm of each, if finite. Where the learner is."""
        gauge = self._learner.gauge
        if all(spec == NONE for spec in specs):
            vectors = self._learner.vectors(body, len(specs))
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
    ) -> None:
        arrived = iter(checked)
        usable: dict[int, float] = {}
        others: list[ev.Event] = []
        for answer in answers:
            if answer.dropped:
                others.append(ev.Dropped(node, answer.lease))
                continue
            if answer.failure:
                others.append(ev.Failed(node, answer.lease, answer.failure))
                continue
            vector, norm = next(arrived)
            if norm < math.inf and abs(answer.loss_sum) < LOSS_MAX:
                given = Contribution(vector, frozenset(answer.absent), answer.loss_sum, norm)
                self._stepping.arrived(answer.lease, given)
                usable[answer.lease] = norm
            else:
                what = (
                    "its gradient is not finite" if norm == math.inf else f"its loss is {answer.loss_sum:g}"
                )
                others.append(ev.Failed(node, answer.lease, what, math.inf))
        if self._stepping.takes_many and usable:
            self._dispatch(ev.Answered(node, list(usable), *took, norms=list(usable.values())))
        else:
            for lease, norm in usable.items():
                self._dispatch(ev.Answered(node, [lease], *took, norms=[norm]))
        for event in others:
            self._dispatch(event)

    def reject(self, effect: ev.Reject) -> None:
        self._stepping.forget(effect.lease)
        peer = self._reception.get(effect.node)
        if peer is not None:
            peer.connection.send(Rejected(effect.lease, effect.reason[:4000]))
