"""The process of one node of a crew, and the news that it sends to the process that minds the crew.

The news go over a socket pair, one JSON object in each line. The other side says two things, each in a line:
to a node that asks where its coordinator is now, a ticket; and that it is to leave in a hurry. When it closes
the socket, or has died, the node leaves its run. Knows nothing of the other nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from w5xde.callbacks import Callback
from w5xde.callbacks.status import NodeReport
from w5xde.config import Settings
from w5xde.errors import W5xdeError
from w5xde.learn.job.code.origin import JobOrigin
from w5xde.learn.job.job import Job
from w5xde.runtime.admission.node_pass import NodePass
from w5xde.runtime.admission.ticket_source import LOOK_SECONDS, TicketSource
from w5xde.runtime.node.body import Node
from w5xde.runtime.node.exit_status import exit_status
from w5xde.runtime.node.fork_server import Request
from w5xde.runtime.node.local_node import until_orphaned
from w5xde.ticket import Ticket, parse

# How often a node reports: as often as a view is drawn.
NEWS_SECONDS = 0.25
# How long a node that ends waits for its last news to be read.
LAST_NEWS_SECONDS = 1.0
# How long a node that asks for a ticket waits for the answer: longer than looking for it takes.
ASK_SECONDS = 2 * LOOK_SECONDS
JOINED = "joined"
# The line that tells a node to leave in a hurry.
HURRY = b"hurry\n"


class ToldError(msgspec.Struct, frozen=True):
    """An error as its process tells it: the name of its class, and its parts."""

    kind: str
    code: str
    what: str
    why: str
    fix: str

    @classmethod
    def of(cls, error: W5xdeError) -> ToldError:
        return cls(type(error).__name__, error.code, error.what, error.why, error.fix)


class NodeNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node tells: its totals and, if they are new, a note, work done since the last news, an error."""

    report: dict[str, Any]
    note: tuple[str, str] | None = None
    # Batches and the sum of their losses.
    worked: tuple[int, float] = (0, 0.0)
    # Of a node that has joined.
    threads: int = 0
    state_bytes: int = 0
    error: ToldError | None = None
    # It wants to know the newest ticket.
    asks: bool = False


class AskedTicket(TicketSource):
    """The newest ticket that the process which minds the crew knows."""

    may_change = True

    def __init__(self, ticket: Ticket, ask: Callable[[], None]) -> None:
        super().__init__(ticket)
        self._ask = ask
        self._answered = asyncio.Event()

    async def look(self) -> Ticket:
        self._answered.clear()
        self._ask()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._answered.wait(), ASK_SECONDS)
        return self.ticket

    def answer(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._answered.set()


class NewsTeller(Callback):
    """Sends the news of one node. Never blocks: a process that does not read its news gets fewer of them."""

    def __init__(self, channel: socket.socket, name: str) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._name = name
        # None until it could be made.
        self.node: Node | None = None
        self._unsent = b""
        self._worked = (0, 0.0)

    def on_work(self, node: NodeReport, batches: int, loss: float) -> None:
        count, total = self._worked
        self._worked = (count + batches, total + batches * loss)

    def tell(self, **news: Any) -> None:
        """Send the node's totals, with these news of it."""
        node = self.node
        threads, state_bytes = node.model_load if node is not None else (0, 0)
        report = dataclasses.asdict(node.report if node is not None else NodeReport(self._name))
        told = NodeNews(report, worked=self._worked, threads=threads, state_bytes=state_bytes, **news)
        self._worked = (0, 0.0)
        self._unsent += msgspec.json.encode(told) + b"\n"
        self._send()

    def tell_totals(self) -> None:
        """Send the node's totals, unless earlier news are still unread."""
        self._send()
        if not self._unsent:
            self.tell()

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    self._unsent = self._unsent[self._channel.send(self._unsent) :]
                except (BrokenPipeError, ConnectionResetError):
                    self._unsent = b""

    def close(self) -> None:
        """Send what is left, if it is read soon."""
        self._channel.settimeout(LAST_NEWS_SECONDS)
        with contextlib.suppress(OSError):
            self._channel.sendall(self._unsent)
        self._channel.close()


def run_crew_node(origin: JobOrigin, asks: bool, job: Job, settings: Settings, request: Request) -> None:
    """The main function of the process of a crew's node; its exit status says what went wrong.

    It `asks` for its ticket before each dial, if that may be another one by then.
    """
    server = os.getppid()
    channel = socket.socket(fileno=request.descriptors[0])
    teller = NewsTeller(channel, request.name)
    own = msgspec.structs.replace(settings, node_name=request.name, devices=request.device)
    status = 0
    try:
        ticket = parse(request.ticket)
        source = AskedTicket(ticket, lambda: teller.tell(asks=True)) if asks else TicketSource(ticket)
        with contextlib.closing(NodePass(source)) as node_pass:
            teller.node = Node(job, node_pass, own, lambda *note: teller.tell(note=note), [teller])
            teller.node.origin = origin
            asyncio.run(_run_and_tell(teller.node, teller, channel, source, server))
        teller.tell()
    except W5xdeError as error:
        teller.tell(error=ToldError.of(error))
        status = exit_status(error)
    teller.close()
    os._exit(status)


async def _run_and_tell(
    node: Node, teller: NewsTeller, channel: socket.socket, source: TicketSource, server: int
) -> None:
    loop = asyncio.get_running_loop()
    text = b""

    def heard() -> None:
        nonlocal text
        try:
            data = channel.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(channel)
            node.leave()
            return
        *lines, text = (text + data).split(b"\n")
        for line in lines:
            if line == HURRY.rstrip():
                node.leave(hurries=True)
            elif isinstance(source, AskedTicket):
                source.answer(parse(line.decode()))

    async def tell() -> None:
        while True:
            await asyncio.sleep(NEWS_SECONDS)
            teller.tell_totals()

    loop.add_reader(channel, heard)
    telling = asyncio.ensure_future(tell())
    try:
        await until_orphaned(node, server)
    finally:
        telling.cancel()
        loop.remove_reader(channel)
