"""Another machine joins by the printed line, from a network of its own; what is on its wire says nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import JOBS, command, run_python, sha256_of

# Documentation's addresses, so that nobody's network is meant. Not named veth: those are left out of tickets.
OURS, THEIRS = "198.51.100.1", "198.51.100.2"
ALL_PROTOCOLS = 3
TLS_13_RECORD = b"\x17\x03\x03"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextmanager
def another_network() -> Iterator[tuple[str, str]]:
    """A network namespace with one link to us: (its name, our end of the link)."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip(
            "a network of its own needs root and the command ip; neither can be had from within a test"
        )
    number = os.getpid() % 100000
    space, ours, theirs = f"w5t{number}", f"w5a{number}", f"w5b{number}"
    ip("netns", "add", space)
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", space)
        ip("addr", "add", f"{OURS}/30", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", space, "addr", "add", f"{THEIRS}/30", "dev", theirs)
        ip("-n", space, "link", "set", theirs, "up")
        ip("-n", space, "link", "set", "lo", "up")
        yield space, ours
    finally:
        subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True, timeout=20)
        ip("netns", "del", space)


class Tap:
    """Everything that passes one end of a link."""

    def __init__(self, link: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        self._socket.bind((link, 0))
        self._socket.settimeout(0.1)
        self._is_over = threading.Event()
        self.packets: list[bytes] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._is_over.is_set():
            try:
                self.packets.append(self._socket.recv(65536))
            except TimeoutError:
                continue

    def close(self) -> bytes:
        self._is_over.set()
        self._thread.join()
        self._socket.close()
        return b"".join(self.packets)


@pytest.mark.parametrize("is_clear", [False, True], ids=["TLS", "clear text"])
def test_a_machine_of_another_network_joins_by_the_printed_line(is_clear: bool, tmp_path: Path) -> None:
    with another_network() as (space, link):
        tap = Tap(link)
        try:
            options = ["--host", "0.0.0.0", "--port", "0", "--epochs", "3", "--runs", str(tmp_path)]
            with command("serve", f"{JOBS}:job", *options, *["--insecure"] * is_clear) as coordinator:
                words = coordinator.wait_for("to join:").split("to join:")[1].split()
                words += ["--accept-code", sha256_of(coordinator)]
                inside = ("ip", "netns", "exec", space)
                state = {"W5XDE_STATE": str(tmp_path / "state")}
                done = run_python("-m", *words, "--name", "far", prefix=inside, variables=state)
                assert done.returncode == 0, done.stderr
                assert coordinator.wait() == 0
        finally:
            wire = tap.close()
    assert "joined jobs-" in done.stdout
    assert ("INSECURE" in done.stdout) == is_clear
    # A frame's header, a greeting, the names of parameters; without TLS all of it is there to be read.
    for plain in (b"W5\x01\x00", b"hello", b"0.weight", b"update", b"far"):
        assert (plain in wire) == is_clear, plain
    assert (wire.count(TLS_13_RECORD) > 10) != is_clear
