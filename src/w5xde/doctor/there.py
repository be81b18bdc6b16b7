"""The way to a coordinator: which of its addresses answer, how soon, and whether it is one at all."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import w5xde
from w5xde.api import parse_address
from w5xde.doctor.finding import Check, Finding, State
from w5xde.errors import RemoteProtocolError
from w5xde.messages import PROTOCOL_VERSION, Hello, Leave, Message, Refuse, Welcome
from w5xde.protocol.wire import MAGIC, Decoder, Limits, encode

DIAL_SECONDS = 5.0
GREETING_SECONDS = 5.0
# Resolving a name has no limit of its own; a system gives up after some 30 s at the latest.
ROUTE_SECONDS = 60.0
DIALS = 5
# A name may have many addresses, and a ticket several names.
ADDRESSES_MAX = 16
ROUND_TRIP_SECONDS_MANY = 0.1
# As for a node: a layout of a very deep model takes a few MiB.
WELCOME_LIMITS = Limits(meta_bytes_max=64 * 1024 * 1024, body_bytes_max=0)


def targets_of(text: str) -> list[tuple[str, int]]:
    """The hosts and ports that a person's words lead to, the likeliest first."""
    return [parse_address(text)]


def checks_there(targets: list[tuple[str, int]]) -> list[Check]:
    return [Check("route", ROUTE_SECONDS, lambda: check_route(targets))]


@dataclass(frozen=True, slots=True)
class _Place:
    """One address to dial."""

    family: int
    address: tuple[Any, ...]

    def __str__(self) -> str:
        host, port = self.address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def dial(self) -> socket.socket:
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        sock.settimeout(DIAL_SECONDS)
        try:
            sock.connect(self.address)
        except BaseException:
            sock.close()
            raise
        return sock


def check_route(targets: list[tuple[str, int]]) -> Iterator[Finding]:
    """Dial every address; then greet the first that answers."""
    places: list[_Place] = []
    for host, port in targets:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            what = f"{host} is not known: {getattr(error, 'strerror', None) or error}"
            yield Finding("route", "error", what, "check the name, or use the machine's address", "W5-103")
        else:
            places += [_Place(family, address) for family, _, _, _, address in found]
    places = list(dict.fromkeys(places))[:ADDRESSES_MAX]
    if not places:
        return
    with ThreadPoolExecutor(len(places)) as threads:
        tried = list(zip(places, threads.map(_seconds_to_connect, places), strict=True))
    reached = [(place, taken) for place, taken in tried if isinstance(taken, float)]
    for place, taken in tried:
        if isinstance(taken, float):
            what = f"{place} answers in {taken * 1000:.1f} ms"
            yield Finding("route", "ok", what, measured={"address": str(place), "connect_seconds": taken})
        else:
            yield _unreached(place, taken, is_only=not reached)
    if reached:
        yield from _look_at(reached[0][0])


def _seconds_to_connect(place: _Place) -> float | OSError:
    began = time.perf_counter()
    try:
        place.dial().close()
    except OSError as error:
        return error
    return time.perf_counter() - began


def _unreached(place: _Place, error: OSError, *, is_only: bool) -> Finding:
    state: State = "error" if is_only else "warning"
    if isinstance(error, TimeoutError):
        fix = "open that port in the coordinator's firewall, or check the address"
        return Finding("route", state, f"no answer from {place} within {DIAL_SECONDS:.0f} s", fix, "W5-104")
    reason = os.strerror(error.errno) if error.errno is not None else str(error)
    fix = "start  w5xde serve  there; for other machines with  --host 0.0.0.0"
    return Finding("route", state, f"nothing answers at {place} ({reason})", fix, "W5-103")


def _look_at(place: _Place) -> Iterator[Finding]:
    yield _link(place)
    answer = None
    # Whoever hangs up or falls silent is not ours.
    with contextlib.suppress(OSError):
        try:
            answer = _greet(place)
        except RemoteProtocolError as error:
            fix = f"install w5xde {w5xde.__version__} on both machines"
            yield Finding("coordinator", "error", f"it speaks another w5xde: {error.what}", fix, error.code)
            return
    if isinstance(answer, Welcome):
        what = f"run {answer.run}, {answer.rules.mode}, protocol {PROTOCOL_VERSION}"
        yield Finding("coordinator", "ok", what, measured={"run": answer.run})
        what = "not spoken: what is sent there can be read on the way, so keep to a network you trust"
        yield Finding("tls", "ok", what, measured={"tls": None})
    elif isinstance(answer, Refuse):
        yield Finding("coordinator", "error", f"it refuses: {answer.what}", answer.fix, answer.code)
    else:
        yield from _not_ours(place)


def _link(place: _Place) -> Finding:
    """The shortest of a few round trips: what is longer waited for something else."""
    taken = [seconds for _ in range(DIALS) if isinstance(seconds := _seconds_to_connect(place), float)]
    if not taken:
        return Finding("link", "warning", f"{place} answered once and then no more", "try again", "W5-103")
    seconds = min(taken)
    what = f"a round trip takes {seconds * 1000:.2f} ms"
    measured = {"round_trip_seconds": round(seconds, 6)}
    if seconds > ROUND_TRIP_SECONDS_MANY:
        fix = "use larger batches, or --mode async, which does not wait for the slowest"
        return Finding("link", "warning", what, fix, measured=measured)
    return Finding("link", "ok", what, measured=measured)


def _greet(place: _Place) -> Message | None:
    """Greet as a node does, and leave again; what was answered, if that began as all our words do."""
    decoder = Decoder(WELCOME_LIMITS)
    deadline = time.monotonic() + GREETING_SECONDS
    is_first = True
    with place.dial() as sock:
        sock.sendall(encode(Hello(protocol=PROTOCOL_VERSION, package=w5xde.__version__, name="doctor")))
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            buffer = decoder.get_buffer()
            count = sock.recv_into(buffer)
            if not count or (is_first and buffer[: min(count, 2)] != MAGIC[:count]):
                return None
            is_first = False
            for frame in decoder.buffer_updated(count):
                with contextlib.suppress(OSError):
                    sock.sendall(encode(Leave("w5xde doctor was only looking")))
                return frame.message
    return None


def _not_ours(place: _Place) -> Iterator[Finding]:
    what = f"something listens at {place}, but it is not a w5xde coordinator"
    yield Finding("coordinator", "error", what, "check the port: w5xde serve prints it", "W5-102")
    version = _tls_version(place)
    if version is not None:
        yield Finding("tls", "ok", f"{version} is spoken there", measured={"tls": version})


def _tls_version(place: _Place) -> str | None:
    """Which TLS is spoken there, if any. Nothing is sent, so nobody's certificate needs to be believed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with contextlib.suppress(OSError):
        sock = place.dial()
        sock.settimeout(GREETING_SECONDS)
        with sock, context.wrap_socket(sock) as secured:
            return secured.version()
    return None
