"""The door: where nodes come in, one by one, and strangers only as many as the doorman lets.

Connections are accepted by hand, because asyncio's servers would begin a TLS handshake with everybody who
knocks before anybody could say no.
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

from w5xde.control.pool.connection_limits import ADDRESSES_MAX, STRANGER_SECONDS, Doorman
from w5xde.errors import UsageError
from w5xde.runtime.net import tls
from w5xde.runtime.net.connection import Connection
from w5xde.runtime.net.sockets import HAS_LOCAL_ROAD, is_here, local_name, reason_of

BACKLOG = 1024
# Who floods the door must not keep the loop from those who are in.
ACCEPTS_AT_A_TIME = 64
# Without descriptors left, accepting would fail at once again.
BREATHER_SECONDS = 0.5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EVERYWHERE = {"auto": "0.0.0.0", "": "0.0.0.0"}


class Visit:
    """One who came to the door, until it has shown who it is or is gone."""

    def __init__(self, address: str, doorman: Doorman, *, is_here: bool) -> None:
        # What limits go by: an IPv4 address, an IPv6 network of 64 bits, or a user of this machine.
        self.address = address
        self.is_here = is_here
        # What happens to one that must go, for this reason.
        self.late: Callable[[str], None] = lambda reason: None
        self._doorman = doorman
        self.is_stranger = True
        loop = asyncio.get_running_loop()
        self.came_at = loop.time()
        self._timer = loop.call_later(STRANGER_SECONDS, self._too_late)

    def _too_late(self) -> None:
        self.late(f"it did not say who it is within {STRANGER_SECONDS:.0f} s")

    def over(self) -> None:
        """It is a stranger no more: known, or gone."""
        if self.is_stranger:
            self.is_stranger = False
            self._timer.cancel()
            self._doorman.gone(self.address)


@dataclass(frozen=True, slots=True)
class Place:
    """An address to listen on, resolved: what is asked for is what is bound."""

    family: int
    host: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


async def places_of(host: str, port: int) -> list[Place]:
    """The addresses that a host to listen on means."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            EVERYWHERE.get(host, host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    return list(dict.fromkeys(Place(family, str(address[0])) for family, _, _, _, address in found))


class Door:
    """Where nodes come in: the port, and for those on this machine the shorter way."""

    def __init__(
        self,
        make: Callable[[Visit], Connection],
        doorman: Doorman,
        turned_away: Callable[[str, str, str], None] = lambda address, kind, reason: None,
    ) -> None:
        """`turned_away(address, kind, reason)` is told of everybody for whom no connection was made."""
        self._make = make
        self._doorman = doorman
        # How it shakes hands with who comes by TCP; None: in clear text.
        self.context: tls.Context | None = None
        self._turned_away = turned_away
        self._listeners: list[socket.socket] = []
        self._coming: set[asyncio.Task[None]] = set()
        # In the order of coming; who is no stranger any more leaves when it is looked at.
        self._strangers: deque[Visit] = deque()
        self._loop = asyncio.get_running_loop()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listeners[0].getsockname()[:2]
        return host, port

    def listen(self, places: list[Place], host: str, port: int, road: str = "auto") -> None:
        """Open it at all of these places, on one port."""
        try:
            for place in places:
                self._listeners.append(_bound(place, self.address[1] if self._listeners else port))
        except OSError as error:
            self.close()
            raise _cannot_listen(host, port, error) from error
        # Only where a node that dials this machine's own address would reach this very port by TCP too.
        if (
            HAS_LOCAL_ROAD
            and road != "tcp"
            and any(is_here(each.host) or _is_any(each.host) for each in places)
        ):
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                local.bind(local_name(self.address[1]))
                self._listeners.append(local)
            except OSError:
                # Somebody else's of that name, from a port of another address: then nodes here come by TCP.
                local.close()
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def stop_accepting(self) -> None:
        """Let nobody else in; who is still shaking hands goes."""
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
        for coming in self._coming:
            coming.cancel()

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
                self._loop.call_later(BREATHER_SECONDS, self._accept_again, listener)
                self._turned_away("everybody", "no room", f"nobody can be let in: {os.strerror(error.errno)}")
                return
            self._met(sock)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _met(self, sock: socket.socket) -> None:
        """Somebody is at the door."""
        sock.setblocking(False)
        try:
            address, is_near = _who(sock)
        except OSError:
            # Gone already.
            sock.close()
            return
        context = self.context if sock.family != socket.AF_UNIX else None
        reason = self._doorman.knock(
            address,
            self._loop.time(),
            is_here=is_near,
            shakes_hands=context is not None,
            oldest_came_at=self._oldest_came_at(),
        )
        if reason:
            sock.close()
            self._turned_away(address, reason, reason)
            return
        if self._doorman.is_overfull:
            self._strangers.popleft().late("it did not say who it is, and others wait at the door")
        visit = Visit(address, self._doorman, is_here=is_near)
        self._strangers.append(visit)
        coming = self._loop.create_task(self._let_in(sock, visit, context))
        self._coming.add(coming)

        def cut_short(reason: str) -> None:
            coming.cancel()
            self._turned_away(address, "cut short", reason)

        visit.late = cut_short

        def came(task: asyncio.Task[None]) -> None:
            self._coming.discard(task)
            if task.cancelled():  # perhaps before it began
                visit.over()
                sock.close()

        coming.add_done_callback(came)

    def _oldest_came_at(self) -> float:
        """When the stranger came that is here longest."""
        while self._strangers and not self._strangers[0].is_stranger:
            self._strangers.popleft()
        return self._strangers[0].came_at if self._strangers else self._loop.time()

    async def _let_in(self, sock: socket.socket, visit: Visit, context: tls.Context | None) -> None:
        seconds = tls.HANDSHAKE_SECONDS, tls.SHUTDOWN_SECONDS
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make(visit),
                sock,
                ssl=context,
                ssl_handshake_timeout=seconds[0] if context is not None else None,
                ssl_shutdown_timeout=seconds[1] if context is not None else None,
            )
        except OSError as error:
            # The world's, not ours: they speak no TLS 1.3, or went away.
            visit.over()
            sock.close()
            self._turned_away(visit.address, "no TLS", f"no TLS 1.3 came about: {tls.reason_of(error)}")


def _bound(place: Place, port: int) -> socket.socket:
    listener = socket.socket(place.family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            # Or a coordinator could not come back while connections of the last one are still forgotten.
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


def _who(sock: socket.socket) -> tuple[str, bool]:
    """Where a connection comes from, as limits see it, and whether that is this machine."""
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return f"user {struct.unpack('3i', credentials)[1]} of this machine", True
    return _seen_as(sock.getpeername()[0])


# A quarter of what turning somebody away takes, and who floods the door comes again and again.
@lru_cache(ADDRESSES_MAX)
def _seen_as(host: str) -> tuple[str, bool]:
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 6 and not address.is_loopback:
        # Whoever has one address of IPv6 has the other 2**64 of its network too.
        return str(ipaddress.ip_network((int(address), 64), strict=False)), False
    return str(address), address.is_loopback


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> UsageError:
    return UsageError(
        f"cannot listen on {host} port {port}: {reason_of(error)}",
        code="W5-110",
        fix="choose another --port (--port 0: any that is free), or another --host",
    )
