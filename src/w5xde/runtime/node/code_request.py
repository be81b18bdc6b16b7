"""Asks a coordinator for the code of its job, on a connection of its own before any node joins.

The connection is like that of a node: to the pinned certificate, with the ticket or the node's credential.
The greeting only looks, so nothing of the ticket is used up. Runs nothing of what it is given, and asks
nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec
import torch

from w5xde.config import Settings
from w5xde.errors import JoinError
from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.learn.job.code.packages import is_importable
from w5xde.messages import Message, Offer, Refuse
from w5xde.protocol.session import NODE
from w5xde.protocol.wire import Body
from w5xde.runtime.admission.code_offers import OFFER_SECONDS
from w5xde.runtime.admission.node_pass import NodePass
from w5xde.runtime.admission.ticket_source import TicketSource
from w5xde.runtime.net.connection import Connection, Owner
from w5xde.runtime.net.dialer import Dialer
from w5xde.runtime.net.sockets import configure
from w5xde.runtime.node.limits import OFFER_LIMITS
from w5xde.runtime.system.machine import host_name

# Between two attempts, as long as nothing answers.
RETRY_SECONDS = 0.5
# How long closing the connection may take.
PARTING_SECONDS = 1.0
# Errors of a coordinator that is perhaps just being started.
_NOT_THERE = ("W5-102", "W5-103", "W5-104")
# Another coordinator answers: the file that holds the ticket may be older than its own.
_ANOTHER_THERE = ("W5-501", "W5-503")


@dataclass(frozen=True, slots=True)
class ReceivedCode:
    """Code that a coordinator sent, which nobody has agreed to run yet."""

    bundle: CodeBundle
    # What the coordinator says of it.
    offer: Offer

    @property
    def missing(self) -> list[str]:
        """The modules that it imports and that are not here. It may be able to do without some of them."""
        return [module for module in self.offer.imports if not is_importable(module)]

    @property
    def missing_lines(self) -> list[str]:
        """A sentence for each of these modules."""
        packages = {module: self.package_of(module) for module in self.missing}
        return [
            f"not here: {module} ({f'installed there as {package}' if package else 'not sent'})"
            for module, package in packages.items()
        ]

    def package_of(self, module: str) -> str:
        """The package of a module, and its version at the coordinator; empty: it belongs to no package."""
        package = self.offer.imports.get(module, "")
        version = self.offer.versions.get(package, "")
        return f"{package} {version}".strip()


class CodeRequest:
    """One question for the code of a run."""

    def __init__(self, source: TicketSource, settings: Settings) -> None:
        """The source has found a ticket already."""
        self._source = source
        self._settings = settings
        self._dialer = Dialer(source.ticket, settings)
        self._task: asyncio.Task[None] | None = None
        self._received: ReceivedCode | None = None

    async def run(self) -> None:
        """Get the code; raises the error that keeps this machine from it."""
        self._task = asyncio.current_task()
        node_pass = NodePass(self._source)
        try:
            self._received = await self._ask_until_answered(node_pass)
        finally:
            node_pass.close()

    @property
    def answer(self) -> ReceivedCode:
        """The code, once `run` has returned."""
        if self._received is None:
            raise RuntimeError("nothing was received yet")
        return self._received

    def stop(self, reason: str, *, hurries: bool) -> None:
        """Give up, as Ctrl-C does."""
        if self._task is not None:
            self._task.cancel()

    async def _ask_until_answered(self, node_pass: NodePass) -> ReceivedCode:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.wait_seconds
        while True:
            try:
                message, body = await self._ask(node_pass)
            except JoinError as error:
                is_old = self._source.may_change and error.code in _ANOTHER_THERE
                is_early = is_old or error.code in _NOT_THERE or node_pass.awaits_another(error)
                if not is_early or loop.time() >= deadline:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if message is not None:
                return ReceivedCode(CodeBundle.from_offer(message, body), message)

    async def _ask(self, node_pass: NodePass) -> tuple[Offer | None, Body]:
        """Greet the coordinator once, and return its answer; None: it must be greeted by the ticket."""
        self._dialer.follow(await node_pass.renew(was_welcome=False))
        message, body = await self._greet(node_pass)
        if isinstance(message, Offer):
            return message, body
        if isinstance(message, Refuse) and not node_pass.falls_back(message.code):
            raise JoinError(message.what, code=message.code, why=message.why, fix=message.fix)
        return None, body

    async def _greet(self, node_pass: NodePass) -> tuple[Message, Body]:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[tuple[Message, Body]] = loop.create_future()
        gone = asyncio.Event()

        def opened(connection: Connection) -> None:
            name = self._settings.node_name or host_name()
            hello = node_pass.greeting(name, "", torch.device("cpu"))
            connection.send(msgspec.structs.replace(hello, looks=True, asks_code=True))

        def heard(connection: Connection, message: Message, body: Body) -> None:
            if not answered.done():
                answered.set_result((message, body))

        def lost(connection: Connection, reason: str) -> None:
            gone.set()
            if not answered.done():
                fix = "check that a w5xde coordinator listens there, and its log"
                answered.set_exception(JoinError(reason, code=connection.fault or "W5-102", fix=fix))

        owner = Owner(
            opened=opened,
            heard=heard,
            lost=lost,
            alive=lambda: None,
            configure=lambda sock: configure(sock, self._settings),
        )
        connection = await self._dialer.dial(lambda: Connection(NODE, owner, OFFER_LIMITS))
        try:
            async with asyncio.timeout(OFFER_SECONDS):
                return await answered
        except TimeoutError:
            raise JoinError(
                f"the coordinator sent no code within {OFFER_SECONDS:.0f} s",
                code="W5-104",
                fix="look at the link with  w5xde doctor TICKET , or copy the job and name it",
            ) from None
        finally:
            connection.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gone.wait(), PARTING_SECONDS)
