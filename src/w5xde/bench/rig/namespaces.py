"""Slow links that are real to every program: hosts in network namespaces, a rate and a delay between them.

    node 1 ── rate, delay ──┐
    node 2 ── rate, delay ──┤ the centre: the coordinator's host, which also forwards from node to node
    node 3 ── rate, delay ──┘

Each node has one link, as a home has; `tc tbf` limits its rate in each direction, and `packets` adds the
delay. Any two hosts are the same delay apart. The centre has one link for each node, so only the nodes' own
links are narrow. Everything is removed at the end. Knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from w5xde.bench.measure.meter import cpu_seconds
from w5xde.bench.measure.processes import Line, crew
from w5xde.bench.rig.hosts import DEVICE, RigHost
from w5xde.bench.rig.packets import Cable, carry, open_device
from w5xde.errors import TrainingError, UsageError

# Addresses of the hosts, of a private network that few use. They exist in our namespaces alone.
CENTRE = ipaddress.IPv4Address("10.213.0.1")
FIRST_NODE = ipaddress.IPv4Address("10.213.0.10")
NODES_MAX = 64
# Bytes that pass at once after a pause: a few packets, and never less than the rate brings while the kernel
# sleeps for one tick of its clock.
BURST_BYTES_MIN, TICK_SECONDS = 16_000, 0.004
# What waits at the entrance of a link before packets are dropped: at least this, and otherwise what the link
# carries in one and a half round trips, as home routers have it or more.
QUEUE_BYTES_MIN, QUEUE_ROUND_TRIPS = 64_000, 1.5
BITS_PER_BYTE, MEGA = 8, 1e6
COMMAND_SECONDS = 20.0
# Longer than any benchmark: the process that delays packets ends with its rig.
RIG_SECONDS_MAX = 7 * 24 * 3600.0
# What a shell says of a process that was ended by SIGTERM.
TERMINATED = 143
_OURS = re.compile(r"w5xde-(\d+)-(?:centre|node-\d+)")


@dataclass(frozen=True, slots=True)
class SlowLink:
    """What each node's link carries in each direction, and how long a packet takes."""

    mbit_per_second: float
    delay_ms: float

    @property
    def bytes_per_second(self) -> float:
        return self.mbit_per_second * MEGA / BITS_PER_BYTE

    @property
    def delay_seconds(self) -> float:
        return self.delay_ms / 1000

    @property
    def burst_bytes(self) -> int:
        return max(BURST_BYTES_MIN, round(2 * TICK_SECONDS * self.bytes_per_second))

    @property
    def queue_bytes(self) -> int:
        waiting = QUEUE_ROUND_TRIPS * 2 * self.delay_seconds * self.bytes_per_second
        return max(QUEUE_BYTES_MIN, 2 * self.burst_bytes, round(waiting))

    @property
    def title(self) -> str:
        return f"{self.mbit_per_second:g} Mbit/s, {self.delay_ms:g} ms"


@dataclass(slots=True)
class Rig:
    """The hosts, ready to start processes."""

    link: SlowLink
    centre: RigHost
    nodes: list[RigHost]
    _carrier_pid: int

    @property
    def node_pids(self) -> list[int]:
        """Processes in the namespaces of the nodes, by which others find the counters of the links."""
        return [node.pid for node in self.nodes]

    def carrier_seconds(self) -> float:
        """CPU seconds that the delay of packets has taken so far."""
        return cpu_seconds([self._carrier_pid])


def require_rig() -> None:
    """Refuse if this system cannot build a rig, and say what is missing."""
    if os.name != "posix" or os.uname().sysname != "Linux":
        raise _cannot("network namespaces are a part of Linux", "run it on Linux, or leave out --rig")
    if os.geteuid() != 0:
        raise _cannot("only root may make network namespaces", "run it as root, or leave out --rig")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        fix = "install them (Debian: apt-get install iproute2), or leave out --rig"
        raise _cannot(f"the commands {' and '.join(missing)} are missing", fix)
    if not Path("/dev/net/tun").exists():
        raise _cannot("/dev/net/tun is missing, which delays packets", "load the kernel module tun")


def _cannot(why: str, fix: str) -> UsageError:
    return UsageError("the rig of slow links cannot be built here", code="W5-303", why=why, fix=fix)


@contextlib.contextmanager
def build_rig(nodes: int, link: SlowLink, module: str) -> Iterator[Rig]:
    """Build a rig whose hosts run this module, which calls `be_host`; all of it is removed at the end."""
    require_rig()
    _remove_leftovers()
    with ExitStack() as stack:
        # Without this, SIGTERM would end us at once and leave the namespaces behind.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
        stack.callback(signal.signal, signal.SIGTERM, before)
        # Hosts keep their keys and caches to themselves.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="w5xde-rig-"))
        centre = _add_namespace(stack, "centre")
        spaces = [_add_namespace(stack, f"node-{number + 1}") for number in range(nodes)]
        cables = [_lay_cable(stack, centre, space, number, link) for number, space in enumerate(spaces)]

        def delay(line: Line) -> None:
            carry(line, cables, link.delay_seconds, CENTRE.packed)

        [carrier] = stack.enter_context(crew({"the delay of packets": delay}, RIG_SECONDS_MAX))
        variables = {"W5XDE_STATE": f"{folder}/state", "W5XDE_CACHE": f"{folder}/cache"}
        hosts = []
        for number, space in enumerate([centre, *spaces]):
            address = str(FIRST_NODE + number - 1 if number else CENTRE)
            hosts.append(RigHost(space, address, module, variables))
            stack.callback(hosts[-1].end)
        for host in hosts:
            host.wait()
        yield Rig(link, hosts[0], hosts[1:], carrier.pid)


def _remove_leftovers() -> None:
    """Remove the namespaces of benchmarks that were killed."""
    for name in _run("ip", "netns", "list").split():
        found = _OURS.fullmatch(name)
        if found is not None and not psutil.pid_exists(int(found[1])):
            _run("ip", "netns", "delete", name)


def _add_namespace(stack: ExitStack, name: str) -> str:
    space = f"w5xde-{os.getpid()}-{name}"
    _run("ip", "netns", "add", space)
    stack.callback(_run, "ip", "netns", "delete", space)
    _run("ip", "-n", space, "link", "set", "lo", "up")
    # The second: or a connection would begin with what the kernel has learnt from the contestant before.
    settings = {"ip_forward": 1, "tcp_no_metrics_save": 1}
    script = "; ".join(f"echo {value} > /proc/sys/net/ipv4/{key}" for key, value in settings.items())
    _run("ip", "netns", "exec", space, "sh", "-ec", script)
    return space


def _lay_cable(stack: ExitStack, centre: str, space: str, number: int, link: SlowLink) -> Cable:
    """Make both devices of a node's link, give them addresses, and limit their rates."""
    node = str(FIRST_NODE + number)
    ends = (
        (f"w5xn{os.getpid()}-{number}", space, DEVICE, node, str(CENTRE)),
        (f"w5xc{os.getpid()}-{number}", centre, f"wan{number + 1}", str(CENTRE), node),
    )
    devices = []
    for made, home, device, own, other in ends:
        devices.append(open_device(made))
        stack.callback(os.close, devices[-1])
        # No address of IPv6: the kernel would send packets of its own, and gloo would choose it.
        _run("ip", "link", "set", made, "addrgenmode", "none")
        _run("ip", "link", "set", made, "netns", home, "name", device)
        _run("ip", "-n", home, "address", "add", own, "peer", other, "dev", device)
        _run("ip", "-n", home, "link", "set", device, "up")
        shape = f"rate {link.mbit_per_second}mbit burst {link.burst_bytes} limit {link.queue_bytes}"
        _run("tc", "-n", home, "qdisc", "add", "dev", device, "root", "tbf", *shape.split())
    _run("ip", "-n", space, "route", "add", "default", "dev", DEVICE)
    return Cable(*devices)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        raise TrainingError(
            f"{' '.join(words)} failed: {done.stderr.strip() or done.returncode}",
            code="W5-320",
            why="the rig of slow links needs network namespaces, TUN devices and tc tbf",
        )
    return done.stdout
