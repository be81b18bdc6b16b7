"""Limits of this machine: forward and backward without a network, a plain byte stream, a copy of memory.

A limit is measured in the same minutes as the contestant that it bounds, because machines drift.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from w5xde.bench.jobs import SEED, read_batches
from w5xde.bench.measure.processes import Line, crew, run_apart, start_together
from w5xde.learn.job.build import build_model
from w5xde.learn.job.job import Job
from w5xde.learn.model.device import core_count, use_threads

SEND_BYTES = 1024 * 1024
# Larger than any cache here, so that memory itself is measured.
COPY_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ComputeLimit:
    """The rate of forward and backward alone, in as many processes as there are cores."""

    processes: int
    batches: int
    seconds: float
    batches_per_second: float
    cpu_us_per_batch: float

    def summary(self) -> dict[str, Any]:
        return asdict(self)


def compute_limit(job: Job, batch_size: int, seconds: float, processes: int | None = None) -> ComputeLimit:
    """Measure how many batches a second the machine computes if it does nothing else."""
    count = processes or core_count()

    def compute(line: Line) -> tuple[int, float, float]:
        use_threads(1)
        model = build_model(job, SEED)
        parameters = list(model.parameters())
        batches = read_batches(job, batch_size)
        at = done = 0

        def once() -> None:
            nonlocal at
            for parameter in parameters:
                parameter.grad = None
            job.loss(model, batches[at]).backward()  # type: ignore[no-untyped-call]
            at = (at + 1) % len(batches)

        once()
        line.say("ready")
        start, stop = line.hear()
        while time.monotonic() < start:
            once()
        began, cpu_before = time.monotonic(), time.process_time()
        while time.monotonic() < stop:
            once()
            done += 1
        return done, time.monotonic() - began, time.process_time() - cpu_before

    with crew({f"limit process {i + 1}": compute for i in range(count)}, seconds) as members:
        found = start_together(members, seconds)
    batches = sum(done for done, _, _ in found)
    return ComputeLimit(
        processes=count,
        batches=batches,
        seconds=statistics.mean(spent for _, spent, _ in found),
        batches_per_second=sum(done / spent for done, spent, _ in found),
        cpu_us_per_batch=1e6 * sum(cpu for _, _, cpu in found) / batches,
    )


def stream_limit(seconds: float, family: str = "tcp") -> float:
    """Bytes a second from one process to another over one stream, in large pieces, into fixed memory."""
    with tempfile.TemporaryDirectory() as folder, _listener(family, Path(folder)) as listener:
        address = listener.getsockname()

        def send(line: Line) -> None:
            with socket.socket(listener.family, socket.SOCK_STREAM) as sock:
                sock.connect(address)
                piece = bytes(SEND_BYTES)
                stop = time.monotonic() + seconds
                while time.monotonic() < stop:
                    sock.sendall(piece)

        with crew({"the sender": send}, seconds):
            return float(run_apart(lambda line: _receive(listener), "the receiver", seconds))


def _listener(family: str, folder: Path) -> socket.socket:
    if family == "tcp":
        return socket.create_server(("127.0.0.1", 0))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "stream"))
    listener.listen()
    return listener


def _receive(listener: socket.socket) -> float:
    sock, _ = listener.accept()
    buffer = bytearray(SEND_BYTES)
    total = 0
    with sock:
        sock.recv_into(buffer)
        began = time.monotonic()
        while received := sock.recv_into(buffer):
            total += received
        return total / (time.monotonic() - began)


def copy_limit(seconds: float) -> float:
    """Bytes a second copied from one place in memory to another."""

    def copy(line: Line) -> float:
        source, target = memoryview(bytearray(COPY_BYTES)), memoryview(bytearray(COPY_BYTES))
        target[:] = source
        copies, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            target[:] = source
            copies += 1
        return copies * COPY_BYTES / (time.monotonic() - began)

    return float(run_apart(copy, "the copier", seconds))
