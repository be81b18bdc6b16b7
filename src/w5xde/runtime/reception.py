"""The reception: who comes, who is let in, and who goes. One door, one place that checks.

Everything up to `Ready` happens here; afterwards the coordinator hears of a peer's updates and of its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import w5xde
from w5xde.control.choice import CodecChoice
from w5xde.learn.codecs.sender import CodecSender
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
    Rules,
    Update,
    Welcome,
)
from w5xde.protocol.session import COORDINATOR
from w5xde.protocol.wire import Body, Limits
from w5xde.runtime.buffers import POOLED_BYTES_MIN, Buffers
from w5xde.runtime.gate import Gate
from w5xde.runtime.transport import Connection

# Answers to a few dozen leases, each with a failure's text at most.
UPDATE_META_BYTES_MAX = 1024 * 1024
# Unfinished greetings at one time; more are strangers who fill our memory.
UNNAMED_MAX = 64
GREETING_SECONDS = 10.0
PARTING_SECONDS = 5.0
# An aborted connection is gone after a turn of the loop; an accepted one has opened after three.
ABORTING_SECONDS = 1.0
ACCEPTING_ROUNDS = 3


@dataclass(slots=True, eq=False)
class Peer:
    """A node's connection, and what was sent over it."""

    connection: Connection
    name: str = ""
    device: str = ""
    machine: str = ""
    cores: int = 0
    is_ready: bool = False
    is_gone: bool = False
    # The version it was last sent, and the newest that is on its way to it.
    version: int = -1
    version_asked: int = -1
    # Works on their way: (leases, batches, when sent); answers come in the same order.
    works: deque[tuple[list[int], int, float]] = field(default_factory=deque)
    heard_at: float = 0.0
    answered_at: float = 0.0
    frame_leases: int = 1
    # What of its traffic has been told.
    told_sent: int = 0
    told_received: int = 0
    # How parameters are encoded for it, once that is worth thinking about.
    sender: CodecSender | None = None
    choice: CodecChoice = field(default_factory=CodecChoice)


class Host(Protocol):
    """Whom the reception tells."""

    def joined(self, peer: Peer) -> None: ...
    def heard_from(self, peer: Peer) -> None: ...
    def updated(self, peer: Peer, update: Update, body: Body) -> None: ...
    def place_of(self, update: Update) -> tuple[int, ...]: ...
    def left(self, peer: Peer, reason: str) -> None: ...
    def note(self, kind: str, text: str, node: str) -> None: ...


class Reception:
    """All connections of a run."""

    def __init__(
        self,
        host: Host,
        *,
        run: str,
        incarnation: int,
        layout: Layout,
        rules: Rules,
        vector_bytes_max: int,
        configure: Callable[[Any], None],
    ) -> None:
        self._host = host
        self._run = run
        self._incarnation = incarnation
        self._layout = layout
        self._layout_digest = layout.digest()
        self._rules = rules
        self._vector_bytes_max = vector_bytes_max
        self._configure = configure
        self._buffers = Buffers()
        self._gate = Gate()
        self._peers: dict[str, Peer] = {}
        self._unnamed: set[Peer] = set()
        self._gone_bytes_sent = 0
        self._gone_bytes_received = 0
        self._gone_traffic: list[tuple[str, int, int]] = []
        self._is_closing = False
        self._open = 0
        self._all_gone = asyncio.Event()

    def get(self, name: str) -> Peer | None:
        return self._peers.get(name)

    @property
    def peers(self) -> list[Peer]:
        return list(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)

    def _everybody(self) -> Iterator[Peer]:
        yield from list(self._peers.values())
        yield from list(self._unnamed)

    @property
    def bytes_sent(self) -> int:
        return self._gone_bytes_sent + sum(p.connection.bytes_sent for p in self._everybody())

    @property
    def bytes_received(self) -> int:
        return self._gone_bytes_received + sum(p.connection.bytes_received for p in self._everybody())

    def traffic(self) -> list[tuple[str, int, int]]:
        """(node, bytes sent, bytes received) since this was last asked, also of nodes that went meanwhile."""
        found, self._gone_traffic = self._gone_traffic, []
        return found + [self._untold(peer) for peer in self._peers.values() if peer.is_ready]

    @staticmethod
    def _untold(peer: Peer) -> tuple[str, int, int]:
        sent, received = peer.connection.bytes_sent, peer.connection.bytes_received
        untold = (peer.name, sent - peer.told_sent, received - peer.told_received)
        peer.told_sent, peer.told_received = sent, received
        return untold

    def beat(self) -> None:
        for peer in self._peers.values():
            if peer.connection.session.may_say(Beat):
                peer.connection.send(Beat())

    def allow_leases(self, peer: Peer, leases: int) -> None:
        """An answer may now be as large as this many vectors."""
        if leases > peer.frame_leases or not peer.is_ready:
            peer.frame_leases = leases
            peer.connection.limits = Limits(UPDATE_META_BYTES_MAX, self._vector_bytes_max * leases)

    # --- coming -----------------------------------------------------------------------------------

    def make_connection(self) -> Connection:
        peer: Peer

        def opened(connection: Connection) -> None:
            self._open += 1
            if self._is_closing or len(self._unnamed) >= UNNAMED_MAX:
                connection.abort()
                return
            peer.heard_at = asyncio.get_running_loop().time()
            self._unnamed.add(peer)

        def heard(connection: Connection, message: Message, body: Body) -> None:
            self._heard(peer, message, body)

        def lost(connection: Connection, reason: str) -> None:
            self._gate.done(connection, asyncio.get_running_loop().time())
            self.part(peer, reason)
            self._open -= 1
            if not self._open:
                self._all_gone.set()

        peer = Peer(
            Connection(
                COORDINATOR,
                opened=opened,
                heard=heard,
                lost=lost,
                alive=lambda: self._noticed(peer),
                configure=self._configure,
                place=lambda message, count: self._buffers.take(count),
                admit=self._admit,
            )
        )
        return peer.connection

    def _admit(self, connection: Connection, message: Message, body_bytes: int) -> bool:
        place = self._host.place_of(message) if isinstance(message, Update) else ()
        return self._gate.ask(connection, place, body_bytes, asyncio.get_running_loop().time())

    def tick(self, now: float) -> None:
        """Let in who has waited long enough; nobody whom we keep waiting is called silent."""
        self._gate.tick(now)
        waiting = self._gate.waiting
        for peer in self._peers.values() if waiting else ():
            if peer.connection in waiting:
                self._noticed(peer)

    def hurry(self, now: float) -> None:
        """Part with those who began to greet and then said nothing. Building a model may take long: nodes
        beat meanwhile."""
        for peer in self._everybody():
            if not peer.is_ready and now - peer.heard_at > GREETING_SECONDS:
                self.part(peer, f"it said nothing for {GREETING_SECONDS:.0f} s")
                peer.connection.abort()

    def _noticed(self, peer: Peer) -> None:
        peer.heard_at = asyncio.get_running_loop().time()
        if peer.is_ready:
            self._host.heard_from(peer)

    def _heard(self, peer: Peer, message: Message, body: Body) -> None:
        if isinstance(message, Update):
            if len(body) >= POOLED_BYTES_MIN:
                # A small one may come while the next, a large one, is already waiting at the gate.
                self._gate.done(peer.connection, peer.heard_at)
            self._host.updated(peer, message, body)
        elif isinstance(message, Hello):
            self._greet(peer, message)
        elif isinstance(message, Ready):
            self._ready(peer, message)
        elif isinstance(message, Leave):
            self.part(peer, message.reason or "it said goodbye")
            peer.connection.close()

    def _greet(self, peer: Peer, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            what = f"this node speaks protocol {hello.protocol}, the run needs {PROTOCOL_VERSION}"
            fix = f"install w5xde {w5xde.__version__} on both machines"
            self._refuse(peer, Refuse("W5-107", what, fix=fix))
            return
        if hello.run not in ("", self._run):
            what = f"the run here is {self._run}, not {hello.run}"
            self._refuse(peer, Refuse("W5-109", what, fix="join again by hand"))
            return
        self._unnamed.discard(peer)
        peer.name = self._free_name(hello.name)
        peer.device = hello.device
        peer.machine, peer.cores = hello.machine, hello.cores
        self._peers[peer.name] = peer
        peer.connection.send(
            Welcome(
                run=self._run,
                incarnation=self._incarnation,
                name=peer.name,
                layout=self._layout,
                rules=self._rules,
            )
        )

    def _free_name(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._peers:
            number += 1
            name = f"{wanted[:58]}-{number}"
        return name

    def _ready(self, peer: Peer, ready: Ready) -> None:
        if ready.layout_digest != self._layout_digest:
            self._refuse(
                peer, Refuse("W5-201", "the node's model differs", fix="use the coordinator's job file")
            )
            return
        self.allow_leases(peer, 1)
        peer.is_ready = True
        self._host.joined(peer)

    def _refuse(self, peer: Peer, refusal: Refuse) -> None:
        who = peer.name or peer.connection.peer
        self._host.note("turned away", f"{who} was refused: {refusal.what}", who)
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
        who = peer.name or peer.connection.peer
        if self._is_closing:
            return  # everybody goes: that is no news
        if peer.is_ready:
            self._host.left(peer, reason)
        else:
            self._host.note("turned away", f"{who} did not join: {reason}", who)

    def _forget(self, peer: Peer) -> None:
        self._unnamed.discard(peer)
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        if peer.is_ready:
            self._gone_traffic.append(self._untold(peer))
        self._gone_bytes_sent += peer.connection.bytes_sent
        self._gone_bytes_received += peer.connection.bytes_received

    def turn_out(self, peer: Peer, reason: str, *, abruptly: bool = False) -> None:
        """Part with a peer that misbehaved or fell silent."""
        if peer.connection.session.may_say(Bye) and not abruptly:
            peer.connection.send(Bye(reason[:4000], finished=False))
        self.part(peer, reason)
        (peer.connection.abort if abruptly else peer.connection.close)()

    async def close(self, reason: str) -> None:
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
        await self._wait_until_gone(PARTING_SECONDS)
        for peer in self._everybody():
            peer.connection.abort()
        await self._wait_until_gone(ABORTING_SECONDS)

    async def _wait_until_gone(self, seconds: float) -> None:
        if self._open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), seconds)
