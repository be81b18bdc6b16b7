"""Checks of the connection to a coordinator: which of its addresses answer, how fast, and what answers there.

With a ticket the check greets as a node does, over TLS with the pinned certificate, and learns which run it
is. The greeting says that it only looks, so the ticket is not used. Without a ticket a coordinator refuses.
With a job it also times a step, measures the link, and predicts what a run would use of this machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import w5xde
from w5xde.doctor.finding import Check, Finding, State
from w5xde.doctor.greeting import greeting, receive
from w5xde.doctor.link_probe import measure_link
from w5xde.doctor.link_use import SHARE_FEW, Prediction
from w5xde.doctor.step_time import NoDataHere, time_step
from w5xde.errors import JoinError, RemoteProtocolError
from w5xde.learn.job.job import Job
from w5xde.messages import PROTOCOL_VERSION, Leave, Message, Refuse, Welcome
from w5xde.protocol.wire import Decoder, encode
from w5xde.runtime.admission.ticket_source import find_ticket
from w5xde.runtime.net import tls
from w5xde.runtime.net.sockets import is_here
from w5xde.runtime.node.limits import WELCOME_LIMITS
from w5xde.ticket import Ticket, parse_address

DIAL_SECONDS = 5.0
GREETING_SECONDS = 5.0
# Resolving a name has no limit of its own; systems give up after about 30 s.
ROUTE_SECONDS = 60.0
# Building a large model and reading the first batch of its data may take long.
JOB_SECONDS = 120.0
DIALS = 5
# A name may have many addresses, and a ticket several names.
ADDRESSES_MAX = 16
ROUND_TRIP_SECONDS_MANY = 0.1
# The code of a coordinator's answer to a greeting without a ticket.
NEEDS_TICKET = "W5-113"


@dataclass(frozen=True, slots=True)
class Target:
    """The addresses of a coordinator, best first, and a ticket for it, if there is one."""

    addresses: tuple[tuple[str, int], ...]
    ticket: Ticket | None = None


def target_of(text: str) -> Target:
    """Return the target that a user names by a ticket, by `@file` or by an address."""
    if text.startswith(("@", "-")) or ":" not in text:
        ticket = find_ticket(text)
        return Target(ticket.addresses, ticket)
    return Target((parse_address(text),))


@dataclass(frozen=True, slots=True)
class Prospect:
    """A job that this machine may help with."""

    job: Job
    batch_size: int | None
    device: str


def coordinator_checks(target: Target, prospect: Prospect | None = None) -> list[Check]:
    """The checks of a coordinator; with a prospect also what this machine would do for it."""
    met = Met()
    checks = [Check("route", ROUTE_SECONDS, lambda: check_route(target, met))]
    if prospect is not None:
        checks.append(Check("job", JOB_SECONDS, lambda: check_use(target, met, prospect)))
    return checks


@dataclass(frozen=True, slots=True)
class _Address:
    """One address to dial."""

    family: int
    sockaddr: tuple[Any, ...]
    # As the user named it, for certificates that are valid for a name.
    name: str = ""

    def __str__(self) -> str:
        host, port = self.sockaddr[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def dial(self) -> socket.socket:
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        sock.settimeout(DIAL_SECONDS)
        try:
            sock.connect(self.sockaddr)
            # As nodes do: a greeting must not wait until the end of the handshake is acknowledged.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock


@dataclass(slots=True)
class Met:
    """What the check of the route learned, once a coordinator has welcomed it."""

    address: _Address | None = None
    round_trip_seconds: float = 0.0
    welcome: Welcome | None = None


def check_route(target: Target, met: Met | None = None) -> Iterator[Finding]:
    """Dial every address, and greet the first that answers; `met` is filled with what is learned."""
    addresses: list[_Address] = []
    for host, port in target.addresses:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            what = f"{host} is not known: {getattr(error, 'strerror', None) or error}"
            yield Finding("route", "error", what, "check the name, or use the machine's address", "W5-103")
        else:
            addresses += [_Address(family, sockaddr, host) for family, _, _, _, sockaddr in found]
    addresses = list(dict.fromkeys(addresses))[:ADDRESSES_MAX]
    if not addresses:
        return
    with ThreadPoolExecutor(len(addresses)) as threads:
        tried = list(zip(addresses, threads.map(_seconds_to_connect, addresses), strict=True))
    reached = [(address, taken) for address, taken in tried if isinstance(taken, float)]
    for address, taken in tried:
        if isinstance(taken, float):
            what = f"{address} answers in {taken * 1000:.1f} ms"
            yield Finding("route", "ok", what, measured={"address": str(address), "connect_seconds": taken})
        else:
            yield _not_reached(address, taken, is_only=not reached)
    if reached:
        yield from _check_coordinator(reached[0][0], target.ticket, met or Met())


def _seconds_to_connect(address: _Address) -> float | OSError:
    began = time.perf_counter()
    try:
        address.dial().close()
    except OSError as error:
        return error
    return time.perf_counter() - began


def _not_reached(address: _Address, error: OSError, *, is_only: bool) -> Finding:
    state: State = "error" if is_only else "warning"
    if isinstance(error, TimeoutError):
        fix = "open that port in the coordinator's firewall, or check the address"
        return Finding("route", state, f"no answer from {address} within {DIAL_SECONDS:.0f} s", fix, "W5-104")
    reason = os.strerror(error.errno) if error.errno is not None else str(error)
    fix = "start  w5xde serve  there; for other machines with  --host 0.0.0.0"
    return Finding("route", state, f"nothing answers at {address} ({reason})", fix, "W5-103")


def _check_coordinator(address: _Address, ticket: Ticket | None, met: Met) -> Iterator[Finding]:
    link = _link(address)
    yield link
    answer = None
    # A coordinator neither hangs up nor stays silent.
    with contextlib.suppress(OSError):
        try:
            with _connector(address, ticket)() as sock:
                secured = tls.version_of(sock)
                answer = _greet(sock, ticket)
        except JoinError as error:
            yield Finding("tls", "error", error.what, error.fix, error.code)
            return
        except RemoteProtocolError as error:
            fix = f"install w5xde {w5xde.__version__} on both machines"
            yield Finding("coordinator", "error", f"it speaks another w5xde: {error.what}", fix, error.code)
            return
    if isinstance(answer, Welcome):
        met.address, met.welcome = address, answer
        met.round_trip_seconds = link.measured.get("round_trip_seconds", 0.0)
        what = f"run {answer.run}, {answer.rules.mode}, protocol {PROTOCOL_VERSION}"
        yield Finding("coordinator", "ok", what, measured={"run": answer.run})
        yield _privacy(address, secured)
    elif isinstance(answer, Refuse) and ticket is None and answer.code == NEEDS_TICKET:
        what = "a w5xde coordinator, which says more to who has a ticket:  w5xde doctor TICKET"
        yield Finding("coordinator", "ok", what)
    elif isinstance(answer, Refuse):
        yield Finding("coordinator", "error", f"it refuses: {answer.what}", answer.fix, answer.code)
    else:
        yield from _not_a_coordinator(address, ticket)


def _privacy(address: _Address, version: str | None) -> Finding:
    measured = {"tls": version}
    if version is not None:
        return Finding("tls", "ok", f"{version}, to the certificate that the ticket names", measured=measured)
    if is_here(address.sockaddr[0]):
        return Finding("tls", "ok", "not needed: nothing leaves this machine", measured=measured)
    what = "not spoken: what is sent there can be read and changed on the way"
    return Finding("tls", "warning", what, "start the coordinator without --insecure", measured=measured)


def _link(address: _Address) -> Finding:
    """Measure the shortest of a few round trips; longer ones waited for something else."""
    taken = [seconds for _ in range(DIALS) if isinstance(seconds := _seconds_to_connect(address), float)]
    if not taken:
        return Finding("link", "warning", f"{address} answered once and then no more", "try again", "W5-103")
    seconds = min(taken)
    what = f"a round trip takes {seconds * 1000:.2f} ms"
    measured = {"round_trip_seconds": round(seconds, 6)}
    if seconds > ROUND_TRIP_SECONDS_MANY:
        fix = "use larger batches, or --mode rounds, which talks seldom"
        return Finding("link", "warning", what, fix, measured=measured)
    return Finding("link", "ok", what, measured=measured)


def _connector(address: _Address, ticket: Ticket | None) -> Callable[[], socket.socket]:
    """A function that connects for a greeting. JoinError if the way leads elsewhere than the ticket says."""
    if ticket is None or ticket.is_clear:
        return address.dial
    if ticket.is_pki:
        trusted = tls.client_context_pki()
        return lambda: tls.shake_hands(address.dial(), trusted, address.name, str(address))
    # As a node does: look at the certificate, then connect again and require it.
    with tls.shake_hands(address.dial(), tls.inspection_context(), tls.NO_NAME, str(address)) as looking:
        certificate = tls.check_pin(looking, ticket.fingerprint, str(address))
    pinned = tls.client_context(certificate)
    return lambda: tls.shake_hands(address.dial(), pinned, tls.NO_NAME, str(address))


def _greet(sock: socket.socket, ticket: Ticket | None) -> Message | None:
    """Greet as a node does, and leave; returns the answer, or None if it is not of this protocol."""
    sock.sendall(encode(greeting(ticket)))
    answer = receive(sock, Decoder(WELCOME_LIMITS), time.monotonic() + GREETING_SECONDS)
    if answer is not None:
        with contextlib.suppress(OSError):
            sock.sendall(encode(Leave("w5xde doctor was only looking")))
    return answer.message if answer is not None else None


# --- what a run would use of this machine ---------------------------------------------------------


def check_use(target: Target, met: Met, prospect: Prospect) -> Iterator[Finding]:
    """Time a step of the job, measure the link, and predict for which share of the time a node computes."""
    welcome, address, ticket = met.welcome, met.address, target.ticket
    if welcome is None or address is None or ticket is None:
        return  # why there is no welcome was told already
    try:
        step = time_step(prospect.job, welcome, prospect.batch_size, prospect.device)
    except NoDataHere as error:
        what = f"the time of a step cannot be measured here: {error}"
        fix = "a run needs no data here, but this check computes a batch of it: copy the data, or try a join"
        yield Finding("job", "warning", what, fix, error.code)
        return
    link = measure_link(_connector(address, ticket), ticket, met.round_trip_seconds)
    yield use_finding(Prediction(step, link), welcome.rules.mode)


def use_finding(predicted: Prediction, mode: str) -> Finding:
    """What is predicted for a run in this mode, as a finding."""
    what, numbers = predicted.sentence(mode), predicted.numbers()
    if predicted.best < SHARE_FEW:
        fix = "use larger batches, or --data local; or let a machine help that has a better link"
        return Finding("link", "warning", what, fix, measured=numbers)
    return Finding("link", "ok", what, measured=numbers)


def _not_a_coordinator(address: _Address, ticket: Ticket | None) -> Iterator[Finding]:
    version = None
    # Nothing is sent, so the certificate need not be trusted.
    with (
        contextlib.suppress(OSError, JoinError),
        tls.shake_hands(address.dial(), tls.inspection_context(), tls.NO_NAME, str(address)) as looking,
    ):
        version = tls.version_of(looking)
    if version is not None and ticket is None:
        what = (
            f"{version} is spoken at {address}; whether that is a w5xde coordinator shows only with a ticket"
        )
        yield Finding("coordinator", "warning", what, "w5xde doctor TICKET", "W5-102")
    else:
        what = f"something listens at {address}, but it is not a w5xde coordinator"
        yield Finding("coordinator", "error", what, "check the port: w5xde serve prints it", "W5-102")
    if version is not None:
        yield Finding("tls", "ok", f"{version} is spoken there", measured={"tls": version})
