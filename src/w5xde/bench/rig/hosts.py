"""Hosts: processes inside network namespaces, which start the processes of a measurement there.

A process can only be born in a namespace, or move there with a call that Python has not before 3.12. So each
host is started by `ip netns exec`, loads torch once, and then forks a process for each order. Orders name one
of the works that the host knows, because functions cannot be sent. Knows nothing of the works.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from w5xde.bench.measure.processes import CrewMember, Line, end_process, fork_member, warm_up
from w5xde.errors import TrainingError

# Seconds until a host has loaded torch, and until it answers an order.
START_SECONDS, ANSWER_SECONDS = 120.0, 30.0
# An order names a work and its arguments; a packet of a Unix socket may hold this many bytes by default.
ORDER_BYTES_MAX = 64 * 1024
# The device of a node's link.
DEVICE = "wan0"

HostedWork = Callable[[Line, dict[str, Any]], Any]


class Order(msgspec.Struct):
    """What the benchmark asks of a host: to start a work, or to end the process of one."""

    work: str = ""
    given: dict[str, Any] = {}
    seconds_max: float = 0.0
    ended_pid: int = 0


class RigHost:
    """A process inside a namespace, as seen by the benchmark."""

    def __init__(self, namespace: str, address: str, module: str, variables: Mapping[str, str]) -> None:
        self.address = address
        self._name = namespace
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = ["ip", "netns", "exec", namespace, sys.executable, "-m", module, str(theirs.fileno())]
            self._process = subprocess.Popen(
                words, env={**os.environ, **variables}, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Wait until it is ready."""
        self._hear(START_SECONDS)

    def _hear(self, seconds: float) -> bytes:
        self._control.settimeout(seconds)
        try:
            said = self._control.recv(ORDER_BYTES_MAX)
        except OSError as error:
            raise TrainingError(f"host {self._name} does not answer: {error}", code="W5-320") from None
        if not said:
            raise TrainingError(f"host {self._name} has ended", code="W5-320")
        return said

    def start(self, work: str, given: dict[str, Any], seconds_max: float) -> HostedProcess:
        """Start a process that does this work, for at most so many seconds."""
        ours, theirs = socket.socketpair()
        with theirs:
            order = Order(work, given, seconds_max)
            socket.send_fds(self._control, [msgspec.json.encode(order)], [theirs.fileno()])
        line = Line(ours, f"{work} on {self._name}")
        return HostedProcess(self, int(self._hear(ANSWER_SECONDS)), line, seconds_max)

    def end_member(self, pid: int) -> None:
        """Kill a process that this host has started, and all that it has started."""
        self._control.sendall(msgspec.json.encode(Order(ended_pid=pid)))
        self._hear(ANSWER_SECONDS)

    def end(self) -> None:
        """Kill the host and all processes that it has started."""
        self._control.close()
        end_process(self.pid)
        # The process is reaped; this only tells the object so.
        self._process.poll()


class HostedProcess(CrewMember):
    """A process that a host has started."""

    def __init__(self, host: RigHost, pid: int, line: Line, patience_seconds: float) -> None:
        super().__init__(pid, line, patience_seconds)
        self._host = host

    def end(self) -> None:
        self.close()
        self._host.end_member(self.pid)


def link_bytes(pid: int) -> tuple[int, int]:
    """Bytes received and sent by the link of the node in whose namespace this process is."""
    for line in Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == DEVICE:
            numbers = counts.split()
            return int(numbers[0]), int(numbers[8])
    raise TrainingError(f"process {pid} has no device {DEVICE}", code="W5-320")


def moved_bytes(pids: Iterable[int]) -> int:
    """Bytes that the links of these nodes have carried, both ways together, as the kernel counts them."""
    return sum(sum(link_bytes(pid)) for pid in pids)


def be_host(works: Mapping[str, HostedWork], descriptor: int) -> None:
    """The process of a host: obey orders until the benchmark is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    warm_up()
    control.sendall(b"ready")
    members: set[int] = set()
    while True:
        text, descriptors, _, _ = socket.recv_fds(control, ORDER_BYTES_MAX, 1)
        if not text:
            break
        order = msgspec.json.decode(text, type=Order)
        if order.ended_pid:
            end_process(order.ended_pid)
            members.discard(order.ended_pid)
            control.sendall(b"ended")
            continue
        with socket.socket(fileno=descriptors[0]) as theirs:
            pid = fork_member(_bound(works[order.work], order.given), theirs, order.seconds_max, [control])
        members.add(pid)
        control.sendall(b"%d" % pid)
    for pid in members:
        end_process(pid)


def _bound(work: HostedWork, given: dict[str, Any]) -> Callable[[Line], Any]:
    return lambda line: work(line, given)
