"""Processes for a measurement: forked, with a deadline that the kernel enforces, and killed afterwards.

Forked, because loading torch ten times takes longer than most measurements. The forking process must have one
thread: it loads torch and computes nothing. Knows nothing of what the processes measure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from w5xde.errors import TrainingError, UsageError, W5xdeError

# Seconds that a process may take to load, connect and end, besides its measurement.
OVERHEAD_SECONDS = 90.0
# We give up this much sooner than the kernel, so that there is an error message.
IMPATIENCE_SECONDS = 5.0
# From the start signal to the first moment that counts: every process has got the signal by then.
GO_SECONDS = 0.2


class Line:
    """One end of a connection between two processes of a measurement; carries JSON values."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self._peer = peer
        self._text = b""

    def say(self, value: Any) -> None:
        self._send({"value": value})

    def fail(self, error: W5xdeError) -> None:
        """Send the error that ended this process, as its last message."""
        with contextlib.suppress(OSError):
            self._send({"error": error.what, "code": error.code, "why": error.why, "fix": error.fix})

    def _send(self, said: dict[str, Any]) -> None:
        self._sock.settimeout(OVERHEAD_SECONDS)
        self._sock.sendall(msgspec.json.encode(said) + b"\n")

    def hear(self, seconds: float = OVERHEAD_SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._text:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._sock.recv(65536)
            except TimeoutError:
                raise self._silence(f"said nothing for {seconds:.0f} s") from None
            except OSError as error:
                raise self._silence(f"is gone: {error}") from None
            if not data:
                raise self._silence("ended without a word")
            self._text += data
        text, _, self._text = self._text.partition(b"\n")
        said = msgspec.json.decode(text)
        if "error" in said:
            what = f"{self._peer}: {said['error']}"
            raise TrainingError(what, code=said["code"], why=said["why"], fix=said["fix"])
        return said["value"]

    def _silence(self, what: str) -> TrainingError:
        return TrainingError(f"{self._peer} {what}", code="W5-320")

    def fileno(self) -> int:
        """For an event loop that waits for messages."""
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


Work = Callable[[Line], Any]


class Closable(Protocol):
    """A socket, or a process of a measurement, whose line is closed."""

    def close(self) -> None: ...


class CrewMember:
    """A process of a measurement, with which we exchange messages; it sends its result as the last."""

    def __init__(self, pid: int, line: Line, patience_seconds: float) -> None:
        self.pid = pid
        self._line = line
        self._patience_seconds = patience_seconds

    def say(self, value: Any) -> None:
        self._line.say(value)

    def hear(self) -> Any:
        """Its next message; the last one is its result."""
        return self._line.hear(self._patience_seconds)

    def close(self) -> None:
        self._line.close()

    def end(self) -> None:
        """Kill it and all processes that it started."""
        self.close()
        end_process(self.pid)


class ForkedProcess(CrewMember):
    """A process that is forked from this one, and calls `work`."""

    def __init__(
        self, work: Work, name: str, seconds_max: float, siblings: Sequence[CrewMember] = ()
    ) -> None:
        ours, theirs = socket.socketpair()
        pid = fork_member(work, theirs, seconds_max, [ours, *siblings])
        theirs.close()
        super().__init__(pid, Line(ours, name), seconds_max)


def fork_member(work: Work, sock: socket.socket, seconds_max: float, closed: Sequence[Closable]) -> int:
    """Fork a process that calls `work` with its end of a line, and closes what is not its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        for each in closed:
            each.close()
        _be_member(work, Line(sock, "the benchmark"), seconds_max + IMPATIENCE_SECONDS)
    return pid


def end_process(pid: int) -> None:
    """Kill a child of this process and all processes that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@contextlib.contextmanager
def crew(works: dict[str, Work], seconds: float) -> Iterator[list[ForkedProcess]]:
    """One process for each work, which may measure for `seconds`. All are killed at the end."""
    if not hasattr(os, "fork"):
        raise UsageError("benchmarks need a system that can fork", code="W5-303", fix="run them on Linux")
    members: list[ForkedProcess] = []
    try:
        for name, work in works.items():
            members.append(ForkedProcess(work, name, seconds + OVERHEAD_SECONDS, members))
        yield members
    finally:
        for member in members:
            member.end()


def run_apart(work: Work, name: str, seconds: float) -> Any:
    """Run `work` in one process, which may measure for `seconds`; returns its result."""
    with crew({name: work}, seconds) as [member]:
        return member.hear()


def start_together(members: list[ForkedProcess], seconds: float) -> list[Any]:
    """When all are ready, let all measure during the same seconds; returns their results."""
    for member in members:
        member.hear()
    start = time.monotonic() + GO_SECONDS
    for member in members:
        member.say([start, start + seconds])
    return [member.hear() for member in members]


def warm_up() -> None:
    """Load once what every forked process would have to load."""
    import torch

    torch.set_num_threads(1)
    # The first optimizer imports a compiler.
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])


def _be_member(work: Work, line: Line, seconds_max: float) -> None:
    """Call `work` and exit. Ignores Ctrl-C, which reaches the whole process group: the parent ends us."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds_max)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Results travel over the line; stdout belongs to the parent.
        os.dup2(2, 1)
        line.say(work(line))
    except W5xdeError as error:
        line.fail(error)
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        line.fail(TrainingError(f"{type(error).__name__}: {error}", code="W5-320", why=where))
    finally:
        sys.stderr.flush()
        os._exit(0)
