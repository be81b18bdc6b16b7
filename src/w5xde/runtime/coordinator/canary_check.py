"""Canary check: what a node must prove between its welcome and its first lease.

Until it has passed, a node is not a member: no step waits for it, and the core does not know it. The device
that a node claims to have never exempts it from a check.
"""

from __future__ import annotations

import math
import os

from w5xde.control.pool.patience import GREETING_SECONDS, complain_if_unready
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.trust.canary import CODE, FIX, ExpectedCanary
from w5xde.messages import Canary, Ready, Refuse
from w5xde.protocol.wire import GREETING_LIMITS, Body, Limits
from w5xde.runtime.pipeline.peer import AnnouncedCache, Peer
from w5xde.sanitize import sane_seconds

# How long a node may take to build its model and to compute the canary. No other node waits for it and slow
# machines are welcome, so this is long, and longer if the canary took long here. A node that is cut off
# reconnects by itself and continues.
CHECK_SECONDS_MIN = 600.0
CHECK_FACTOR = 1000.0
# A node's claim to be faster or slower than the coordinator counts up to this factor.
GUESS_FACTOR_MAX = 64.0
# Bytes a second at which a model and its first gradient may travel to and from new memory, and the most
# seconds assumed for that. Without this time a first batch would seem late, and be lent twice.
FIRST_LINK_BYTES_PER_SECOND, FIRST_MOVE_SECONDS_MAX = 200e6, 10.0


class CanaryCheck:
    """Checks every node that joins a run. `verifies`: answers will be compared with the coordinator's."""

    def __init__(self, prepared: Prepared, *, verifies: bool) -> None:
        self._expected: ExpectedCanary | None = prepared.canary
        self._must_draw_alike = verifies and prepared.draws_torch
        self._own_seconds = self._expected.seconds if self._expected is not None else 0.0
        self._layout_digest = prepared.learner.flat.blueprint.layout.digest()
        self._batch_seconds = prepared.batch_seconds
        moved_bytes = 2 * prepared.learner.vector_bytes
        self._move_seconds = min(moved_bytes / FIRST_LINK_BYTES_PER_SECOND, FIRST_MOVE_SECONDS_MAX)
        self._answer_bytes = self._expected.answer_bytes if self._expected is not None else 0
        # Only nodes that keep samples say which.
        self._slots_max = prepared.rules.data_samples if prepared.rules.data == "cached" else 0
        # What a node that works may send between its welcome and its first lease.
        body_bytes_max = self._answer_bytes + _bitmap_bytes(self._slots_max)
        self.limits: Limits = GREETING_LIMITS._replace(body_bytes_max=body_bytes_max)

    def canary(self, peer: Peer) -> tuple[Canary | None, list[Body]]:
        """Return what travels with a peer's welcome: no canary if it joined only to look."""
        if peer.is_looking:
            # Bytes that nothing on the way can compress: the peer measures how fast they arrive.
            return None, [bytearray(os.urandom(peer.probe_bytes))] if peer.probe_bytes else []
        expected = self._expected
        return (None, []) if expected is None else (expected.message, [expected.body])

    def limits_of(self, peer: Peer) -> Limits:
        """Return what a peer may send between its welcome and its first lease."""
        return self.limits._replace(body_bytes_max=peer.probe_bytes) if peer.is_looking else self.limits

    def objection(self, peer: Peer, ready: Ready, body: Body) -> Refuse | None:
        """Return why this node may not take part, or None if it may."""
        if peer.is_looking:
            return Refuse("W5-113", "it came to look, and not to work", fix="join with a ticket")
        if ready.layout_digest != self._layout_digest:
            return Refuse("W5-201", "the node's model differs", fix="use the coordinator's job file")
        if ready.cache_slots > self._slots_max or bool(ready.cache_slots) != bool(ready.cache):
            return Refuse(
                "W5-120", f"a cache of {ready.cache_slots} samples; at most {self._slots_max} exist"
            )
        expected_bytes = self._answer_bytes + _bitmap_bytes(ready.cache_slots)
        if len(body) != expected_bytes:
            return Refuse("W5-120", f"{len(body)} bytes came for canary and cache, and not {expected_bytes}")
        body, held = body[: self._answer_bytes], body[self._answer_bytes :]
        if self._must_draw_alike and not self._draws_alike(peer, body):
            what = "this node draws other random numbers than the coordinator, so it cannot be verified"
            why = "the loss draws random numbers, and this run compares updates with its own (--verify)"
            return Refuse("W5-214", what, why, "join with --devices cpu, or start the run without --verify")
        wrong = self._expected.find_mismatch(body) if self._expected is not None else ""
        if wrong:
            what = f"a first small batch gives other gradients there: {wrong}"
            why = "another model or loss, another precision, or a device or driver that computes wrongly"
            return Refuse(CODE, what, why, FIX)
        if ready.cache_slots:
            peer.announced = AnnouncedCache(ready.cache, ready.cache_slots, bytes(held))
        peer.guess_seconds = self._guess_seconds(ready)
        if 0 < ready.link < math.inf:
            peer.choice.link(ready.link)
        return None

    def _draws_alike(self, peer: Peer, body: Body) -> bool:
        # Without a canary there is only the node's word. It can exclude a node here, and exempt none.
        return self._expected.draws_alike(body) if self._expected is not None else peer.device == "cpu"

    def _guess_seconds(self, ready: Ready) -> float | None:
        """Estimate the time of a batch there from the canary's time there and here, and the transfer."""
        theirs = sane_seconds(ready.seconds)
        if not self._own_seconds or not theirs:
            return None
        factor = min(max(theirs / self._own_seconds, 1 / GUESS_FACTOR_MAX), GUESS_FACTOR_MAX)
        return self._batch_seconds * factor + self._move_seconds

    def complaint(self, peer: Peer, now: float, awake_since: float) -> str:
        """Return why a peer that is still not ready is cut off, or an empty string if it has time left."""
        # A peer that joined only to look has seen everything.
        patience = max(CHECK_SECONDS_MIN, CHECK_FACTOR * self._own_seconds)
        patience = GREETING_SECONDS if peer.is_looking else patience
        return "" if peer.is_ready else complain_if_unready(peer.welcomed_at, patience, now, awake_since)


def _bitmap_bytes(slots: int) -> int:
    return -(-slots // 8)
