"""Serves the page until it is interrupted, or until the process that started it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import errno
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from w5xde.errors import UsageError
from w5xde.page.app import Page
from w5xde.page.identity import PageIdentity, load_or_create
from w5xde.page.sessions import Role, Sessions
from w5xde.runs import read_manifest
from w5xde.runtime.net.sockets import is_here, reason_of
from w5xde.runtime.net.tls import server_context

# The usual one; if another page has it, any free one is taken.
PORT = 8050
# How often a page looks whether the process that started it is still there.
PARENT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class PageOptions:
    """How a page is served."""

    host: str = "127.0.0.1"
    port: int | None = None
    is_read_only: bool = False
    # End with this process, which started the page.
    parent: int | None = None


class PageServer:
    """The page of some runs, on a socket of its own."""

    def __init__(self, folders: Sequence[Path], options: PageOptions) -> None:
        self._options = options
        ids = [str(read_manifest(folder).get("id", folder.name)) for folder in folders]
        self._sessions = Sessions(ids)
        self._role: Role = "viewer" if options.is_read_only else "operator"
        self._folders = folders
        self._identity: PageIdentity | None = None
        if not is_here(options.host):
            self._identity = load_or_create(dt.datetime.now(dt.UTC))
        self._socket = _listen(options.host, options.port)

    @property
    def fingerprint(self) -> str:
        """The sha256 of the certificate; empty without TLS."""
        return self._identity.fingerprint.hex() if self._identity is not None else ""

    def new_link(self) -> str:
        """An address with a code that can be used once; the part after # is sent to nobody."""
        host, port = self._socket.getsockname()[:2]
        scheme = "https" if self._identity is not None else "http"
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        return f"{scheme}://{shown}:{port}/#c={self._sessions.new_code(self._role)}"

    def run(self, logged_in: Callable[[], None] = lambda: None) -> None:
        """Serve until the process is interrupted, or its parent has ended."""
        names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
        page = Page(self._folders, self._sessions, logged_in)
        config = uvicorn.Config(
            page.app(names, is_tls=self._identity is not None),
            log_level="warning",
            lifespan="off",
            ws="none",
            server_header=False,
            access_log=False,
            # Streams have no end of their own.
            timeout_graceful_shutdown=1,
        )
        config.load()
        if self._identity is not None:
            config.ssl = server_context(self._identity.file)
        asyncio.run(self._serve(uvicorn.Server(config), page))

    async def _serve(self, server: uvicorn.Server, page: Page) -> None:
        beside = [
            asyncio.create_task(self._end_with_parent(server)),
            asyncio.create_task(page.read_ahead()),
        ]
        try:
            await server.serve([self._socket])
        finally:
            for task in beside:
                task.cancel()

    async def _end_with_parent(self, server: uvicorn.Server) -> None:
        parent = self._options.parent
        while parent is None or os.getppid() == parent:  # noqa: ASYNC110 - a parent sets no event when it dies
            await asyncio.sleep(PARENT_SECONDS)
        server.should_exit = True


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket at this address; without a port, the usual one or any free one."""
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        address = str(found[0])
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(
            f"{host} is no address of this machine", code="W5-650", fix="leave out --host, or use ssh -L"
        ) from error
    if port is None:
        with contextlib.suppress(OSError):
            return _bound(family, (address, PORT))
    try:
        return _bound(family, (address, port or 0))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise UsageError(
            f"the page cannot listen on {host}:{port or 0}: {reason_of(error)}",
            code="W5-650",
            why="another program listens there" if taken else "",
            fix="choose another --port, or leave it out",
        ) from error


def _bound(family: int, address: tuple[str, int]) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        # At once: until then another process could have the same address.
        found.listen()
    except OSError:
        found.close()
        raise
    return found
