"""The intake: what nodes send, on its way to the learner. Checked, held until it is decided on, then folded.

Holds no rule: whether an answer counts is the core's to say.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from w5xde.control import events as ev
from w5xde.learn.learner import Contribution, Learner
from w5xde.messages import Answer, Rejected, Update
from w5xde.runtime.actor import Actor
from w5xde.runtime.metrics import Meters, sane_seconds
from w5xde.runtime.reception import Peer, Reception


class Intake:
    """Takes updates; `dispatch` tells the core of each answer."""

    def __init__(
        self,
        reception: Reception,
        learner: Learner,
        actor: Actor,
        meters: Meters,
        dispatch: Callable[[ev.Event], None],
    ) -> None:
        self._reception = reception
        self._learner = learner
        self._actor = actor
        self._meters = meters
        self._dispatch = dispatch
        self._loop = asyncio.get_running_loop()
        self._incoming: dict[int, Contribution] = {}

    def updated(self, peer: Peer, update: Update, body: bytearray) -> None:
        vector_bytes = self._learner.vector_bytes
        vectors = [answer for answer in update.answers if not answer.dropped and not answer.failure]
        expected = [answer.lease for answer in update.answers]
        if not peer.works or peer.works[0][0] != expected or len(body) != len(vectors) * vector_bytes:
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
        offset = 0
        for answer in update.answers:
            meter.seconds_busy += sane_seconds(answer.seconds)
            if answer.dropped:
                self._dispatch(ev.Dropped(peer.name, answer.lease))
            elif answer.failure:
                self._dispatch(ev.Failed(peer.name, answer.lease, answer.failure))
            else:
                self._check(peer, answer, body, offset, (batch_seconds, computed / batches))
                offset += vector_bytes

    def _check(
        self, peer: Peer, answer: Answer, body: bytearray, offset: int, took: tuple[float, float]
    ) -> None:
        vector = self._learner.vector(body, offset)
        self._incoming[answer.lease] = Contribution(vector, frozenset(answer.absent), answer.loss_sum)

        def checked(is_finite: bool) -> None:
            if is_finite and math.isfinite(answer.loss_sum):
                self._dispatch(ev.Answered(peer.name, answer.lease, *took))
            else:
                self._dispatch(ev.Failed(peer.name, answer.lease, "its gradient is not finite"))

        self._actor.call(lambda: self._learner.is_finite(vector), checked)

    def reject(self, effect: ev.Reject) -> None:
        self._incoming.pop(effect.lease, None)
        peer = self._reception.get(effect.node)
        if peer is not None:
            peer.connection.send(Rejected(effect.lease, effect.reason[:4000]))

    def fold(self, effect: ev.Fold) -> None:
        lease, step = effect.lease, effect.lease.step
        contribution = self._incoming.pop(lease.id)
        self._meters.node(lease.node).loss = contribution.loss_sum / lease.samples
        self._actor.call(lambda: self._learner.fold(step.index, step.count, lease.span, contribution))

    def set_aside(self, effect: ev.SetAside) -> None:
        step, span = effect.plan, effect.span
        self._actor.call(lambda: self._learner.fold(step.index, step.count, span, None))
