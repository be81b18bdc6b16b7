"""Proving: what a node must show between its welcome and its first lease, and what is wrong with it if not.

Until then it is no member: nothing waits for it, and the core has not heard of it.
"""

from __future__ import annotations

import math

from w5xde.control.pool.patience import GREETING_SECONDS
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.trust.canary import CODE, FIX, Expectation
from w5xde.messages import Canary, Ready, Refuse
from w5xde.protocol.wire import GREETING_LIMITS, Body, Limits
from w5xde.runtime.coordinator.peer import Peer
from w5xde.runtime.telemetry.meters import sane_seconds

# How long a node may take to build its model and to prove itself. It keeps nobody waiting and slow machines
# are welcome, so this is long, and longer if the canary took long here. Who is cut comes again by itself, and
# goes on with what it was doing.
PROVING_SECONDS_MIN = 600.0
PROVING_FACTOR = 1000.0
# Nobody is taken at his word to be faster or slower than the coordinator by more than this.
GUESS_FACTOR_MAX = 64.0
# Bytes a second at which a model and its first gradient may travel to and from new memory, and what they may
# take at most. Whoever seems late with a first batch only because of that would have it computed twice.
FIRST_LINK_BYTES_PER_SECOND, FIRST_MOVE_SECONDS_MAX = 200e6, 10.0


class Proving:
    """What every newcomer of a run must show."""

    def __init__(self, prepared: Prepared) -> None:
        self._expectation: Expectation | None = prepared.canary
        self._layout_digest = prepared.learner.flat.blueprint.layout.digest()
        self._batch_seconds = prepared.batch_seconds
        moved_bytes = 2 * prepared.learner.vector_bytes
        self._move_seconds = min(moved_bytes / FIRST_LINK_BYTES_PER_SECOND, FIRST_MOVE_SECONDS_MAX)
        answer_bytes = self._expectation.answer_bytes if self._expectation is not None else 0
        # Of somebody who is welcome and not ready.
        self.limits: Limits = GREETING_LIMITS._replace(body_bytes_max=answer_bytes)

    def canary(self, peer: Peer) -> tuple[Canary | None, list[Body]]:
        """What travels with a peer's welcome; nothing if it only came to look."""
        expectation = None if peer.is_looking else self._expectation
        return (None, []) if expectation is None else (expectation.message, [expectation.body])

    def objection(self, peer: Peer, ready: Ready, body: Body) -> Refuse | None:
        """Why this node may not take part; nothing if it may."""
        if peer.is_looking:
            return Refuse("W5-113", "it came to look, and not to work", fix="join with a ticket")
        if ready.layout_digest != self._layout_digest:
            return Refuse("W5-201", "the node's model differs", fix="use the coordinator's job file")
        if len(body) != self.limits.body_bytes_max:
            what = f"{len(body)} bytes came for the canary, which gives {self.limits.body_bytes_max}"
            return Refuse("W5-120", what)
        wrong = self._expectation.wrong_with(body) if self._expectation is not None else ""
        if wrong:
            what = f"a first small batch gives other gradients there: {wrong}"
            why = "another model or loss, another precision, or a device or driver that computes wrongly"
            return Refuse(CODE, what, why, FIX)
        peer.guess_seconds = self._guess_seconds(ready)
        if 0 < ready.link < math.inf:
            peer.choice.link(ready.link)
        return None

    def _guess_seconds(self, ready: Ready) -> float | None:
        """What a batch may take there: as much longer than here as the canary did, and to go and come."""
        own = self._expectation.seconds if self._expectation is not None else 0.0
        theirs = sane_seconds(ready.seconds)
        if not own or not theirs:
            return None
        factor = min(max(theirs / own, 1 / GUESS_FACTOR_MAX), GUESS_FACTOR_MAX)
        return self._batch_seconds * factor + self._move_seconds

    def complaint(self, peer: Peer, now: float, awake_since: float) -> str:
        """Why we part with somebody who is still not ready; nothing if there is time."""
        own = self._expectation.seconds if self._expectation is not None else 0.0
        # Who only looks has seen all there is.
        patience = GREETING_SECONDS if peer.is_looking else max(PROVING_SECONDS_MIN, PROVING_FACTOR * own)
        if peer.is_ready or now - max(peer.welcomed_at, awake_since) < patience:
            return ""
        return f"it was not ready after {patience:.0f} s"
