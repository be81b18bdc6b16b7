"""The fork server: a process that has loaded torch and the job, and forks local nodes on request.

    owner (coordinator or crew)  ── socket pair ──  guard  ── forks ──▶  fork server  ── forks ──▶  nodes

The guard is forked before its owner has sockets, so nodes share the memory of everything that is loaded and
start in milliseconds. It only waits for the fork server and forks another one if that dies. All of them end
when their owner does. A request carries descriptors of what the owner shares with the node. Decides nothing:
the owner says which node is started when, and gives the main function of a node's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from w5xde.config import Settings
from w5xde.errors import UsageError
from w5xde.learn.job.job import Job
from w5xde.runtime.system.file_lock import call_in_children
from w5xde.runtime.system.parent import leave_sigterm_to_parent
from w5xde.ticket import Ticket

# How long nodes may take to end after their owner has ended.
GRACE_SECONDS = 5.0
# A fork server that is to end and reports nothing for this long is frozen.
CLOSE_SECONDS = GRACE_SECONDS + 2.0
# The same when the nodes are killed: part of the three seconds in which a second Ctrl-C ends the program.
CLOSE_NOW_SECONDS = 0.5
# How often the fork server looks for nodes that have ended.
REAP_SECONDS = 0.1
# A fork server that dies this often in one run is killed by something that will not stop.
FORK_SERVERS_MAX = 10
# The kernel passes no more descriptors in one message, and reading never joins two such messages.
DESCRIPTORS_MAX = 253
STOP = "stop"

# Called with a kind, the name of a node and a number: ("serving", "-", pid of a new fork server),
# ("started", name, pid), ("ended", name, exit status), ("failed", name, errno), ("died", "-", 0).
Report = Callable[[str, str, int], None]


@dataclass(slots=True)
class Request:
    """Start this node on this device, or stop. The descriptors are for the node's process alone."""

    name: str
    device: str = ""
    ticket: str = ""
    descriptors: list[int] = field(default_factory=list)

    def drop(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


# The main function of a node's process.
NodeMain = Callable[[Job, Settings, Request], None]


class ForkServer:
    """The owner's side: sends requests, hands on reports."""

    def __init__(self, job: Job, settings: Settings, run_node: NodeMain) -> None:
        if not hasattr(os, "fork"):
            raise UsageError(
                "this system cannot fork, so it cannot start nodes of its own",
                code="W5-303",
                fix="run  w5xde serve  and, in other terminals,  w5xde join",
            )
        self._socket, requests = socket.socketpair()
        # In every child of ours: the fork server hears of our end only if nobody else has this socket.
        call_in_children(self._forget)
        self._text = b""
        self._report: Report = lambda kind, name, number: None
        self._server_pid = 0
        # The processes of its nodes.
        self._nodes: dict[str, int] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        # The garbage collector must leave alone what is loaded now: it writes into every object it looks at,
        # and memory that is written to is no longer shared.
        gc.freeze()

        def fork() -> int:
            pid = os.fork()
            if pid == 0:
                _run_and_exit(lambda: _guard(requests, lambda request: run_node(job, settings, request)))
            return pid

        # OpenMP's threads belong to the thread that computed with them. A fork copies only the calling
        # thread; if that had computed, the child would wait for ever for threads that it does not have.
        with ThreadPoolExecutor(max_workers=1) as fresh_thread:
            self._guard_pid = fresh_thread.submit(fork).result()
        requests.close()

    def _forget(self) -> None:
        self._socket.close()

    def watch(self, report: Report) -> None:
        """From now on call `report` on the running loop."""
        self._report = report
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def start(self, name: str, device: str, ticket: Ticket, descriptors: Sequence[int] = ()) -> None:
        """Request a node. Callers have few requests open at a time, so the socket always has room.

        The node gets copies of the descriptors.
        """
        # The socket belongs to these processes alone; arguments or environment would show the secret.
        _send(self._socket, f"{name} {device} {len(descriptors)} {ticket.to_text()}", descriptors)

    def _read(self) -> None:
        data = _receive(self._socket)
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._report("died", "-", 0)
            return
        for kind, name, number in self._take(data):
            self._report(kind, name, number)

    def _take(self, data: bytes) -> list[tuple[str, str, int]]:
        """The reports that are whole with this data; note which processes there are."""
        *lines, self._text = (self._text + data).split(b"\n")
        reports = []
        for line in lines:
            kind, name, number = line.decode().split(" ")
            reports.append((kind, name, int(number)))
            if kind == "serving":
                self._server_pid = int(number)
                self._nodes.clear()
            elif kind == "started":
                self._nodes[name] = int(number)
            elif kind == "ended":
                self._nodes.pop(name, None)
        return reports

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.close(now=kind is not None)

    def close(self, *, now: bool = False) -> None:
        """Wait until all nodes have left, or with `now` have them killed; a fork server may be frozen."""
        if self._socket.fileno() < 0:
            return
        self._socket.settimeout(CLOSE_NOW_SECONDS if now else CLOSE_SECONDS)
        try:
            if now:
                _send(self._socket, STOP)
            self._socket.shutdown(socket.SHUT_WR)
            while data := self._socket.recv(65536):
                self._take(data)
        except TimeoutError:
            # If frozen, their process ids are still their own; if only the guard is, they may be gone.
            for pid in (*self._nodes.values(), *([self._server_pid] if self._server_pid else [])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        except OSError:
            pass  # it died before
        self._socket.close()
        os.kill(self._guard_pid, signal.SIGKILL)
        os.waitpid(self._guard_pid, 0)
        gc.unfreeze()


def _run_and_exit(work: Callable[[], None]) -> None:
    """The main function of a forked process: never returns."""
    status = 1
    try:
        # Engines send SIGTERM to every process, and only the owner decides what it means.
        leave_sigterm_to_parent()
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _guard(requests: socket.socket, run_node: Callable[[Request], None]) -> None:
    """Fork a fork server, and another one each time it dies before its owner closes the socket."""
    # Ctrl-C reaches the whole process group, and only the owner decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What nodes print must not mix with the results on stdout.
    os.dup2(2, 1)
    for _ in range(FORK_SERVERS_MAX):
        pid = os.fork()
        if pid == 0:
            _run_and_exit(lambda: _serve(requests, run_node))
        if os.waitpid(pid, 0)[1] == 0:
            return


class _Requests:
    """Reads requests. Descriptors arrive with the first byte of the message that carries them."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._text = b""
        self._descriptors: deque[int] = deque()

    def read(self) -> deque[Request] | None:
        """The requests that have arrived; None if the owner has ended."""
        try:
            data, received, _, _ = socket.recv_fds(self._socket, 65536, DESCRIPTORS_MAX)
        except ConnectionResetError:
            return None
        self._descriptors.extend(received)
        *lines, self._text = (self._text + data).split(b"\n")
        return deque(self._parse(line.decode()) for line in lines) if data else None

    def _parse(self, line: str) -> Request:
        name, *rest = line.split(" ")
        if not rest:
            return Request(name)
        device, count, ticket = rest
        return Request(name, device, ticket, [self._descriptors.popleft() for _ in range(int(count))])

    def close(self) -> None:
        """In a node's process: neither requests nor what they carry concern it."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


def _serve(requests: socket.socket, run_node: Callable[[Request], None]) -> None:
    nodes: dict[int, str] = {}
    _discard(requests)
    _send(requests, f"serving - {os.getpid()}")
    reader = _Requests(requests)
    is_stopped = False
    while not is_stopped:
        if select.select([requests], [], [], REAP_SECONDS)[0]:
            asked = reader.read()
            if asked is None:
                break
            while asked:
                request = asked.popleft()
                is_stopped = is_stopped or request.name == STOP
                # The owner repeats requests of which it does not know whether this server has them.
                if not is_stopped and request.name not in nodes.values():
                    run = partial(_run_requested, reader, asked, request, run_node)
                    _send(requests, _start(nodes, request.name, run))
                request.drop()
        for name, status in _reap(nodes):
            _send(requests, f"ended {name} {status}")
    deadline = time.monotonic() + (0.0 if is_stopped else GRACE_SECONDS)
    # Each report shows an owner that waits for the end that this process is not frozen.
    while nodes and time.monotonic() < deadline:
        for name, status in _reap(nodes):
            _send(requests, f"ended {name} {status}")
        time.sleep(0.02)
    for pid in nodes:
        os.kill(pid, signal.SIGKILL)
    for pid, name in nodes.items():
        os.waitpid(pid, 0)
        _send(requests, f"ended {name} {-signal.SIGKILL}")


def _start(nodes: dict[int, str], name: str, run: Callable[[], None]) -> str:
    """Fork a process that runs a node; returns what to report of it."""
    try:
        pid = os.fork()
    except OSError as error:
        return f"failed {name} {error.errno}"
    if pid == 0:
        _run_and_exit(run)
    nodes[pid] = name
    return f"started {name} {pid}"


def _reap(nodes: dict[int, str]) -> Iterator[tuple[str, int]]:
    """The names and exit statuses of nodes that have ended."""
    while nodes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        yield nodes.pop(pid), os.waitstatus_to_exitcode(status)


def _send(sock: socket.socket, line: str, descriptors: Sequence[int] = ()) -> None:
    text = f"{line}\n".encode()
    # If the other side was killed, reading will tell.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        # They travel with the first byte; without the others it would not be a message.
        sent = socket.send_fds(sock, [text], descriptors) if descriptors else 0
        sock.sendall(text[sent:])


def _receive(sock: socket.socket) -> bytes:
    """Read the bytes that have arrived; none if the other side closed its socket or was killed."""
    try:
        return sock.recv(65536)
    except ConnectionResetError:
        return b""


def _discard(requests: socket.socket) -> None:
    """Drop requests that the fork server before this one left unread: the owner repeats them."""
    while select.select([requests], [], [], 0)[0] and _receive(requests):
        pass


def _run_requested(
    reader: _Requests, others: Iterable[Request], request: Request, run_node: Callable[[Request], None]
) -> None:
    """In a node's process: close what is not for it, then run the node."""
    reader.close()
    for other in others:
        other.drop()
    run_node(request)
