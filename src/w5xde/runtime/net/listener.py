"""The listener: accepts connections on a port and, for this machine, on a Unix socket.

It accepts by hand, because asyncio's servers begin a TLS handshake before a connection can be refused; the
connection limits decide which are. Knows no nodes, tickets or messages.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from w5xde.control.pool.connection_limits import ADDRESSES_MAX, AUTHENTICATION_SECONDS, ConnectionLimits
from w5xde.errors import UsageError
from w5xde.runtime.net import tls
from w5xde.runtime.net.connection import Connection
from w5xde.runtime.net.sockets import HAS_LOCAL_SOCKETS, is_here, local_name, reason_of

BACKLOG = 1024
# A flood of connections must not keep the loop from those that are established.
ACCEPTS_AT_A_TIME = 64
# Without descriptors left, accepting would fail again at once.
RETRY_SECONDS = 0.5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EVERYWHERE = {"auto": "0.0.0.0", "": "0.0.0.0"}


class Candidate:
    """A connection from its acceptance until it has authenticated or is gone."""

    def __init__(self, address: str, limits: ConnectionLimits, *, is_here: bool) -> None:
        # What limits go by: an IPv4 address, an IPv6 network of 64 bits, or a user of this machine.
        self.address = address
        self.is_here = is_here
        # Called with a reason when the connection must be closed.
        self.late: Callable[[str], None] = lambda reason: None
        self._limits = limits
        self.is_unauthenticated = True
        loop = asyncio.get_running_loop()
        self.came_at = loop.time()
        self._timer = loop.call_later(AUTHENTICATION_SECONDS, self._on_timeout)

    def _on_timeout(self) -> None:
        self.late(f"it did not say who it is within {AUTHENTICATION_SECONDS:.0f} s")

    def over(self) -> None:
        """The connection has authenticated, or is gone: it counts no longer."""
        if self.is_unauthenticated:
            self.is_unauthenticated = False
            self._timer.cancel()
            self._limits.release(self.address)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A resolved address to listen on."""

    family: int
    host: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


async def resolve_addresses(host: str, port: int) -> list[ListenAddress]:
    """Resolve a host to listen on."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            EVERYWHERE.get(host, host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    return list(dict.fromkeys(ListenAddress(family, str(address[0])) for family, _, _, _, address in found))


class Listener:
    """Listens on one port at several addresses and, where it can, on the Unix socket of that port."""

    def __init__(
        self,
        make: Callable[[Candidate], Connection],
        limits: ConnectionLimits,
        log_refusal: Callable[[str, str, str], None] = lambda address, kind, reason: None,
    ) -> None:
        """`log_refusal(address, kind, reason)` is called for each connection that is closed before `make`."""
        self._make = make
        self._limits = limits
        # For connections by TCP; None: they are in clear text.
        self.context: tls.Context | None = None
        self._log_refusal = log_refusal
        self._listeners: list[socket.socket] = []
        # Connections whose handshake is not complete.
        self._opening: set[asyncio.Task[None]] = set()
        # Oldest first; those that have authenticated are removed when they become the oldest.
        self._candidates: deque[Candidate] = deque()
        self._loop = asyncio.get_running_loop()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listeners[0].getsockname()[:2]
        return host, port

    def listen(self, places: list[ListenAddress], host: str, port: int, road: str = "auto") -> None:
        """Bind one port at all of these addresses, and begin to accept."""
        try:
            for place in places:
                self._listeners.append(_bound(place, self.address[1] if self._listeners else port))
        except OSError as error:
            self.close()
            raise _cannot_listen(host, port, error) from error
        # Only if a node that dials this machine's own address would reach the same port by TCP.
        if (
            HAS_LOCAL_SOCKETS
            and road != "tcp"
            and any(is_here(each.host) or _is_any(each.host) for each in places)
        ):
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                local.bind(local_name(self.address[1]))
                self._listeners.append(local)
            except OSError:
                # A listener at another address of this machine has the name: local nodes use TCP.
                local.close()
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def stop_accepting(self) -> None:
        """Accept no more connections, and close those whose handshake is not complete."""
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
        for opening in self._opening:
            opening.cancel()

    def close(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_A_TIME):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(RETRY_SECONDS, self._accept_again, listener)
                self._log_refusal("everybody", "no room", f"nobody can be let in: {os.strerror(error.errno)}")
                return
            self._on_accept(sock)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _on_accept(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            address, is_near = _origin(sock)
        except OSError:
            # Gone already.
            sock.close()
            return
        context = self.context if sock.family != socket.AF_UNIX else None
        reason = self._limits.refusal(
            address,
            self._loop.time(),
            is_here=is_near,
            shakes_hands=context is not None,
            oldest_came_at=self._oldest_came_at(),
        )
        if reason:
            sock.close()
            self._log_refusal(address, reason, reason)
            return
        if self._limits.is_over_limit:
            self._candidates.popleft().late("it did not say who it is, and others wait at the door")
        candidate = Candidate(address, self._limits, is_here=is_near)
        self._candidates.append(candidate)
        opening = self._loop.create_task(self._open(sock, candidate, context))
        self._opening.add(opening)

        def cut_short(reason: str) -> None:
            opening.cancel()
            self._log_refusal(address, "cut short", reason)

        candidate.late = cut_short

        def done(task: asyncio.Task[None]) -> None:
            self._opening.discard(task)
            if task.cancelled():  # perhaps before it began
                candidate.over()
                sock.close()

        opening.add_done_callback(done)

    def _oldest_came_at(self) -> float:
        """When the oldest unauthenticated connection came."""
        while self._candidates and not self._candidates[0].is_unauthenticated:
            self._candidates.popleft()
        return self._candidates[0].came_at if self._candidates else self._loop.time()

    async def _open(self, sock: socket.socket, candidate: Candidate, context: tls.Context | None) -> None:
        try:
            if context is None:
                await self._loop.connect_accepted_socket(lambda: self._make(candidate), sock)
            else:
                await self._loop.connect_accepted_socket(
                    lambda: self._make(candidate), sock, ssl=context, **tls.TIMEOUTS
                )
        except OSError as error:
            # The peer speaks no TLS 1.3, or is gone.
            candidate.over()
            sock.close()
            self._log_refusal(candidate.address, "no TLS", f"no TLS 1.3 came about: {reason_of(error)}")


def _bound(place: ListenAddress, port: int) -> socket.socket:
    listener = socket.socket(place.family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            # Without it a restarted coordinator could not bind while old connections are in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if place.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((place.host, port))
        got = listener.getsockname()[0]
        if got != place.host:
            raise OSError(errno.EADDRNOTAVAIL, f"the system bound {got} instead")
    except BaseException:
        listener.close()
        raise
    return listener


def _is_any(host: str) -> bool:
    return ipaddress.ip_address(host).is_unspecified


def _origin(sock: socket.socket) -> tuple[str, bool]:
    """Where a connection comes from, in terms of the limits, and whether that is this machine."""
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return f"user {struct.unpack('3i', credentials)[1]} of this machine", True
    return _limited_as(sock.getpeername()[0])


# Parsing an address is a quarter of the cost of a refusal, and a flood comes from the same addresses.
@lru_cache(ADDRESSES_MAX)
def _limited_as(host: str) -> tuple[str, bool]:
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 6 and not address.is_loopback:
        # A machine with one IPv6 address can use all 2**64 of its network.
        return str(ipaddress.ip_network((int(address), 64), strict=False)), False
    return str(address), address.is_loopback


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> UsageError:
    return UsageError(
        f"cannot listen on {host} port {port}: {reason_of(error)}",
        code="W5-110",
        fix="choose another --port (--port 0: any that is free), or another --host",
    )
