"""Traffic: bytes sent to and received from each node, including nodes that have left.

Reads the counters of connections. Knows nothing of what they carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

# A node's name, and the bytes sent to it and received from it.
Moved = tuple[str, int, int]


class ByteCounts(Protocol):
    """What traffic needs of a connection."""

    bytes_sent: int
    bytes_received: int


class TrafficPeer(Protocol):
    """What traffic needs of a peer."""

    name: str
    is_ready: bool

    @property
    def connection(self) -> ByteCounts: ...


class Traffic:
    """Counts for all peers of one coordinator, which reports each peer that leaves."""

    def __init__(self, peers: Callable[[], Iterable[TrafficPeer]]) -> None:
        self._peers = peers
        self._gone_sent = 0
        self._gone_received = 0
        self._gone: list[Moved] = []
        # How much of each peer's traffic `news` has reported.
        self._reported: dict[TrafficPeer, tuple[int, int]] = {}

    @property
    def sent(self) -> int:
        return self._gone_sent + sum(peer.connection.bytes_sent for peer in self._peers())

    @property
    def received(self) -> int:
        return self._gone_received + sum(peer.connection.bytes_received for peer in self._peers())

    def news(self) -> list[Moved]:
        """What each ready node moved since the last call."""
        found, self._gone = self._gone, []
        return found + [self._unreported(peer) for peer in self._peers() if peer.is_ready]

    def gone(self, peer: TrafficPeer) -> None:
        """Take over the counts of a peer that leaves."""
        if peer.is_ready:
            self._gone.append(self._unreported(peer))
        self._reported.pop(peer, None)
        self._gone_sent += peer.connection.bytes_sent
        self._gone_received += peer.connection.bytes_received

    def _unreported(self, peer: TrafficPeer) -> Moved:
        sent, received = peer.connection.bytes_sent, peer.connection.bytes_received
        sent_before, received_before = self._reported.get(peer, (0, 0))
        self._reported[peer] = (sent, received)
        return peer.name, sent - sent_before, received - received_before
