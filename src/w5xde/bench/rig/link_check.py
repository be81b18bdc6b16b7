"""Whether a rig is what it should be: the rate and the delay of each link, measured before it is used.

Delays are measured by datagrams there and back, on idle links; rates by the counters of the kernel, while
datagrams fill all links in both directions at once. Knows nothing of training.
"""

from __future__ import annotations

import socket
import statistics
import time
from typing import Any

from w5xde.bench.measure.processes import Line
from w5xde.bench.rig.hosts import HostedWork, link_bytes
from w5xde.bench.rig.namespaces import BITS_PER_BYTE, MEGA, Rig
from w5xde.bench.rig.packets import come_first
from w5xde.errors import TrainingError

# A rate or a delay that is further off than this makes every result wrong.
TOLERANCE = 0.10
# What a packet costs besides the delay, in processes that wake up.
DELAY_TOLERANCE_MS = 0.5
ECHO_PORT, FLOOD_PORT = 7007, 7009
PINGS = 10
PING_SECONDS_MAX = 5.0
# The queues of the links fill in the first part, and the second is measured.
FILL_SECONDS, FLOOD_SECONDS = 0.5, 1.5
# With its headers exactly a packet of 1,500 bytes.
DATAGRAM = bytes(1472)
CHECK_SECONDS_MAX = 60.0


def check_rig(rig: Rig) -> dict[str, Any]:
    """Measure every link. Raises TrainingError if one is not as it should be."""
    delays = _delays(rig)
    up, down = _rates(rig)
    link = rig.link
    wrong = [
        f"{name} {found:.3g} {unit} instead of {wanted:g}"
        for name, unit, wanted, figures, slack in (
            ("a delay of", "ms", link.delay_ms, delays, DELAY_TOLERANCE_MS),
            ("a rate of", "Mbit/s", link.mbit_per_second, [*up, *down], 0.0),
        )
        for found in figures
        if abs(found - wanted) > max(slack, TOLERANCE * wanted)
    ]
    if wrong:
        raise TrainingError(
            f"the links of the rig are not what was asked for: {', '.join(wrong)}",
            code="W5-320",
            why=f"more than {TOLERANCE:.0%} off; this machine may be too slow or too busy for the rate",
            fix="ask for a lower rate, or try again when nothing else runs",
        )
    return {"delays_ms": delays, "up_mbit_per_second": up, "down_mbit_per_second": down}


def _delays(rig: Rig) -> list[float]:
    """One-way delays in ms, from each node to the centre, and from each node to the next."""
    everybody = [rig.centre, *rig.nodes]
    echoes = [host.start("echo", {}, CHECK_SECONDS_MAX) for host in everybody]
    try:
        for echo in echoes:
            echo.hear()
        pairs = [(node, rig.centre) for node in rig.nodes]
        pairs += list(zip(rig.nodes[:-1], rig.nodes[1:], strict=True))
        found = []
        for source, target in pairs:
            ping = source.start("ping", {"address": target.address}, CHECK_SECONDS_MAX)
            try:
                found.append(1000 * ping.hear() / 2)
            finally:
                ping.end()
        return found
    finally:
        for echo in echoes:
            echo.end()


def _rates(rig: Rig) -> tuple[list[float], list[float]]:
    """Mbit/s from each node and to each node, all at the same time."""
    ways = [(node, rig.centre.address) for node in rig.nodes]
    ways += [(rig.centre, node.address) for node in rig.nodes]
    floods = [host.start("flood", {"address": address}, CHECK_SECONDS_MAX) for host, address in ways]
    try:
        time.sleep(FILL_SECONDS)
        before, began = [link_bytes(pid) for pid in rig.node_pids], time.monotonic()
        time.sleep(FLOOD_SECONDS)
        after, seconds = [link_bytes(pid) for pid in rig.node_pids], time.monotonic() - began
    finally:
        for flood in floods:
            flood.end()
    moved = [
        [(late - early) * BITS_PER_BYTE / MEGA / seconds for early, late in zip(*both, strict=True)]
        for both in zip(before, after, strict=True)
    ]
    return [sent for _, sent in moved], [received for received, _ in moved]


# --- processes on the hosts ---------------------------------------------------------------------------


def _socket(port: int = 0, *, at_once: bool = True) -> socket.socket:
    """A socket for datagrams, in a process that measures the link and not how busy this machine is."""
    come_first(at_once=at_once)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("0.0.0.0", port))
    return sock


def _echo(line: Line, given: dict[str, Any]) -> None:
    """Send every datagram back, until we are killed."""
    with _socket(ECHO_PORT) as sock:
        line.say("ready")
        while True:
            data, sender = sock.recvfrom(len(DATAGRAM))
            sock.sendto(data, sender)


def _ping(line: Line, given: dict[str, Any]) -> float:
    """The median of some round trips, in seconds."""
    found = []
    with _socket() as sock:
        sock.settimeout(PING_SECONDS_MAX)
        for _ in range(PINGS):
            began = time.monotonic()
            sock.sendto(b"ping", (given["address"], ECHO_PORT))
            sock.recv(len(DATAGRAM))
            found.append(time.monotonic() - began)
    return statistics.median(found)


def _flood(line: Line, given: dict[str, Any]) -> None:
    """Fill a link with datagrams that nobody reads, until we are killed."""
    with _socket(at_once=False) as sock:
        while True:
            # Waits while the queue of the link is full.
            sock.sendto(DATAGRAM, (given["address"], FLOOD_PORT))


CHECK_WORKS: dict[str, HostedWork] = {"echo": _echo, "ping": _ping, "flood": _flood}
