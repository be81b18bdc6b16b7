"""`python -m tests.security.floods`: strangers by the hundred at a run over TLS, in full length.

    crowd   64 connections that drip a byte now and then, and 500 that say nothing; who is cut comes again
    flood   1,000 connections a second, each with half a greeting of TLS

From one address and from 64, each of which counts for itself at the door. Asked: nodes that have joined keep
80 % of their batches a second; who may join does within 3 s, during the flood within 15 s.

Attacker, coordinator and nodes share this machine's cores. So the same attack is also made on a door that is
nobody's: what remains then is what the attacker itself leaves, whatever the coordinator does.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import w5xde
from tests import conftest  # noqa: F401  (one torch thread, and keys of its own)
from tests.processes import HERE, JOBS, ROOT, Coordinator, coordinator, forked

LORIS, IDLE = 64, 500
DRIP_SECONDS, AGAIN_SECONDS = 0.5, 5.0
CONNECTS_PER_SECOND, FLOOD_BATCH = 1000, 10
# A greeting of TLS that is cut short: a server that began to read it waits for the rest.
HALF_A_GREETING = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(250)) * 2
KEPT_MIN, JOIN_SECONDS, JOIN_SECONDS_IN_FLOOD = 0.8, 3.0, 15.0

# --- attackers ------------------------------------------------------------------------------------


class Tally:
    """How many connections attackers have made, seen from every process that was forked since."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    @property
    def count(self) -> int:
        return int.from_bytes(self._memory[:], "little")

    def add(self) -> None:
        self._memory[:] = (self.count + 1).to_bytes(8, "little")


def one_address() -> list[str]:
    return ["127.0.0.7"]


def many_addresses() -> list[str]:
    return [f"127.0.2.{1 + number}" for number in range(64)]


def dial(port: int, source: str) -> socket.socket:
    """A connection that is under way; whether it comes about is seen later."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind((source, 0))
    sock.connect_ex((HERE, port))
    return sock


def dial_crowd(port: int, sources: list[str]) -> list[socket.socket]:
    """All of them; the first `LORIS` are those that drip."""
    return [dial(port, sources[number % len(sources)]) for number in range(LORIS + IDLE)]


def drip(socks: list[socket.socket]) -> None:
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.send(HALF_A_GREETING[:1])


def open_now(socks: list[socket.socket]) -> list[socket.socket]:
    """Those that the other side has not closed."""
    kept = []
    for sock in socks:
        readable, _, _ = select.select([sock], [], [], 0)
        with contextlib.suppress(OSError):
            if not readable or sock.recv(1, socket.MSG_PEEK):
                kept.append(sock)
    return kept


def crowd(port: int, sources: list[str], tally: Tally) -> None:
    """Drips, and comes again, until it is killed."""
    socks = dial_crowd(port, sources)
    for _ in socks:
        tally.add()
    rounds = 0
    while True:
        time.sleep(DRIP_SECONDS)
        drip(socks[:LORIS])
        rounds += 1
        if rounds % round(AGAIN_SECONDS / DRIP_SECONDS) == 0:
            here = set(open_now(socks))
            for number, sock in enumerate(socks):
                if sock not in here:
                    sock.close()
                    socks[number] = dial(port, sources[number % len(sources)])
                    tally.add()


def knock(port: int, source: str) -> bool:
    """One connection of a flood: made, greeted by half, and let go. Whether somebody answered."""
    with contextlib.suppress(OSError), socket.socket() as sock:
        sock.settimeout(0.05)
        sock.bind((source, 0))
        sock.connect((HERE, port))
        sock.sendall(HALF_A_GREETING)
        return True
    return False


def flood(port: int, sources: list[str], tally: Tally) -> None:
    """So many a second, or as many as this machine makes, until it is killed."""
    began, made = time.monotonic(), 0
    while True:
        for _ in range(FLOOD_BATCH):
            if knock(port, sources[made % len(sources)]):
                tally.add()
            made += 1
        time.sleep(max(0.0, began + made / CONNECTS_PER_SECOND - time.monotonic()))


Attack = Callable[[int, list[str], Tally], None]
ATTACKS: dict[str, tuple[Attack, Callable[[], list[str]], float]] = {
    "crowd-one": (crowd, one_address, JOIN_SECONDS),
    "crowd-many": (crowd, many_addresses, JOIN_SECONDS),
    "flood-one": (flood, one_address, JOIN_SECONDS_IN_FLOOD),
    "flood-many": (flood, many_addresses, JOIN_SECONDS_IN_FLOOD),
}

# --- what is measured -----------------------------------------------------------------------------

# Nodes that compute elsewhere take their time without a core of ours; nodes here share the attacker's.
BATCH_SECONDS = 0.02
_MORE: dict[str, Any] = {"road": "tcp", "epochs": 10**6, "batch_size": 32, "batches_per_step": 32}
POOLS = {
    "elsewhere": {"job": f"{JOBS}:slow", "nodes": 8, **_MORE},
    "here": {"job": str(ROOT / "examples" / "seed_mlp.py"), "nodes": 2, **_MORE},
}


def rate(run: Coordinator, seconds: float) -> float:
    """Batches a second between two lines of metrics that are so far apart."""
    first = last = run.metrics_after(run.metrics()["seconds"])
    while last["seconds"] < first["seconds"] + seconds:
        last = run.metrics_after(last["seconds"])
    return float((last["batches"] - first["batches"]) / (last["seconds"] - first["seconds"]))


@contextlib.contextmanager
def bare_door() -> Iterator[int]:
    """A port where everybody is let in and let go: the cheapest that a server can do."""
    with socket.create_server((HERE, 0), backlog=1024) as server:

        def accept() -> None:
            while True:
                with contextlib.suppress(OSError):
                    server.accept()[0].close()

        with forked(accept):
            yield server.getsockname()[1]


def seconds_to_join(run: Coordinator, job: str, name: str) -> float:
    """How long a real node takes from its first packet until the coordinator says that it joined."""

    def join() -> None:
        # A node of its own: one that comes again keeps its name.
        with tempfile.TemporaryDirectory() as state:
            os.environ["W5XDE_STATE"] = state
            w5xde.join(run.ticket, job, node_name=name, road="tcp", log="silent")

    began = time.monotonic()
    with forked(join):
        run.wait_until_recorded(f"{name} joined")
        return time.monotonic() - began


@dataclass
class Row:
    """What one attack did to one pool."""

    pool: str
    attack: str
    connects_per_second: float
    quiet: float
    busy: float
    decoy: float
    join_quiet_seconds: float
    join_seconds: float
    join_seconds_max: float

    @property
    def kept(self) -> float:
        return self.busy / self.quiet

    @property
    def is_kept(self) -> bool:
        return self.kept >= KEPT_MIN and self.join_seconds <= self.join_seconds_max

    def text(self) -> str:
        figures = [
            f"{self.connects_per_second:,.0f}",
            f"{self.quiet:,.0f}",
            f"{self.busy:,.0f}",
            f"{self.kept:.2f}",
            f"{self.decoy / self.quiet:.2f}",
            f"{self.join_quiet_seconds:.2f} s",
            f"{self.join_seconds:.2f} s",
            f"{self.join_seconds_max:.0f} s",
        ]
        words = [self.pool, self.attack, *figures, "kept" if self.is_kept else "MISSED"]
        return line(words)


HEADINGS = ["nodes", "attack", "connects/s", "b/s quiet", "attacked", "ratio", "bare door"]
HEADINGS += ["join quiet", "attacked", "asked", ""]


def line(words: list[str]) -> str:
    return "  ".join(f"{word:<10}" if at < 2 else f"{word:>10}" for at, word in enumerate(words))


def measure(pool: str, names: list[str], seconds: float) -> Iterator[Row]:
    """Each attack between two quiet times; and the same at a door that is nobody's, before it."""
    job = str(POOLS[pool]["job"])
    with tempfile.TemporaryDirectory() as folder, coordinator(Path(folder), **POOLS[pool]) as run:
        run.wait_for_step(20)
        join_quiet = seconds_to_join(run, job, "before")
        quiet = rate(run, seconds / 2)
        for name in names:
            attack, sources, join_seconds_max = ATTACKS[name]
            with bare_door() as port, forked(partial(attack, port, sources(), Tally())):
                decoy = rate(run, seconds / 2)
            tally, began = Tally(), time.monotonic()
            with forked(partial(attack, run.port, sources(), tally)):
                busy = rate(run, seconds)
                made = tally.count / (time.monotonic() - began)
                joined = seconds_to_join(run, job, f"during-{name}")
            before, quiet = quiet, rate(run, seconds / 2)
            usual = (before + quiet) / 2
            yield Row(pool, name, made, usual, busy, decoy, join_quiet, joined, join_seconds_max)
        run.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security.floods")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack (default: 10)")
    parser.add_argument("--pools", default=",".join(POOLS), help="(default: all)")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="(default: all)")
    given = parser.parse_args()
    os.environ["TEST_BATCH_SECONDS"] = str(BATCH_SECONDS)
    is_kept = True
    print(line(HEADINGS), flush=True)
    for pool in given.pools.split(","):
        for row in measure(pool, given.attacks.split(","), given.seconds):
            print(row.text(), flush=True)
            is_kept &= row.is_kept
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
