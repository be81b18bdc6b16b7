"""The dialer: connects to all addresses of a ticket at once, and keeps the first that is authentic.

A `Connection`, which can send, is put on a transport only after the server has passed the check that the
ticket asks for; until then the transport has a protocol that sends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

from w5xde.config import Settings
from w5xde.errors import JoinError
from w5xde.runtime.net import tls
from w5xde.runtime.net.connection import Connection
from w5xde.runtime.net.sockets import connect_locally, is_here, reason_of
from w5xde.ticket import Ticket

DIAL_SECONDS = 5.0
# Of several errors the first of these says most: a server has another identity, failed the handshake, refused
# the connection, or did not answer.
_TELLING = ("W5-501", "W5-503", "W5-103", "W5-104")


class Dialer:
    """Connects one node to its coordinator, each time that it is asked to."""

    def __init__(self, ticket: Ticket, settings: Settings) -> None:
        self._ticket = ticket
        self._road = settings.road
        # The certificate that fits the pin, so that it is fetched only once.
        self._certificate: bytes | None = None
        self._own = [Path(name) if name else None for name in (settings.tls_cert, settings.tls_key)]
        self._authority = Path(settings.tls_ca) if settings.tls_ca else None

    def follow(self, ticket: Ticket) -> None:
        """Dial the addresses of this ticket from now on."""
        if ticket.fingerprint != self._ticket.fingerprint:
            self._certificate = None
        self._ticket = ticket

    async def dial(self, make: Callable[[], Connection]) -> Connection:
        """Return an open connection to the coordinator, or raise JoinError."""
        transport = await _first([self._reach(host, port) for host, port in self._ticket.addresses])
        silent = transport.get_protocol()
        # A transport with TLS has no protocol once it is closed.
        if not isinstance(silent, _Silent) or silent.is_over or transport.is_closing():
            # `make` is not called for a connection whose loss asyncio has already reported.
            transport.abort()
            raise JoinError(
                "whoever answered hung up at once",
                code="W5-102",
                why="another program listens there, or the coordinator lets nobody else in for now",
                fix="check that a w5xde coordinator listens there, and its log",
            )
        connection = make()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        return connection

    async def _reach(self, host: str, port: int) -> asyncio.Transport:
        """Return a checked transport to this address, on which nothing has been sent."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        loop = asyncio.get_running_loop()
        sock = connect_locally(port) if self._road != "tcp" and is_here(host) else None
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                if sock is not None:
                    transport, _ = await loop.create_unix_connection(_Silent, sock=sock)
                elif self._ticket.is_clear:
                    transport, _ = await loop.create_connection(_Silent, host, port)
                else:
                    return await self._reach_securely(host, port, address)
                return transport
        except TimeoutError:
            raise JoinError(
                f"no answer from {address} within {DIAL_SECONDS:.0f} s",
                code="W5-104",
                fix="open that port in the coordinator's firewall, or check the address",
            ) from None
        except (OSError, UnicodeError) as error:
            raise JoinError(
                f"nothing answers at {address} ({reason_of(error)})",
                code="W5-103",
                why="the coordinator is not running there, or listens only on its own machine",
                fix="start  w5xde serve  there; for other machines with  --host 0.0.0.0",
            ) from error

    async def _reach_securely(self, host: str, port: int, address: str) -> asyncio.Transport:
        pin = self._ticket.fingerprint
        if self._ticket.is_pki:
            context, name = tls.client_context_pki(self._authority, *self._own), host
        else:
            certificate = self._certificate or await tls.fetch_certificate(host, port, pin)
            context, name = tls.client_context(certificate, *self._own), tls.NO_NAME
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                _Silent,
                host,
                port,
                ssl=context,
                server_hostname=name,
                **tls.TIMEOUTS,
            )
        except tls.HANDSHAKE_ERRORS as error:
            raise tls.handshake_failed(address, error) from error
        if not self._ticket.is_pki:
            try:
                self._certificate = tls.check_pin(transport.get_extra_info("ssl_object"), pin, address)
            except JoinError:
                transport.abort()
                raise
        return transport


class _Silent(asyncio.Protocol):
    """Sends nothing, and closes if the server speaks first: a coordinator never does."""

    def __init__(self) -> None:
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.is_over = True
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True


async def _first(attempts: list[Coroutine[Any, Any, asyncio.Transport]]) -> asyncio.Transport:
    """Return the first transport; cancel all other attempts."""
    tasks = [asyncio.ensure_future(attempt) for attempt in attempts]
    errors: list[JoinError] = []
    try:
        for next_one in asyncio.as_completed(tasks):
            try:
                won = await next_one
            except JoinError as error:
                errors.append(error)
                continue
            for task in tasks:
                task.cancel()
            for late in await asyncio.gather(*tasks, return_exceptions=True):
                # Two attempts may succeed at the same moment.
                if isinstance(late, asyncio.Transport) and late is not won:
                    late.abort()
            return won
    finally:
        for task in tasks:
            task.cancel()
    raise _of_several(errors)


def _of_several(errors: list[JoinError]) -> JoinError:
    told = min(errors, key=lambda error: _TELLING.index(error.code) if error.code in _TELLING else 0)
    if len(errors) > 1 and told.code in ("W5-103", "W5-104"):
        return JoinError(
            f"none of the ticket's {len(errors)} addresses answers",
            code=told.code,
            why="; ".join(error.what for error in errors),
            fix=told.fix,
        )
    return told
