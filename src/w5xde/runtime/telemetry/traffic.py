"""Traffic: how many bytes went to and came from whom, also of those who are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from w5xde.runtime.coordinator.peer import Peer

# A node, and the bytes sent to it and received from it.
Moved = tuple[str, int, int]


class Traffic:
    """Counts for one reception, which tells of everybody who goes."""

    def __init__(self, everybody: Callable[[], Iterable[Peer]]) -> None:
        self._everybody = everybody
        self._gone_sent = 0
        self._gone_received = 0
        self._gone: list[Moved] = []

    @property
    def sent(self) -> int:
        return self._gone_sent + sum(peer.connection.bytes_sent for peer in self._everybody())

    @property
    def received(self) -> int:
        return self._gone_received + sum(peer.connection.bytes_received for peer in self._everybody())

    def news(self) -> list[Moved]:
        """Of each node since this was last asked."""
        found, self._gone = self._gone, []
        return found + [_untold(peer) for peer in self._everybody() if peer.is_ready]

    def gone(self, peer: Peer) -> None:
        if peer.is_ready:
            self._gone.append(_untold(peer))
        self._gone_sent += peer.connection.bytes_sent
        self._gone_received += peer.connection.bytes_received


def _untold(peer: Peer) -> Moved:
    sent, received = peer.connection.bytes_sent, peer.connection.bytes_received
    untold = (peer.name, sent - peer.told_sent, received - peer.told_received)
    peer.told_sent, peer.told_received = sent, received
    return untold
