"""Packets on their way: TUN devices, and a process that hands packets from one to another after a delay.

Linux's own delay (`tc netem`) is missing from many kernels; a TUN device gives its packets to a process
instead, which can hold them as long as it likes. Rates are not limited here. Knows nothing of the packets
except their two addresses.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from w5xde.bench.measure.processes import Line

# From <linux/if_tun.h>: the request that makes a device, and the flags for IP packets without a header.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# More than any packet of a device whose largest is 1,500 bytes.
_READ_BYTES = 2048
# Where an IPv4 packet has its addresses.
_SOURCE, _TARGET = slice(12, 16), slice(16, 20)
# Packets must not wait for a core while nodes compute: who moves them comes first, and needs little.
_NICENESS = -15


@dataclass(frozen=True, slots=True)
class Cable:
    """The open devices at both ends of a link."""

    node_end: int
    centre_end: int


def come_first(*, at_once: bool = True) -> None:
    """Let this process have a core before others; `at_once`: even if it has had much of it already."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    if at_once:
        # Where real-time processes have no share of the time, the priority must do.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def open_device(name: str) -> int:
    """Make a TUN device, which exists as long as the returned file descriptor is open somewhere."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode("ascii"), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(device)
        raise
    return device


def carry(line: Line, cables: Sequence[Cable], delay_seconds: float, centre: bytes) -> Any:
    """Forward packets until this process is killed.

    A packet to or from the `centre` (its address, as bytes) waits for the whole delay on its one link, and a
    packet between two nodes for half of it on each of its two links: so any two hosts are equally far apart.
    """
    come_first()
    other_end = {cable.node_end: cable.centre_end for cable in cables}
    other_end |= {cable.centre_end: cable.node_end for cable in cables}
    devices, number = list(other_end), 0
    # When each packet is due, a number that keeps the order, and where it goes.
    waiting: list[tuple[float, int, int, bytes]] = []
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(devices, [], [], timeout)
        for device in ready:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(device, _READ_BYTES):
                    is_direct = centre in (packet[_SOURCE], packet[_TARGET])
                    due = time.monotonic() + (delay_seconds if is_direct else delay_seconds / 2)
                    number += 1
                    heapq.heappush(waiting, (due, number, other_end[device], packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            # A device that is going down takes no packets: they are lost, as on a real link.
            with contextlib.suppress(OSError):
                os.write(target, packet)
