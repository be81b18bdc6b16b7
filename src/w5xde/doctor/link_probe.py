"""Measures how many bytes a second a link carries in each direction, on connections like that of a node.

A probe asks a coordinator for bytes, and sends it as many, which it refuses. The rate follows from the
difference of two probes, one four times as large as the other: round trips, the checks of the greeting and
what a link lets pass at once cost both the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from w5xde.doctor.greeting import greeting, receive
from w5xde.doctor.link_use import MeasuredLink, MeasuredRate
from w5xde.errors import JoinError
from w5xde.message_types import PROBE_BYTES_MAX
from w5xde.messages import Ready, Refuse, Welcome
from w5xde.protocol.wire import Decoder, encode
from w5xde.runtime.node.limits import WELCOME_LIMITS
from w5xde.ticket import Ticket

SIZES = (PROBE_BYTES_MAX // 16, PROBE_BYTES_MAX // 4, PROBE_BYTES_MAX)
# Quick probes are made so often, and the fastest counts: the others waited for something else.
TRIES, QUICK_SECONDS = 2, 0.2
# A coordinator parts with who only looks after 10 s.
PROBE_SECONDS = 8.0
# A probe that took so long is large enough, if a smaller one is there to compare it with.
ENOUGH_SECONDS = 1.0
# After a first probe that took so long, one of four times its size would take too long.
SLOW_SECONDS = PROBE_SECONDS / 4
# A shorter difference says nothing: so long a process may wait for a core, and a new connection takes a few
# round trips to reach its speed.
MEASURABLE_SECONDS = 0.005
MEASURABLE_ROUND_TRIPS = 4
# No clock shows less.
SECONDS_MIN = 1e-6


class Transfer(NamedTuple):
    """How long so many bytes took in one direction, with what else it takes to send them.

    `within_seconds` is from the question to the end of the answer, so that it is never too short; `seconds`
    may be, if bytes had arrived before this process got a core to look at them.
    """

    body_bytes: int
    seconds: float
    within_seconds: float


class Probe(NamedTuple):
    """One probe; without `up` if the time was over before all bytes were sent, and so for `down`."""

    down: Transfer | None
    up: Transfer | None

    @property
    def seconds(self) -> float:
        """The time of both directions."""
        return sum(each.seconds if each else PROBE_SECONDS for each in self)


def measure_link(
    connect: Callable[[], socket.socket], ticket: Ticket, round_trip_seconds: float
) -> MeasuredLink:
    """Measure both directions. Raises JoinError if the coordinator does not answer as it should."""
    probes: list[Probe] = []
    for size in SIZES:
        probe = _probe(connect, ticket, size)
        for _ in range(TRIES - 1):
            if probe.seconds < QUICK_SECONDS:
                probe = _faster(probe, _probe(connect, ticket, size))
        probes.append(probe)
        if probe.seconds > (SLOW_SECONDS if size == SIZES[0] else ENOUGH_SECONDS):
            break
    return link_of(probes, round_trip_seconds)


def link_of(probes: Sequence[Probe], round_trip_seconds: float) -> MeasuredLink:
    """The link that probes of growing size show; the last may have taken too long."""
    # What did not get through within the time bounds the rate from above.
    slow = MeasuredRate(SIZES[len(probes) - 1] / PROBE_SECONDS, "at most")
    down = [probe.down for probe in probes if probe.down is not None]
    up = [probe.up for probe in probes if probe.up is not None]
    return MeasuredLink(
        rate_of(down, round_trip_seconds) if len(down) == len(probes) else slow,
        rate_of(up, round_trip_seconds) if len(up) == len(probes) else slow,
        round_trip_seconds,
    )


def rate_of(transfers: Sequence[Transfer], round_trip_seconds: float) -> MeasuredRate:
    """The rate that transfers of growing size show, or a lower bound if all were too short."""
    last = transfers[-1]
    before = transfers[-2] if len(transfers) > 1 else Transfer(0, 0.0, 0.0)
    seconds = last.seconds - before.seconds
    if seconds < max(MEASURABLE_SECONDS, MEASURABLE_ROUND_TRIPS * round_trip_seconds):
        return MeasuredRate(last.body_bytes / max(last.within_seconds, SECONDS_MIN), "at least")
    return MeasuredRate((last.body_bytes - before.body_bytes) / seconds)


def _faster(one: Probe, other: Probe) -> Probe:
    """Of each direction the one that took less time."""
    down, up = (
        min((each for each in pair if each is not None), key=lambda each: each.seconds, default=None)
        for pair in zip(one, other, strict=True)
    )
    return Probe(down, up)


def _probe(connect: Callable[[], socket.socket], ticket: Ticket, size: int) -> Probe:
    """Get and send this many bytes."""
    decoder = Decoder(WELCOME_LIMITS)
    down = None
    # Bytes that nothing on the way can compress.
    frame = encode(Ready(layout_digest=""), size) + os.urandom(size)
    with _connection_errors(), connect() as sock:
        deadline = time.monotonic() + PROBE_SECONDS
        try:
            asked = time.perf_counter()
            sock.sendall(encode(greeting(ticket, probe=size)))
            welcome = receive(sock, decoder, deadline)
            if welcome is None or not isinstance(welcome.message, Welcome):
                raise _not_measured("the coordinator ended the conversation")
            began = time.perf_counter()
            down = Transfer(size, welcome.seconds, began - asked)
            sock.settimeout(max(SECONDS_MIN, deadline - time.monotonic()))
            sock.sendall(frame)
            refusal = receive(sock, decoder, deadline)
            if refusal is None or not isinstance(refusal.message, Refuse):
                raise _not_measured("the coordinator ended the conversation")
            taken = time.perf_counter() - began
            return Probe(down, Transfer(size, taken, taken))
        except TimeoutError:
            return Probe(down, None)


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    """Turn errors of a connection into JoinErrors."""
    try:
        yield
    except OSError as error:
        raise _not_measured(f"the connection broke ({error.strerror or error})") from error


def _not_measured(why: str) -> JoinError:
    # A coordinator of an older version does not know what is asked for, and hangs up.
    fix = "try again; if that does not help, install the same version of w5xde on both machines"
    return JoinError(f"the speed of the link cannot be measured: {why}", code="W5-107", fix=fix)
