"""Roads: TCP between machines, a Unix socket between processes of one.

A coordinator that listens on its own machine's address also listens on a Unix socket whose name follows from
its port, and a node that dials such an address tries that first: nobody chooses, and the words are the same.
Measured here, a small message costs 3 microseconds to send on it and 27 on TCP's loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from w5xde.config import Settings
from w5xde.errors import JoinError, UsageError
from w5xde.runtime.transport import Connection

DIAL_SECONDS = 5.0
# Data on the way that a dead peer never acknowledges: the kernel gives up after this long.
USER_TIMEOUT_MILLISECONDS = 10_000
BACKLOG = 1024
LOCAL_BUFFER_BYTES = 4 * 1024 * 1024
# Names in Linux's abstract namespace belong to no file: nothing is left behind, whoever is killed.
HAS_LOCAL_ROAD = sys.platform == "linux"


def _local_name(port: int) -> str:
    return f"\0w5xde-{port}"


def configure(sock: Any, settings: Settings) -> None:
    """Set what the settings say about sockets."""
    if sock is None:
        return
    if settings.socket_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.socket_buffer)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.socket_buffer)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        if not settings.socket_buffer:
            # Unlike TCP's these do not grow by themselves, and start too small for a large model.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, settings.tcp_nodelay)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, settings.tcp_keepalive)
    if hasattr(socket, "TCP_QUICKACK") and settings.tcp_quickack:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MILLISECONDS)


class Door:
    """Where nodes come in: the port, and for those on this machine the shorter way."""

    def __init__(self, servers: list[asyncio.Server]) -> None:
        self._servers = servers

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._servers[0].sockets[0].getsockname()[:2]
        return host, port

    def stop_accepting(self) -> None:
        """Let nobody else in, but leave it open for those who just came, or nobody would own them."""
        loop = asyncio.get_running_loop()
        for server in self._servers:
            for sock in server.sockets:
                loop.remove_reader(sock.fileno())

    def close(self) -> None:
        for server in self._servers:
            server.close()


async def listen(make: Callable[[], Connection], host: str, port: int, road: str = "auto") -> Door:
    """Open the coordinator's port."""
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(make, host, port, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {_reason(error)}",
            code="W5-110",
            fix="choose another --port (--port 0: any that is free), or another --host",
        ) from error
    servers = [server]
    # Only where a node that dials this machine's own address would reach this very port by TCP too.
    if HAS_LOCAL_ROAD and road != "tcp" and (_is_here(host) or host in ("", "0.0.0.0", "::")):
        bound = server.sockets[0].getsockname()[1]
        # Somebody else's of that name, from a port of another address: then nodes here come by TCP.
        with contextlib.suppress(OSError):
            servers.append(await loop.create_unix_server(make, _local_name(bound), backlog=BACKLOG))
    return Door(servers)


async def dial(make: Callable[[], Connection], host: str, port: int, road: str = "auto") -> Connection:
    """Connect to a coordinator, or say why that is not possible."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            sock = _dial_locally(port) if road != "tcp" and _is_here(host) else None
            if sock is not None:
                _, connection = await loop.create_unix_connection(make, sock=sock)
            else:
                _, connection = await loop.create_connection(make, host, port)
            return connection
    except TimeoutError:
        raise JoinError(
            f"no answer from {host}:{port} within {DIAL_SECONDS:.0f} s",
            code="W5-104",
            fix="open that port in the coordinator's firewall, or check the address",
        ) from None
    except (OSError, UnicodeError) as error:
        raise JoinError(
            f"nothing answers at {host}:{port} ({_reason(error)})",
            code="W5-103",
            why="the coordinator is not running there, or listens only on its own machine",
            fix="start  w5xde serve  there; for other machines with  --host 0.0.0.0",
        ) from error


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _dial_locally(port: int) -> socket.socket | None:
    """The shorter way to a coordinator of ours on this machine, if there is one."""
    if not HAS_LOCAL_ROAD:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(_local_name(port))
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:
        sock.close()
        return None
    if uid not in (0, os.getuid()):
        # A name is anybody's to take; the port is what the user asked for.
        sock.close()
        return None
    sock.setblocking(False)
    return sock


def _reason(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return "that is not a host name"
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)
