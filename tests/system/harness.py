"""Real processes for tests: start the command, watch its lines, stop it by its id."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import w5xde
from w5xde.runtime.telemetry.status import RunStatus
from w5xde.ticket import Secret, Ticket

ROOT = Path(__file__).resolve().parents[2]
JOBS = str(ROOT / "tests" / "system" / "jobs.py")
# Longer than anything here takes on a busy machine; a test that needs it has failed.
PATIENCE_SECONDS = 60.0


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", **extra}


class Command:
    """A running `w5xde` command whose lines can be waited for."""

    def __init__(self, *arguments: str, cwd: Path | None = None, **extra: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "w5xde", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env=environment(**extra),
        )
        self.lines: list[str] = []
        # A line that never comes must not hang the suite.
        self._watchdog = threading.Timer(PATIENCE_SECONDS, self.process.kill)
        self._watchdog.start()

    def wait_for(self, text: str) -> str:
        """The next line that holds the text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if text in line:
                return line
        raise AssertionError(f"the command ended without saying {text!r}:\n" + "\n".join(self.lines))

    def finish(self) -> int:
        """Read to the end; returns the exit code."""
        assert self.process.stdout is not None
        if self.process.stdout.closed:
            return self.process.wait()
        self.lines += [line.rstrip() for line in self.process.stdout]
        self._watchdog.cancel()
        self.process.stdout.close()
        return self.process.wait()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@contextmanager
def command(*arguments: str, cwd: Path | None = None, **extra: str) -> Iterator[Command]:
    running = Command(*arguments, cwd=cwd, **extra)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.finish()


def run_json(*arguments: str, cwd: Path, **extra: str) -> dict[str, Any]:
    """Run a command with --json; its stdout must be exactly one JSON object."""
    done = subprocess.run(
        [sys.executable, "-m", "w5xde", *arguments, "--json"],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**extra),
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class AtStep(w5xde.Callback):
    """Does something when a step has been applied."""

    def __init__(self, actions: dict[int, Callable[[RunStatus], None]]) -> None:
        self._actions = actions

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        action = self._actions.get(step)
        if action is not None:
            action(run)


def clear_ticket(address: str) -> str:
    """A ticket to whatever listens at an address of this machine, which need not know it."""
    host, _, port = address.rpartition(":")
    return Ticket(((host, int(port)),), b"", bytes(8), Secret(bytes(16)), is_clear=True).to_text()


def ticket_of(coordinator: Command) -> str:
    """The ticket in the line that a coordinator prints."""
    return coordinator.wait_for("to join:").split("to join:")[1].split()[2]


def when_there(path: Path) -> Path:
    """A file that somebody is about to write, once it is there."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens, and does this with each connection until the test is over."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def full_backlog() -> Iterator[str]:
    """A port that answers nobody: as many wait to be accepted as may, so the system drops the next."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = server.getsockname()
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(place)
        yield f"127.0.0.1:{place[1]}"


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Another process that does this, and is gone afterwards. It has torch already, so it starts at once."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def pid_of(run: RunStatus, name: str) -> int:
    pid = next(node.pid for node in run.nodes if node.name == name)
    assert pid is not None
    return pid


def events(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's ledger, read as anybody would who knows nothing of w5xde."""
    lines = [line for path in sorted(folder.glob("ledger-*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line)["sealed"] for line in lines]
