"""What a row of metrics says of each node: its rate, where its time goes, its link, codec and faults.

A row has the facts of as many nodes as its budget of bytes has room for; the others follow in the next rows,
in turn. Knows no clock and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol

from w5xde.compression import NONE
from w5xde.control.codec_choice import CodecChoice
from w5xde.learn.codecs.sender import CodecSender
from w5xde.runtime.telemetry.meters import NodeMeter

# All facts of one node take about this much of a row.
NODE_BYTES = 400
# So that the rows of a day with many nodes stay below 400 MB.
BUDGET_BYTES = 4000

GONE = "gone"


class LinkMeter(Protocol):
    """What the facts need of a connection."""

    link: float

    @property
    def round_trip_seconds(self) -> float | None: ...


class WorkUnderWay(Protocol):
    """What the facts need of work that was sent."""

    @property
    def leases(self) -> list[int]: ...


class ConnectedNode(Protocol):
    """What the facts need of a peer."""

    choice: CodecChoice
    sender: CodecSender | None

    @property
    def connection(self) -> LinkMeter: ...
    @property
    def works(self) -> Iterable[WorkUnderWay]: ...


class NodeFacts:
    """Makes the facts of the nodes of one run, in turn."""

    def __init__(
        self,
        meters: dict[str, NodeMeter],
        find: Callable[[str], ConnectedNode | None],
        faults: Callable[[str], int],
    ) -> None:
        self._meters = meters
        self._find = find
        self._faults = faults
        # Where the next row begins, and the last state that was written of each node that has left.
        self._first = 0
        self._told_gone: set[str] = set()

    def take(self, budget_bytes: int = BUDGET_BYTES) -> dict[str, dict[str, Any]]:
        """The facts of the nodes whose turn it is, by name."""
        names = [name for name in self._meters if self._is_news(name)]
        count = min(len(names), max(1, budget_bytes // NODE_BYTES))
        if not count:
            return {}
        begin = self._first % len(names)
        chosen = [*islice(names, begin, begin + count)]
        chosen += names[: count - len(chosen)]
        self._first = begin + count
        return {name: self._facts(self._meters[name]) for name in chosen}

    def _is_news(self, name: str) -> bool:
        """Whether a node still changes, or has left and no row says so yet."""
        return self._meters[name].state != GONE or name not in self._told_gone

    def _facts(self, meter: NodeMeter) -> dict[str, Any]:
        if meter.state == GONE:
            self._told_gone.add(meter.name)
        else:
            self._told_gone.discard(meter.name)
        facts = {
            "state": meter.state,
            "device": meter.device,
            "machine": meter.machine,
            "batches": meter.batches,
            "samples": meter.samples,
            "batches_per_second": round(meter.rate.per_second, 3) if meter.state != GONE else 0.0,
            "loss": meter.loss,
            "busy_seconds": round(meter.seconds_busy, 3),
            "on_core_seconds": round(meter.seconds_on_core, 3),
            "wait_seconds": round(meter.seconds_waiting, 3),
            "network_seconds": round(meter.seconds_network, 3),
            "codec_seconds": round(meter.seconds_codec, 3),
            "bytes_sent": meter.bytes_sent,
            "bytes_received": meter.bytes_received,
            "steps_ended": meter.steps_ended,
            "faults": self._faults(meter.name),
        }
        peer = self._find(meter.name)
        return facts | (_link_facts(peer, meter) if peer is not None else {})


def _link_facts(peer: ConnectedNode, meter: NodeMeter) -> dict[str, Any]:
    """The link to a node that is connected, and the codecs that are used on it."""
    round_trip = peer.connection.round_trip_seconds
    sender, link_down, link_up = peer.sender, peer.choice.link_bytes_per_second, peer.connection.link
    return {
        "codec_down": sender.spec if sender is not None else NONE,
        "codec_up": meter.codec_up or NONE,
        "codec_reason": sender.reason if sender is not None else "",
        "link_down": round(link_down) if link_down is not None else None,
        "link_up": round(link_up) if link_up else None,
        "round_trip_ms": round(round_trip * 1000, 3) if round_trip is not None else None,
        "leases": sum(len(work.leases) for work in peer.works),
    }


def states(meters: Iterable[NodeMeter]) -> dict[str, int]:
    """How many nodes are in each state."""
    found: dict[str, int] = {}
    for meter in meters:
        found[meter.state] = found.get(meter.state, 0) + 1
    return found
