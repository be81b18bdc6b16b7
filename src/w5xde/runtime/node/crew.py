"""A crew: the process that minds all nodes which one `w5xde join` runs on its machine.

Starts them by a fork server as `control/pool/crew.py` decides, adds up what they report, and tells the user
of each event once. Computes nothing and has no connection: every node is an ordinary node of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from w5xde import errors
from w5xde.callbacks import Callback
from w5xde.callbacks.status import CrewReport, NodeReport
from w5xde.config import Settings
from w5xde.control.node import LEFT
from w5xde.control.pool.crew import CrewCore, CrewDecision, LeaveAll
from w5xde.control.pool.node_processes import StartNode, TellUser
from w5xde.errors import JoinError, W5xdeError
from w5xde.runtime.admission.ticket_source import TicketSource
from w5xde.runtime.node.crew_node import HURRY, JOINED, NodeNews, ToldError
from w5xde.runtime.node.exit_status import describe_status
from w5xde.runtime.node.fork_server import ForkServer
from w5xde.runtime.system.capacity import little_memory_text, plan_nodes
from w5xde.runtime.system.machine import host_name
from w5xde.runtime.telemetry.callback_runner import CallbackRunner

TICK_SECONDS = 0.1
# Events that come within this time are told together.
GATHER_SECONDS = 0.3
# Longer lists of names are cut.
NAMES_SHOWN = 3


@dataclass(slots=True, eq=False)
class _Life:
    """One process of a node: its channel, and its newest news."""

    name: str
    channel: socket.socket
    report: NodeReport
    pid: int = 0
    is_joined: bool = False
    error: W5xdeError | None = None
    text: bytes = b""
    threads: int = 0
    state_bytes: int = 0


@dataclass(slots=True)
class _Gathered:
    """Nodes of which the same is to be told."""

    kind: str
    text: str
    names: list[str] = field(default_factory=list)


class Crew:
    """All nodes of one command on this machine."""

    def __init__(
        self,
        server: ForkServer,
        devices: list[str],
        source: TicketSource,
        settings: Settings,
        note: Callable[[str, str], None],
        callbacks: Iterable[Callback] = (),
    ) -> None:
        """`devices`: those of this machine that nodes may use."""
        self._server = server
        self._source = source
        # Answers to nodes that asked for the newest ticket.
        self._answers: set[asyncio.Task[None]] = set()
        self._devices, self._count = devices, settings.node_count
        self._note = note
        self._callbacks = CallbackRunner(callbacks, lambda text: note("callback failed", text))
        self._stem = settings.node_name or host_name()
        # With one thread each: the first node learns how many threads the run uses.
        self._plan = plan_nodes(devices, 1, self._count)
        most = len(self._plan.devices)
        self._names = [self._stem, *(f"{self._stem}-{number}" for number in range(2, most + 1))]
        self._core = CrewCore(self._names)
        self._lives: dict[str, _Life] = {}
        # Reports of processes that were started again.
        self._past: list[NodeReport] = []
        self._has_room = False
        self._gathered: list[_Gathered] = []
        self._finished: NodeReport | None = None
        # Whether the nodes were told to leave in a hurry: then it is no error if none of them said goodbye.
        self._has_left = False
        self._first_error: W5xdeError | None = None

    async def run(self) -> CrewReport:
        """Mind the nodes until the last has ended. Raises the first error if none of them ended in order."""
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        self._server.watch(self._on_report)
        self._ticker = self._loop.call_later(0.0, self._tick)
        try:
            await self._over
        finally:
            self._ticker.cancel()
            for answer in self._answers:
                answer.cancel()
            self._tell_gathered()
            for life in self._lives.values():
                self._close(life)
        if self._finished is not None or self._has_left:
            reason = self._finished.reason if self._finished is not None else LEFT
            return dataclasses.replace(self.report, reason=reason)
        raise self._first_error or JoinError(
            "every node of this machine was killed, or could not be started",
            code="W5-280",
            fix="free memory, or start fewer with --nodes 1;  w5xde doctor  looks for the cause",
        )

    def leave(self, *, hurries: bool = False) -> None:
        """Have every node leave the run after the message in progress, or in a hurry."""
        self._perform(self._core.leave_in_a_hurry(self._loop.time()) if hurries else self._core.leave())

    @property
    def working(self) -> int:
        """How many nodes have joined and run."""
        return sum(life.is_joined for life in self._lives.values())

    @property
    def report(self) -> CrewReport:
        """The totals of all nodes together."""
        return CrewReport.of(self._stem, [*self._past, *(life.report for life in self._lives.values())])

    # --- processes ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        if not self._has_room:
            self._look_for_room()
        self._perform(self._core.tick(self._loop.time()))
        self._end_if_over()

    def _look_for_room(self) -> None:
        """Let more nodes follow the first once it is known how many there is room for."""
        first = self._lives.get(self._names[0])
        if first is None or not first.is_joined:
            return
        plan = plan_nodes(self._devices, first.threads, self._count)
        fitting = plan.fitting(first.state_bytes, first.pid if first.report.batches else None)
        if fitting is None:
            return
        self._has_room, self._plan = True, plan
        self._core.processes.allow(fitting)
        if fitting < len(plan.devices):
            self._note("little memory", little_memory_text(fitting, plan))

    def _on_report(self, kind: str, name: str, number: int) -> None:
        """The fork server reports; the number is a process id, an exit status or an error number."""
        now = self._loop.time()
        match kind:
            case "serving":
                self._perform(self._core.serving())
            case "started":
                self._lives[name].pid = number
                self._core.started(name, now)
            case "ended":
                self._perform(self._core.ended(name, number, now, self._ended(name, number)))
            case "failed":
                self._perform(self._core.failed(name, os.strerror(number)))
            case "died":
                self._perform(self._core.server_died())
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._core.is_over and not self._over.done():
            self._over.set_result(None)

    def _ended(self, name: str, status: int) -> str:
        """Read the last news of a process that has ended, and return what its status says."""
        life = self._lives[name]
        self._read(life)
        self._close(life)
        life.is_joined = False
        if status == 0:
            self._finished = self._finished or life.report
        if life.error is None:
            return describe_status(status)
        self._first_error = self._first_error or life.error
        return f"error[{life.error.code}]: {life.error.what}"

    def _perform(self, decisions: list[CrewDecision]) -> None:
        for decision in decisions:
            match decision:
                case StartNode():
                    self._start(decision.name)
                case TellUser():
                    self._gather("failed", decision.text, decision.name)
                case LeaveAll():
                    self._has_left = self._has_left or decision.hurries
                    for life in self._lives.values():
                        # Its node sees the end of the channel.
                        with contextlib.suppress(OSError):
                            life.channel.send(HURRY if decision.hurries else b"")
                            life.channel.shutdown(socket.SHUT_WR)

    def _start(self, name: str) -> None:
        before = self._lives.pop(name, None)
        if before is not None:
            self._close(before)
            self._past.append(before.report)
        own, others = socket.socketpair()
        own.setblocking(False)
        life = self._lives[name] = _Life(name, own, NodeReport(name))
        self._loop.add_reader(own, self._read, life)
        device = self._plan.devices[self._names.index(name)]
        with others:
            self._server.start(name, device, self._source.ticket, [others.fileno()])

    # --- news -----------------------------------------------------------------------------------------

    def _read(self, life: _Life) -> None:
        """Take the news that a node has sent."""
        while life.channel.fileno() >= 0:
            try:
                data = life.channel.recv(65536)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self._loop.remove_reader(life.channel)
                return
            *lines, life.text = (life.text + data).split(b"\n")
            for line in lines:
                self._take(life, msgspec.json.decode(line, type=NodeNews))

    def _take(self, life: _Life, news: NodeNews) -> None:
        life.report = NodeReport(**news.report)
        life.threads, life.state_bytes = news.threads, news.state_bytes
        if news.asks:
            answer = self._loop.create_task(self._answer(life))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)
        if news.error is not None:
            life.error = told_error(news.error)
        if news.note is not None:
            kind, text = news.note
            if kind == JOINED:
                life.is_joined = True
                self._core.joined(life.name)
            self._gather(kind, text, life.report.name)
        batches, losses = news.worked
        if batches:
            self._callbacks.worked(life.report, batches, losses / batches)

    async def _answer(self, life: _Life) -> None:
        """Tell a node the newest ticket; while none can be found, the one of before."""
        try:
            ticket = await self._source.look()
        except W5xdeError as error:
            self._note("ticket", error.what)
            ticket = self._source.ticket
        with contextlib.suppress(OSError):
            life.channel.send(f"{ticket.to_text()}\n".encode())

    def _gather(self, kind: str, text: str, name: str) -> None:
        """Tell the user something of a node, together with what other nodes say at the same time."""
        if name:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", "{}", text)
        for each in self._gathered:
            if (each.kind, each.text) == (kind, text):
                each.names += [name] if name not in each.names else []
                return
        if not self._gathered:
            self._loop.call_later(GATHER_SECONDS, self._tell_gathered)
        self._gathered.append(_Gathered(kind, text, [name]))

    def _tell_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            names = sorted(each.names, key=lambda name: (len(name), name))
            self._note(each.kind, gathered_text(each.text, names, len(self._names)))

    def _close(self, life: _Life) -> None:
        if life.channel.fileno() >= 0:
            self._loop.remove_reader(life.channel)
            life.channel.close()


def told_error(told: ToldError) -> W5xdeError:
    """The error that a node told, as an exception of its class."""
    kinds = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}
    kind = kinds.get(told.kind, W5xdeError)
    if not issubclass(kind, W5xdeError):
        kind = W5xdeError
    return kind(told.what, code=told.code, why=told.why, fix=told.fix)


def gathered_text(text: str, names: list[str], everybody: int) -> str:
    """What several nodes have in common, in one line; `{}` in the text stands for their names."""
    shown = ", ".join(names[:NAMES_SHOWN])
    if len(names) > NAMES_SHOWN:
        shown = f"{shown} and {len(names) - NAMES_SHOWN} more"
    if "{}" in text:
        return text.replace("{}", shown)
    if not any(names) or len(names) == everybody:
        return text if len(names) == 1 else f"all {everybody} nodes: {text}"
    return f"{shown}: {text}"
