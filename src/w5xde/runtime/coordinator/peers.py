"""Peers: all connections of a run, from their greeting to their end.

Everything up to `Ready` happens here; afterwards the pipeline receives a peer's updates. Before a node has
proved its identity, only its greeting is read, and only a refusal is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

import w5xde
from w5xde.control.pool.connection_limits import ConnectionLimits
from w5xde.control.pool.patience import Wakefulness
from w5xde.errors import StorageError
from w5xde.messages import (
    PROTOCOL_VERSION,
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
from w5xde.runtime.admission.gatekeeper import Admission, Gatekeeper
from w5xde.runtime.admission.register import Refused
from w5xde.runtime.coordinator.canary_check import CanaryCheck
from w5xde.runtime.net.connection import Connection, Owner
from w5xde.runtime.net.listener import Candidate
from w5xde.runtime.pipeline.peer import Peer
from w5xde.runtime.pipeline.updates import Updates
from w5xde.runtime.telemetry.traffic import Traffic

# What a node that works may say without any answers; the longest is a goodbye.
WORDS_BYTES_MAX = 4096
# What an answer says at most: a failure's text of 2,000 characters, and each entry that has no gradient.
ANSWER_BYTES_MAX, ABSENT_BYTES_MAX = 9 * 1024, 5
PARTING_SECONDS = 5.0
# An aborted connection is gone after a turn of the loop; an accepted one has opened after three.
ABORTING_SECONDS = 1.0
ACCEPTING_ROUNDS = 3


def update_limits(vectors: int, layout: Layout, vector_bytes_max: int) -> Limits:
    """How large an answer of so many vectors may be."""
    answer_bytes_max = ANSWER_BYTES_MAX + ABSENT_BYTES_MAX * len(layout.entries)
    return Limits(WORDS_BYTES_MAX + answer_bytes_max * vectors, vector_bytes_max * vectors)


class Host(Protocol):
    """The coordinator, as far as its peers need it."""

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
        entry: Gatekeeper,
        proving: CanaryCheck,
    ) -> None:
        self.entry = entry
        self.connection_limits = ConnectionLimits()
        self._host = host
        # What everybody is greeted with, but for its name and what is for it alone.
        self._greeting = welcome
        self._proving = proving
        self._vector_bytes_max = vector_bytes_max
        self._configure = configure
        self._peers: dict[str, Peer] = {}
        self._unnamed: set[Peer] = set()
        self.traffic = Traffic(self._everybody)
        self._is_closing = False
        self._wakefulness = Wakefulness()
        # When each ready peer was last heard, since these were last taken.
        self._heard_at: dict[str, float] = {}
        self._open = 0
        self._all_gone = asyncio.Event()
        self._bans = Bans(
            entry,
            lambda: [peer.node_id for peer in self if peer.node_id],
            self._evict_node,
            lambda kind, text: host.say(kind, text, ""),
            lambda error: self.turned_away("the register", error.code, error.what),
        )

    def get(self, name: str) -> Peer | None:
        return self._peers.get(name)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def _everybody(self) -> Iterator[Peer]:
        yield from list(self._peers.values())
        yield from list(self._unnamed)

    def beat(self) -> None:
        for peer in self._peers.values():
            if peer.connection.session.may_say(Beat):
                peer.connection.send(Beat())

    def allow_vectors(self, peer: Peer, count: int) -> None:
        """An answer may now be as large as this many vectors."""
        if count > peer.frame_vectors or not peer.is_ready:
            peer.frame_vectors = count
            peer.connection.limits = update_limits(count, self._greeting.layout, self._vector_bytes_max)

    # --- coming -----------------------------------------------------------------------------------

    def make_connection(self, candidate: Candidate) -> Connection:
        peer: Peer

        def opened(connection: Connection) -> None:
            self._open += 1
            if self._is_closing:
                connection.abort()
                return
            peer.heard_at = asyncio.get_running_loop().time()
            self._unnamed.add(peer)
            candidate.late = lambda reason: self._cut(peer, reason)

        def heard(connection: Connection, message: Message, body: Body) -> None:
            self._heard(peer, message, body)

        def lost(connection: Connection, reason: str) -> None:
            candidate.over()
            # Who looks at our certificate goes without a word, and so does who looks for open ports.
            self.part(peer, reason if connection.bytes_received else "")
            self._host.updates.lost(peer)
            self._open -= 1
            if not self._open:
                self._all_gone.set()

        owner = Owner(
            opened=opened,
            heard=heard,
            lost=lost,
            alive=lambda: self._noticed(peer),
            configure=self._configure,
            place=lambda message, count: self._host.updates.place(peer, count),
            admit=lambda connection, message, count: (
                not isinstance(message, Update) or self._host.updates.may_send(peer, message, count)
            ),
        )
        connection = Connection(COORDINATOR, owner)
        peer = Peer(connection, candidate)
        return connection

    def turned_away(self, address: str, kind: str, reason: str) -> None:
        """Somebody nobody knows had to go. Told once a minute for each address and kind, and counted."""
        if self.connection_limits.should_log(address, kind, asyncio.get_running_loop().time()):
            self._host.say("turned away", f"{address} was turned away: {reason}", address)

    def tick(self, now: float) -> None:
        """Let uploads continue whose turn has come; a peer that must wait is not silent by its own fault."""
        for peer in self._host.updates.tick(now):
            self._noticed(peer)
        self._bans.refresh(now)

    def take_heard(self) -> dict[str, float]:
        """When each ready peer was last heard, of those that were heard since the last call."""
        heard, self._heard_at = self._heard_at, {}
        return heard

    def hurry(self, now: float) -> None:
        """Cut connections that keep the coordinator waiting. A node that builds its model beats meanwhile."""
        awake_since = self._wakefulness.awake_since(now)
        for peer in list(self._peers.values()):
            is_waiting = self._host.updates.is_waiting(peer)
            complaint = "" if is_waiting else peer.complaint(now, awake_since)
            complaint = complaint or self._proving.complaint(peer, now, awake_since)
            if complaint:
                self._cut(peer, complaint)
        for text in self.connection_limits.log_lines(now):
            self._host.say("turned away", text, "")

    def _cut(self, peer: Peer, reason: str) -> None:
        self.part(peer, reason)
        peer.connection.abort()

    def _noticed(self, peer: Peer) -> None:
        peer.heard_at = asyncio.get_running_loop().time()
        if peer.is_ready:
            self._heard_at[peer.name] = peer.heard_at

    def _heard(self, peer: Peer, message: Message, body: Body) -> None:
        if isinstance(message, Update):
            self._host.updates.received(peer, message, body)
        elif isinstance(message, Hello):
            self._greet(peer, message)
        elif isinstance(message, Ready):
            self._ready(peer, message, body)
        elif isinstance(message, Leave):
            self.part(peer, message.reason or "it said goodbye")
            peer.connection.close()

    def _greet(self, peer: Peer, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            what = f"this node speaks protocol {hello.protocol}, the run needs {PROTOCOL_VERSION}"
            fix = f"install w5xde {w5xde.__version__} on both machines"
            self._refuse(peer, Refuse("W5-107", what, fix=fix))
        elif self.entry.is_local_node(hello):
            banned = self._bans.of_local_node(hello.name)
            if banned:
                self._refuse(peer, Refuse("W5-114", f"this node is banned from the run: {banned}"))
            else:
                self._welcome(peer, hello, Admission(is_local=True))
        else:
            asked = self.entry.admit(hello, peer.candidate.address)
            asked.add_done_callback(lambda done: self._admitted(peer, hello, done))

    def _admitted(self, peer: Peer, hello: Hello, done: asyncio.Future[Admission]) -> None:
        """The register has said who this is, or that it does not know."""
        if done.cancelled() or (done.exception() is None and (peer.is_gone or self._is_closing)):
            return
        try:
            admission = done.result()
        except Refused as refused:
            # Nodes of a killed coordinator here still look for it, and must not shut out those of the next.
            if refused.kind in ("unknown", "wrong secret") and not peer.candidate.is_here:
                self.connection_limits.failed(peer.candidate.address, asyncio.get_running_loop().time())
            if not peer.is_gone:
                self._refuse(peer, Refuse(refused.code, refused.what, refused.why, refused.fix))
            return
        except StorageError as error:
            self.turned_away("the register", error.code, error.what)
            if not peer.is_gone:
                # Its folder is no stranger's business.
                self._refuse(peer, Refuse(error.code, "the coordinator cannot use its register of tickets"))
            return
        self._welcome(peer, hello, admission)

    def _welcome(self, peer: Peer, hello: Hello, admission: Admission) -> None:
        """It has shown who it is."""
        peer.candidate.over()
        run = self._greeting.run
        if hello.run not in ("", run):
            what = f"the run here is {run}, not {hello.run}"
            self._refuse(peer, Refuse("W5-109", what, fix="join again by hand"))
            return
        peer.name = self._bans.assign_name(hello, admission, self._peers)
        if peer.name in self._peers:
            # If that is what is left of a broken connection, nobody hears it.
            copied = "another node came with its credential: was the state folder copied?"
            self.evict(self._peers[peer.name], copied if admission.node_id else "it was started again")
        self._unnamed.discard(peer)
        peer.node_id, peer.is_looking = admission.node_id, hello.looks
        peer.device, peer.machine, peer.cores = hello.device, hello.machine, hello.cores
        peer.welcomed_at = asyncio.get_running_loop().time()
        self._peers[peer.name] = peer
        if admission.credential:
            ticket, node = admission.ticket_id.hex()[:8], admission.node_id.hex()
            self._host.say("admitted", f"{peer.name} came by ticket {ticket}, and is node {node}", peer.name)
        peer.connection.limits = self._proving.limits
        canary, pieces = self._proving.canary(peer)
        own = {"name": peer.name, "credential": admission.credential, "canary": canary}
        peer.connection.send(msgspec.structs.replace(self._greeting, **own), pieces)

    def _ready(self, peer: Peer, ready: Ready, body: Body) -> None:
        objection = self._proving.objection(peer, ready, body)
        if objection is not None:
            self._refuse(peer, objection)
            return
        self.allow_vectors(peer, 1)
        peer.is_ready = True
        self._host.joined(peer)

    def _refuse(self, peer: Peer, refusal: Refuse) -> None:
        if peer.name:
            self._host.say("turned away", f"{peer.name} was refused: {refusal.what}", peer.name)
        else:
            self.turned_away(peer.candidate.address, refusal.code, refusal.what)
        peer.connection.send(refusal)
        peer.is_gone = True
        self._forget(peer)
        peer.connection.close()

    # --- going ------------------------------------------------------------------------------------

    def part(self, peer: Peer, reason: str) -> None:
        """The peer is gone, or is as good as gone."""
        if peer.is_gone:
            return
        peer.is_gone = True
        self._forget(peer)
        if self._is_closing:
            return  # everybody goes: that is no news
        if peer.is_ready:
            self._host.left(peer, reason)
        elif peer.name:
            self._host.say("turned away", f"{peer.name} did not join: {reason}", peer.name)
        elif reason:
            self.turned_away(peer.candidate.address, peer.connection.fault or "no greeting", reason)

    def _forget(self, peer: Peer) -> None:
        self._unnamed.discard(peer)
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        self.traffic.gone(peer)

    def _evict_node(self, node_id: bytes, reason: str) -> None:
        for peer in self:
            if peer.node_id == node_id and not self._is_closing:
                self.evict(peer, reason)

    def evict(self, peer: Peer, reason: str, *, abruptly: bool = False) -> None:
        """Part with a peer that misbehaved or fell silent."""
        if peer.connection.session.may_say(Bye) and not abruptly:
            peer.connection.send(Bye(reason[:4000], finished=False))
        self.part(peer, reason)
        (peer.connection.abort if abruptly else peer.connection.close)()

    def ban(self, name: str, reason: str) -> None:
        """Let a node in no more, whether it is here or has gone."""
        self._bans.ban(name, reason)
        # The core closes the connections of ready nodes; it has not heard of others.
        peer = self._peers.get(name)
        if peer is not None and not peer.is_ready:
            self.evict(peer, reason)

    async def close(self, reason: str, parting_seconds: float) -> None:
        """The run is over: say goodbye, and let last words arrive, but not for ever."""
        self._is_closing = True
        self._all_gone.clear()
        # Somebody may be just coming in: let them, so that they are sent away like everybody else.
        for _ in range(ACCEPTING_ROUNDS):
            await asyncio.sleep(0)
        for peer in self._everybody():
            if peer.connection.session.may_say(Bye):
                # They hang up when they have read it; hanging up first, with an answer of theirs unread,
                # would reset the connection and our goodbye with it.
                peer.connection.send(Bye(reason[:4000], finished=True))
            else:
                peer.connection.close()
        await self._wait_until_gone(parting_seconds)
        for peer in self._everybody():
            peer.connection.abort()
        await self._wait_until_gone(ABORTING_SECONDS)
        self.entry.close()

    async def _wait_until_gone(self, seconds: float) -> None:
        if self._open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), seconds)
