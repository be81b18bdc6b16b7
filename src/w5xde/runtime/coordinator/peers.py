"""Peers: all connections of a run, from the greeting of a node to the close.

Everything up to `Ready` happens here; afterwards the pipeline receives the peer's updates. Before a node has
proved its identity, only its greeting is read, and only a refusal is sent. Lends nothing, and knows no
tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from w5xde.control.pool.connection_limits import ConnectionLimits
from w5xde.control.pool.patience import Wakefulness
from w5xde.learn.job.code.packages import differences_text
from w5xde.messages import (
    Beat,
    Bye,
    Hello,
    Layout,
    Leave,
    Message,
    Ready,
    Refuse,
    Update,
    Welcome,
)
from w5xde.protocol.session import COORDINATOR
from w5xde.protocol.wire import Body, Limits
from w5xde.runtime.admission.bans import Bans
from w5xde.runtime.admission.code_offers import CodeOffers
from w5xde.runtime.admission.gatekeeper import Admission, Gatekeeper
from w5xde.runtime.admission.reception import Reception
from w5xde.runtime.coordinator.canary_check import CanaryCheck
from w5xde.runtime.net.connection import Connection, Owner
from w5xde.runtime.net.listener import Candidate
from w5xde.runtime.pipeline.peer import Peer
from w5xde.runtime.pipeline.updates import Updates
from w5xde.runtime.telemetry.traffic import Traffic

# The longest description of a message from a node that has joined, without answers: a goodbye is the longest.
WORDS_BYTES_MAX = 4096
# The most that an answer adds to it: the text of a failure (2,000 characters), and the index of each entry
# that has no gradient.
ANSWER_BYTES_MAX, ABSENT_BYTES_MAX = 9 * 1024, 5
REPLICA_LOST = "has other parameters than we have: it gets them anew, and its work is lent again"
# How long nodes get at the end of a run to read their goodbye and close the connection.
PARTING_SECONDS = 5.0
# An aborted connection is lost after one turn of the event loop, for which this is plenty; an accepted one
# has opened after three turns.
ABORTING_SECONDS = 1.0
ACCEPTING_ROUNDS = 3


def update_limits(vectors: int, layout: Layout, vector_bytes_max: int) -> Limits:
    """How large an update with this many vectors may be."""
    answer_bytes_max = ANSWER_BYTES_MAX + ABSENT_BYTES_MAX * len(layout.entries)
    return Limits(WORDS_BYTES_MAX + answer_bytes_max * vectors, vector_bytes_max * vectors)


class Host(Protocol):
    """The part of the coordinator that its peers use."""

    @property
    def updates(self) -> Updates: ...
    def joined(self, peer: Peer) -> None: ...
    def left(self, peer: Peer, reason: str) -> None: ...
    def say(self, kind: str, text: str, node: str) -> None: ...


class Peers:
    """All connections of a run."""

    def __init__(
        self,
        host: Host,
        *,
        welcome: Welcome,
        vector_bytes_max: int,
        configure: Callable[[Any], None],
        gatekeeper: Gatekeeper,
        canary_check: CanaryCheck,
    ) -> None:
        self.gatekeeper = gatekeeper
        self.connection_limits = ConnectionLimits()
        self._host = host
        # The welcome of every node, without the fields that differ from node to node.
        self._greeting = welcome
        self._canary_check = canary_check
        self._vector_bytes_max = vector_bytes_max
        self._configure = configure
        self._peers: dict[str, Peer] = {}
        self._unnamed: set[Peer] = set()
        self.traffic = Traffic(self._all_connections)
        self._is_closing = False
        self._wakefulness = Wakefulness()
        # When each ready peer was last heard; only those heard since the last `take_heard`.
        self._heard_at: dict[str, float] = {}
        # Every connection that is open, also of peers that are refused or evicted and must only close it.
        self._open: set[Connection] = set()
        self._all_gone = asyncio.Event()
        # The code of the job, for nodes that ask for it.
        self.offers = CodeOffers()
        self._bans = Bans(
            gatekeeper,
            lambda: [peer.node_id for peer in self if peer.node_id],
            self._evict_node,
            lambda kind, text: host.say(kind, text, ""),
            lambda error: self.log_refusal("the register", error.code, error.what),
        )
        self._reception = Reception(gatekeeper, self._bans, self.connection_limits, self.log_refusal)

    def get(self, name: str) -> Peer | None:
        return self._peers.get(name)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def _all_connections(self) -> Iterator[Peer]:
        """Every peer, with those that have not been welcomed yet."""
        yield from list(self._peers.values())
        yield from list(self._unnamed)

    def beat(self) -> None:
        """Send a heartbeat to every peer that may receive one."""
        for peer in self._peers.values():
            if peer.connection.session.may_say(Beat):
                peer.connection.send(Beat())

    def allow_vectors(self, peer: Peer, count: int) -> None:
        """Raise the limits of the peer's connection, so that an update may have this many vectors."""
        if count > peer.frame_vectors or not peer.is_ready:
            peer.frame_vectors = count
            peer.connection.limits = update_limits(count, self._greeting.layout, self._vector_bytes_max)

    # --- joining ----------------------------------------------------------------------------------

    def make_connection(self, candidate: Candidate) -> Connection:
        """Make a connection that reports to this table, for a client that the listener accepted."""
        peer: Peer

        def opened(connection: Connection) -> None:
            self._open.add(connection)
            if self._is_closing:
                connection.abort()
                return
            peer.heard_at = asyncio.get_running_loop().time()
            self._unnamed.add(peer)
            candidate.late = lambda reason: self._abort(peer, reason)

        def heard(connection: Connection, message: Message, body: Body) -> None:
            self._on_message(peer, message, body)

        def lost(connection: Connection, reason: str) -> None:
            candidate.over()
            # A client that sends nothing is not logged: it only looked at the certificate, or scanned ports.
            self._remove(peer, reason if connection.bytes_received else "")
            self._host.updates.lost(peer)
            self._open.discard(connection)
            if not self._open:
                self._all_gone.set()

        owner = Owner(
            opened=opened,
            heard=heard,
            lost=lost,
            alive=lambda: self._note_heard(peer),
            configure=self._configure,
            place=lambda message, count: self._host.updates.place(peer, count),
            admit=lambda connection, message, count: (
                not isinstance(message, Update) or self._host.updates.may_send(peer, message, count)
            ),
        )
        connection = Connection(COORDINATOR, owner)
        peer = Peer(connection, candidate)
        return connection

    def log_refusal(self, address: str, kind: str, reason: str) -> None:
        """Log that an unknown client was refused, at most once a minute for each address and kind."""
        if self.connection_limits.should_log(address, kind, asyncio.get_running_loop().time()):
            self._host.say("turned away", f"{address} was turned away: {reason}", address)

    def tick(self, now: float) -> None:
        """Let uploads continue whose turn has come. A peer that we keep waiting does not count as silent."""
        for peer in self._host.updates.tick(now):
            self._note_heard(peer)
        self._bans.refresh(now)

    def take_heard(self) -> dict[str, float]:
        """When each ready peer was last heard, for those that were heard since the last call."""
        heard, self._heard_at = self._heard_at, {}
        return heard

    def close_slow_peers(self, now: float) -> None:
        """Close connections that are silent, stuck or too slow. A node that builds its model still beats."""
        awake_since = self._wakefulness.awake_since(now)
        for peer in list(self._peers.values()):
            is_waiting = self._host.updates.is_waiting(peer)
            complaint = "" if is_waiting else peer.complaint(now, awake_since)
            complaint = complaint or self._canary_check.complaint(peer, now, awake_since)
            if complaint:
                self._abort(peer, complaint)
        for text in self.connection_limits.log_lines(now):
            self._host.say("turned away", text, "")

    def _abort(self, peer: Peer, reason: str) -> None:
        """Remove a peer, and close its connection without a goodbye."""
        self._remove(peer, reason)
        peer.connection.abort()

    def _note_heard(self, peer: Peer) -> None:
        """Note that bytes of the peer arrived, or that we keep it waiting."""
        peer.heard_at = asyncio.get_running_loop().time()
        if peer.is_ready:
            self._heard_at[peer.name] = peer.heard_at

    def _on_message(self, peer: Peer, message: Message, body: Body) -> None:
        if isinstance(message, Update):
            self._host.updates.received(peer, message, body)
        elif isinstance(message, Hello):
            self._reception.greet(
                message, peer.candidate, lambda answer: self._answered(peer, message, answer)
            )
        elif isinstance(message, Ready):
            self._ready(peer, message, body)
        elif isinstance(message, Leave):
            self._remove(peer, message.reason or "it said goodbye")
            peer.connection.close()

    def _answered(self, peer: Peer, hello: Hello, answer: Admission | Refuse) -> None:
        """Welcome or refuse a node, or send it the job's code, now that the reception has answered."""
        if peer.is_gone or (self._is_closing and isinstance(answer, Admission)):
            return
        if isinstance(answer, Refuse):
            self._refuse(peer, answer)
        elif hello.looks and hello.asks_code:
            self._send_code(peer)
        else:
            self._welcome(peer, hello, answer)

    def _send_code(self, peer: Peer) -> None:
        peer.candidate.over()
        refusal = self.offers.send(peer.connection)
        if refusal is not None:
            self._refuse(peer, refusal)
            return
        peer.is_gone = True
        self._drop_from_tables(peer)
        address = peer.candidate.address
        if news := self.offers.news(address):
            self._host.say("code", news, address)

    def _welcome(self, peer: Peer, hello: Hello, admission: Admission) -> None:
        """Give a node that has proved its identity a name, and send it the welcome."""
        peer.candidate.over()
        run = self._greeting.run
        if hello.run not in ("", run):
            what = f"the run here is {run}, not {hello.run}"
            self._refuse(peer, Refuse("W5-109", what, fix="join again by hand"))
            return
        peer.name = self._bans.assign_name(hello, admission, self._peers)
        if peer.name in self._peers:
            # The older peer may be a broken connection; then its goodbye is never read.
            copied = "another node came with its credential: was the state folder copied?"
            self.evict(self._peers[peer.name], copied if admission.node_id else "it was started again")
        if hello.shares and admission.share is not None:
            # After the older peer is evicted, whose updates lie there too.
            admission.share.updates.reset()
            peer.connection.share(admission.share)
        self._unnamed.discard(peer)
        peer.node_id, peer.is_looking, peer.probe_bytes = admission.node_id, hello.looks, hello.probe
        peer.device, peer.machine, peer.cores = hello.device, hello.machine, hello.cores
        peer.welcomed_at = asyncio.get_running_loop().time()
        self._peers[peer.name] = peer
        if admission.credential:
            ticket, node = admission.ticket_id.hex()[:8], admission.node_id.hex()
            self._host.say("admitted", f"{peer.name} came by ticket {ticket}, and is node {node}", peer.name)
        peer.connection.limits = self._canary_check.limits_of(peer)
        canary, pieces = self._canary_check.canary(peer)
        own = {"name": peer.name, "credential": admission.credential, "canary": canary}
        peer.connection.send(msgspec.structs.replace(self._greeting, **own), pieces)

    def _ready(self, peer: Peer, ready: Ready, body: Body) -> None:
        """Check a node that has built its model, and let it join or refuse it."""
        objection = self._canary_check.objection(peer, ready, body)
        if objection is not None:
            self._refuse(peer, objection)
            return
        self.allow_vectors(peer, 1)
        peer.become_ready(ready)
        self._host.joined(peer)
        if ready.versions:
            differing = differences_text(ready.versions, self._greeting.versions, "here")
            self._host.say(
                "versions", f"{peer.name} has other versions, which can change bits: {differing}", peer.name
            )

    def note_replica(self, peer: Peer) -> None:
        """Log that the parameters of this peer went wrong, and that it gets them anew."""
        self._host.say("replica", f"{peer.name} {REPLICA_LOST}", peer.name)

    def _refuse(self, peer: Peer, refusal: Refuse) -> None:
        """Log and send a refusal, and close the connection."""
        if peer.name and not peer.is_looking:
            self._host.say("turned away", f"{peer.name} was refused: {refusal.what}", peer.name)
        else:
            self.log_refusal(peer.candidate.address, refusal.code, refusal.what)
        peer.connection.send(refusal)
        peer.is_gone = True
        self._drop_from_tables(peer)
        peer.connection.close()

    # --- leaving ----------------------------------------------------------------------------------

    def _remove(self, peer: Peer, reason: str) -> None:
        """Remove a peer whose connection is lost or about to be closed, and report that once."""
        if peer.is_gone:
            return
        peer.is_gone = True
        self._drop_from_tables(peer)
        if self._is_closing:
            return  # at the end of a run every node leaves: that is not reported
        if peer.is_ready:
            self._host.left(peer, reason)
        elif peer.name:
            self._host.say("turned away", f"{peer.name} did not join: {reason}", peer.name)
        elif reason:
            self.log_refusal(peer.candidate.address, peer.connection.fault or "no greeting", reason)

    def _drop_from_tables(self, peer: Peer) -> None:
        self._unnamed.discard(peer)
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        self.traffic.gone(peer)

    def _evict_node(self, node_id: bytes, reason: str) -> None:
        """Evict the peer with this id, because its credential was banned."""
        for peer in self:
            if peer.node_id == node_id and not self._is_closing:
                self.evict(peer, reason)

    def evict(self, peer: Peer, reason: str, *, abruptly: bool = False) -> None:
        """Remove a peer and close its connection; unless `abruptly`, send it the reason."""
        if peer.connection.session.may_say(Bye) and not abruptly:
            peer.connection.send(Bye(reason[:4000], finished=False, counted=peer.counted))
        self._remove(peer, reason)
        (peer.connection.abort if abruptly else peer.connection.close)()

    def ban(self, name: str, reason: str) -> None:
        """Never admit this node again, whether it is connected now or not."""
        self._bans.ban(name, reason)
        # The core closes the connections of ready nodes; it has not heard of others.
        peer = self._peers.get(name)
        if peer is not None and not peer.is_ready:
            self.evict(peer, reason)

    async def close(self, reason: str, parting_seconds: float, *, stopped: bool) -> None:
        """End all connections: send every node a goodbye, and wait at most this long for them to close.

        `stopped`: the run was stopped before it was over.
        """
        self._is_closing = True
        self._all_gone.clear()
        # A connection that was just accepted opens first, and is then closed like all others.
        for _ in range(ACCEPTING_ROUNDS):
            await asyncio.sleep(0)
        for peer in self._all_connections():
            if peer.connection.session.may_say(Bye):
                # A node closes the connection when it has read this. If we closed it first, with an update of
                # the node unread, the connection would be reset and the goodbye lost.
                peer.connection.send(Bye(reason[:4000], True, stopped=stopped, counted=peer.counted))
            else:
                peer.connection.close()
        self._host.updates.close()
        await self._wait_until_gone(parting_seconds)
        for connection in list(self._open):
            connection.abort()
        await self._wait_until_gone(ABORTING_SECONDS)
        self.gatekeeper.close()

    async def _wait_until_gone(self, seconds: float) -> None:
        if self._open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), seconds)
