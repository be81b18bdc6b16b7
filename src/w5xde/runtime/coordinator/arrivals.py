"""Arrivals: where a large update goes while it is read. To what it is added to, if that is there; else to
memory of its own; or nowhere, if somebody else was sooner.

What is half added cannot be taken out again. If the rest does not come, or nobody believes it, what it was
added to is lost too: the step is told so, and begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from w5xde.compression import NONE
from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.pool.members import STALL_SECONDS
from w5xde.control.steps.leases import Lease
from w5xde.learn.codecs.receiver import CodecReceiver
from w5xde.learn.model.buffers import POOLED_BYTES_MIN
from w5xde.learn.model.layout import Vector
from w5xde.learn.step.incoming import Added, Kept, Unwanted, Wire, Written
from w5xde.learn.step.learner import Learner
from w5xde.messages import Answer
from w5xde.runtime.coordinator.peer import Peer
from w5xde.runtime.system.actor import Actor
from w5xde.tree import Span

# Only who sends it within so long has its update added on its way: nobody else can have the place meanwhile.
QUICK_SECONDS = 1.0
# Who takes longer all the same has lost it.
PATIENCE_SECONDS = 5.0


class _Coming(NamedTuple):
    """How long a body is, and how its numbers lie in it, if not as in a vector."""

    body_bytes: int
    wire: Wire | None


@dataclass(slots=True)
class _Claim:
    """An update that is being added, and since when; void: what it is added to is of no use any more."""

    peer: Peer
    lease: Lease
    since: float
    is_void: bool = False


class Arrivals:
    """Says of each large update where it goes, while the core knows of it only when it is complete."""

    def __init__(
        self,
        core: CoordinatorCore,
        learner: Learner,
        actor: Actor,
        receiver: CodecReceiver,
        allocate: Callable[[int], bytearray | memoryview],
        dispatch: Callable[[ev.Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._learner = learner
        self._actor = actor
        self._receiver = receiver
        self._blueprint = learner.flat.blueprint
        self._allocate = allocate
        self._dispatch = dispatch
        self._clock = clock
        self._ticked_at = clock()
        self._claims: dict[int, _Claim] = {}
        # Nodes for which a step had to begin anew: they are not trusted with another. By name, and by what
        # they are known by whatever they call themselves.
        self._spoilers: set[str | bytes] = set()
        # How many steps began anew: what was asked about one before is not true any more.
        self._reopened = 0

    def expect(self, peer: Peer, answer: Answer, body_bytes: int, link: float) -> bool:
        """The vector of this answer is about to come. False: the peer will be told to go on."""
        wire = self._receiver.element_layout(answer.codec, body_bytes)
        if wire is None or self._learner.vector_bytes < POOLED_BYTES_MIN or self._actor.inline:
            return True
        coming = _Coming(body_bytes, None if answer.codec == NONE else wire)
        neighbour = self._neighbour(peer, answer.lease)
        is_trusted = self._spoilers.isdisjoint((peer.name, peer.node_id or peer.name))
        if neighbour is None or not is_trusted or not 0 < body_bytes <= QUICK_SECONDS * link:
            self._keep(peer, answer.lease, coming)
            return True
        lease, span = neighbour
        step, reopened = lease.step.index, self._reopened
        peer.is_kept_waiting = True
        self._actor.call(
            lambda: self._learner.neighbour(step, span),
            lambda vector: self._begin(peer, lease, coming, vector if reopened == self._reopened else None),
        )
        return False

    def _neighbour(self, peer: Peer, number: int) -> tuple[Lease, Span] | None:
        """The lease, and what its answer can be added to on its way."""
        adding = self._core.adding
        lease = adding.wanted(number, peer.name)
        if lease is None or self.is_claimed(number):
            return None
        span = adding.neighbour_of(lease, self._core.version)
        return None if span is None else (lease, span)

    def _keep(self, peer: Peer, number: int, coming: _Coming) -> None:
        gauge = self._learner.gauge
        if self._core.adding.is_needless(number, peer.name):
            peer.arrival = Unwanted()
            return
        memory = self._allocate(self._learner.vector_bytes)
        if coming.wire is None:
            peer.arrival = Kept(memory, self._blueprint, gauge)
        else:
            vector = self._learner.vector(torch.frombuffer(memory, dtype=torch.uint8))
            peer.arrival = Written(vector, self._blueprint, gauge, coming.body_bytes, coming.wire)

    def _begin(self, peer: Peer, lease: Lease, coming: _Coming, vector: Vector | None) -> None:
        """What the learner had there; anything may have happened since it was asked."""
        peer.is_kept_waiting = False
        if peer.is_gone:
            return
        if vector is None or self._neighbour(peer, lease.id) is None:
            self._keep(peer, lease.id, coming)
        else:
            gauge = self._learner.gauge
            peer.arrival = Added(vector, self._blueprint, gauge, coming.body_bytes, coming.wire)
            self._claims[lease.id] = _Claim(peer, lease, self._clock())
        peer.connection.go_on()

    def is_claimed(self, number: int) -> bool:
        """Whether something for the batches of this lease, or a part of them, is being added just now."""
        lease = self._core.leases.get(number) if self._claims else None
        return lease is not None and any(
            not claim.is_void
            and claim.lease.step.index == lease.step.index
            and claim.lease.span.meets(lease.span)
            for claim in self._claims.values()
        )

    def complete(self, number: int) -> int | None:
        """All of an update that was added is there: the step it belongs to, unless that began anew."""
        claim = self._claims.pop(number)
        return None if claim.is_void else claim.lease.step.index

    def broken_off(self, peer: Peer) -> None:
        """Nothing more will come from this peer."""
        peer.arrival = None
        for claim in [claim for claim in self._claims.values() if claim.peer is peer]:
            del self._claims[claim.lease.id]
            self._give_up(claim, f"{peer.name} went while what it gave was being added")

    def tick(self) -> None:
        """Give up what comes too slowly: somebody else may have it meanwhile."""
        before, self._ticked_at = self._ticked_at, self._clock()
        stood_still = max(0.0, self._ticked_at - before - STALL_SECONDS)
        for claim in list(self._claims.values()):
            # What came while it was we who stood still has not even been read.
            claim.since += stood_still
            if self._ticked_at - claim.since > PATIENCE_SECONDS:
                self._give_up(claim, f"what {claim.peer.name} gave came too slowly")

    def _give_up(self, claim: _Claim, reason: str) -> None:
        if not claim.is_void:
            claim.is_void = True
            self._spoilers.add(claim.peer.node_id or claim.peer.name)
            self.spoil(claim.peer.name, claim.lease.step.index, reason)

    def spoil(self, node: str, step: int, reason: str) -> None:
        """What this node gave was added in vain: the step begins anew, and the node is not trusted again."""
        self._spoilers.add(node)
        self._dispatch(ev.Spoilt(step, reason))

    def reopened(self, step: int) -> None:
        """The step begins anew: what is being added to what was there of it is lost."""
        self._reopened += 1
        for claim in self._claims.values():
            claim.is_void |= claim.lease.step.index == step
