"""Local nodes: processes forked from one that has loaded torch and the job, and nothing else.

The nursery is forked before there are threads or sockets; it forks a node whenever it is asked to, so that
nodes share the memory of what is loaded and start in milliseconds. It ends when its owner does.
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
from collections.abc import Callable

import msgspec

from w5xde.config import Settings
from w5xde.errors import UsageError, W5xdeError
from w5xde.learn.job.job import Job
from w5xde.runtime.admission.node_pass import NodePass
from w5xde.runtime.node.body import Node
from w5xde.runtime.node.exit_status import exit_status
from w5xde.ticket import Ticket, parse

# How long nodes may take to part after their owner has gone.
GRACE_SECONDS = 5.0
# How long a new node looks for a coordinator that is just about to listen.
START_SECONDS = 10.0


class Nursery:
    """Starts local nodes, and tells when one has ended."""

    def __init__(self, job: Job, settings: Settings) -> None:
        if not hasattr(os, "fork"):
            raise UsageError(
                "this system cannot fork, so it cannot start nodes of its own",
                code="W5-303",
                fix="run  w5xde serve  and, in other terminals,  w5xde join",
            )
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        # What is here now the garbage collector leaves alone from now on: looking writes into every object,
        # and what is written is no longer shared by all processes.
        gc.freeze()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _be_nursery(theirs, job, settings)
        theirs.close()
        self._socket = ours
        self._text = b""
        self._ended: Callable[[str, int], None] = lambda name, status: None
        self._died: Callable[[], None] = lambda: None
        self._started: Callable[[str, int], None] = lambda name, pid: None

    def watch(
        self,
        started: Callable[[str, int], None],
        ended: Callable[[str, int], None],
        died: Callable[[], None],
    ) -> None:
        """From now on tell of nodes' beginnings (name, pid) and ends (name, exit status), and of our own."""
        self._started, self._ended, self._died = started, ended, died
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def start(self, name: str, ticket: Ticket) -> None:
        # Over a socket that no other process has: neither arguments nor environment show the secret.
        self._socket.sendall(f"{name} {ticket.to_text()}\n".encode())

    def _read(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._died()
            return
        self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            word, name, number = line.decode().split(" ")
            (self._started if word == "started" else self._ended)(name, int(number))

    def close(self, *, now: bool = False) -> None:
        """Let the nodes end by themselves, or stop them now; in any case they are gone afterwards."""
        self._socket.close()
        if now:
            os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)
        gc.unfreeze()


def _be_nursery(requests: socket.socket, job: Job, settings: Settings) -> None:
    """Never returns. Ctrl-C reaches the whole group: our owner decides what it means, not we."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # What nodes print must not mix with the results on stdout.
        os.dup2(2, 1)
        _serve(requests, job, settings)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve(requests: socket.socket, job: Job, settings: Settings) -> None:
    nodes: dict[int, str] = {}

    def stop_now(number: int, frame: object) -> None:
        for pid in nodes:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop_now)
    text = b""
    while True:
        readable, _, _ = select.select([requests], [], [], 0.1)
        if readable:
            data = _receive(requests)
            if not data:
                break
            text += data
            *lines, text = text.split(b"\n")
            for line in lines:
                name, ticket = line.decode().split(" ")
                pid = os.fork()
                if pid == 0:
                    requests.close()
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    _be_node(job, name, parse(ticket), settings)
                nodes[pid] = name
                _tell(requests, f"started {name} {pid}\n")
        for pid, status in _reap(nodes):
            _tell(requests, f"ended {nodes.pop(pid)} {status}\n")
    deadline = time.monotonic() + GRACE_SECONDS
    while nodes and time.monotonic() < deadline:
        for pid, _ in _reap(nodes):
            del nodes[pid]
        time.sleep(0.02)
    for pid in nodes:
        os.kill(pid, signal.SIGKILL)


def _tell(requests: socket.socket, text: str) -> None:
    # An owner that was killed hears nothing; reading will tell that it is gone.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        requests.sendall(text.encode())


def _receive(requests: socket.socket) -> bytes:
    """What our owner asks for; nothing if it is gone, however that came about."""
    try:
        return requests.recv(65536)
    except ConnectionResetError:
        return b""


def _reap(nodes: dict[int, str]) -> list[tuple[int, int]]:
    ended = []
    for pid in nodes:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _be_node(job: Job, name: str, ticket: Ticket, settings: Settings) -> None:
    """Never returns."""
    status, owner = W5xdeError.exit_code, os.getppid()
    _yield_to_coordinator()
    try:
        own = msgspec.structs.replace(settings, node_name=name, wait=START_SECONDS)
        asyncio.run(_until_orphaned(Node(job, NodePass(ticket, keeps=False), own)))
        status = 0
    except W5xdeError as error:
        status = exit_status(error)
        if settings.log != "silent" and os.getppid() == owner:
            print(f"{name}: {error.lines()[0]}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _yield_to_coordinator() -> None:
    """A node that is woken must not push the coordinator off its core: all others wait for that one.

    Measured on two cores: otherwise a third of the coordinator's time passes inside `send`.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


async def _until_orphaned(node: Node) -> None:
    """A local node ends with its coordinator: whoever restarts it starts new ones."""
    owner = os.getppid()
    running = asyncio.ensure_future(node.run())
    while not running.done():
        await asyncio.wait([running], timeout=1.0)
        if os.getppid() != owner:
            running.cancel()
            return
    running.result()
