"""Strangers who come by the hundred: who has joined goes on, and who may join still does.

From this machine's own addresses, each of which counts
for itself, so that limits act as they would on others.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.security.pool import HERE, Attacked, Stranger, attacked
from tests.system.harness import forked
from w5xde.control import doorman as limits
from w5xde.messages import Refuse, Welcome
from w5xde.runtime.machine import own_addresses

LORIS, IDLE = 64, 500
FLOOD_SECONDS = 3.0


def dial(run: Attacked, source: str) -> socket.socket | None:
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind((source, 0))
    sock.connect_ex((HERE, run.port))
    return sock


def open_now(socks: list[socket.socket]) -> list[socket.socket]:
    """Those that the other side has not closed."""
    kept = []
    for sock in socks:
        readable, _, _ = select.select([sock], [], [], 0)
        with contextlib.suppress(OSError):
            if not readable or sock.recv(1, socket.MSG_PEEK):
                kept.append(sock)
    return kept


def seconds_to_join(run: Attacked, source: str) -> float:
    """How long an honest greeting takes from a quiet address, tried again as a node does."""
    began = time.monotonic()
    while True:
        try:
            with Stranger(run, source=source) as honest:
                honest.greet(name="honest", looks=True)
                if isinstance(honest.hear(), Welcome):
                    return time.monotonic() - began
        except OSError:
            pass
        assert time.monotonic() - began < 20, "nobody was let in"
        time.sleep(0.1)


def rate(run: Attacked, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> float:
    """Steps a second while something else happens."""
    first, began = run.step(), time.monotonic()
    while time.monotonic() - began < seconds:
        meanwhile()
        time.sleep(0.01)
    # Metrics are written every second.
    time.sleep(1.0)
    return (run.step() - first) / (time.monotonic() - began)


def test_those_who_say_nothing_or_little_are_cut_and_others_join_meanwhile(tmp_path: Path) -> None:
    with attacked(tmp_path) as run:
        run.wait_for_step(2)
        process = psutil.Process(run.pid)
        before, quiet = process.memory_info().rss, rate(run, FLOOD_SECONDS)
        began = time.monotonic()
        socks = [sock for _ in range(LORIS + IDLE) if (sock := dial(run, "127.0.0.7"))]
        loris = socks[:LORIS]

        def drip() -> None:
            for sock in loris:
                with contextlib.suppress(OSError):
                    sock.send(b"\x16")

        busy = rate(run, FLOOD_SECONDS, drip)
        assert seconds_to_join(run, "127.0.0.8") < 3.0
        kept = open_now(socks)
        assert len(kept) <= limits.STRANGERS_HERE_MAX
        # Not over a file or two of metrics: what those at the door may take.
        assert process.memory_info().rss - before < 30 * 2**20
        while open_now(kept):
            assert time.monotonic() - began < limits.STRANGER_SECONDS + 5.0, "they are still there"
            drip()
            time.sleep(0.1)
        for sock in socks:
            sock.close()
        assert busy > 0.8 * quiet, (busy, quiet)
        run.wait_until_told("127.0.0.7 was turned away: too many")
        assert run.told().count("127.0.0.7 was turned away") <= 4, "not a line for each of them"
        run.stop_and_compare(tmp_path)


def test_a_flood_of_connections_and_handshakes_does_not_stop_those_who_work(tmp_path: Path) -> None:
    with attacked(tmp_path) as run:
        run.wait_for_step(2)
        quiet = rate(run, FLOOD_SECONDS)

        def flood() -> None:
            while True:
                for _ in range(10):
                    with contextlib.suppress(OSError), socket.socket() as sock:
                        sock.settimeout(0.05)
                        sock.bind(("127.0.0.9", 0))
                        sock.connect((HERE, run.port))
                        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500))
                time.sleep(0.01)

        with forked(flood) as flooding:
            busy = rate(run, FLOOD_SECONDS)
            joined = seconds_to_join(run, "127.0.0.10")
            os.kill(flooding, signal.SIGKILL)
        assert joined < 15.0
        assert busy > 0.8 * quiet, (busy, quiet)
        run.stop_and_compare(tmp_path)


def test_a_node_that_sends_or_takes_hardly_anything_is_cut_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """One byte a second inside a frame; the others go on as if it were not there."""
    with attacked(tmp_path) as run:
        run.wait_for_step(2)
        with Stranger(run) as slow:
            slow.greet(name="snail")
            slow.get_ready()
            slow.sock.sendall(b"W5\x01\x00\xff\x00\x00\x00")
            slow.sock.settimeout(0.5)
            deadline = time.monotonic() + 30
            while "snail left" not in run.told():
                assert time.monotonic() < deadline
                with contextlib.suppress(OSError):
                    slow.sock.sendall(b"\x00")
                time.sleep(0.5)
        assert "snail left (it sent less than 8192 bytes a second for 15 s)" in run.told()
        run.stop_and_compare(tmp_path)


def test_who_guesses_secrets_is_not_heard_for_a_while(tmp_path: Path) -> None:
    """From an address that is not this machine's loopback, if it has one."""
    [own, *_] = own_addresses()
    with attacked(tmp_path) as run:
        codes = []
        for _ in range(limits.FAILURES_MAX + 3):
            try:
                with Stranger(run, host=own) as guess:
                    guess.greet(ticket=bytes(24))
                    answer = guess.hear()
                    codes.append(answer.code if isinstance(answer, Refuse) else None)
            except OSError:
                codes.append(None)
        heard = limits.FAILURES_MAX if own != HERE else len(codes)
        assert codes == ["W5-113"] * heard + [None] * (len(codes) - heard)
        run.stop_and_compare(tmp_path)
