"""A contestant: PyTorch's DistributedDataParallel over gloo, with its fastest options.

The same model, data, batch size and optimizer; one process for each node, one thread in each, batches read
beforehand. A step is one batch of each process, summed by all-reduce.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from w5xde.bench.jobs import SEED, loss_of, read_batches
from w5xde.bench.measure.processes import Line, Work, crew
from w5xde.learn.job.build import build_model
from w5xde.learn.job.job import Job
from w5xde.learn.model.device import use_threads

GLOO_TIMEOUT_SECONDS = 60.0
# How often the processes agree whether to go on: seldom enough to cost nothing.
CHUNK_SECONDS = 0.1
CHUNK_STEPS_MAX = 2000
EPOCHS_READ = 8


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What a contestant did while it was measured."""

    processes: int
    batches: int
    steps: int
    seconds: float
    batches_per_second: float
    cpu_us_per_batch: float
    loss_all_samples: float | None

    def summary(self) -> dict[str, Any]:
        return asdict(self)


# The fastest options. Buffers are not sent: those of our jobs never change.
DDP_OPTIONS: dict[str, Any] = {
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "broadcast_buffers": False,
}


def data_parallel(model: nn.Module) -> DistributedDataParallel:
    """A model whose gradients are averaged over all processes, with the fastest options."""
    with warnings.catch_warnings():
        # The new name of `broadcast_buffers` is younger than the oldest torch that we take.
        warnings.simplefilter("ignore", FutureWarning)
        parallel = DistributedDataParallel(model, **DDP_OPTIONS)
    keep(parallel)
    return parallel


def send_bf16(parallel: DistributedDataParallel) -> None:
    """Send gradients in half the bytes."""
    everybody: Any = dist.group.WORLD
    # Wrapped, because torch refuses this hook by its name where there is no GPU, although gloo sums bf16.
    parallel.register_comm_hook(
        None, lambda group, bucket: default_hooks.bf16_compress_hook(group or everybody, bucket)
    )


def run_ddp(job: Job, processes: int, batch_size: int, seconds: float, *, bf16: bool = False) -> Exchanged:
    """Train for `seconds` after a warm-up; `bf16` sends gradients in half the bytes."""

    def train(rank: int) -> tuple[Callable[[], None], Callable[[], float | None]]:
        model = build_model(job, SEED)
        parallel = data_parallel(model)
        if bf16:
            send_bf16(parallel)
        optimizer = job.optimizer(model.parameters())
        batches = read_batches(job, batch_size, epochs=EPOCHS_READ)[rank::processes]
        at = 0

        def step() -> None:
            nonlocal at
            job.loss(parallel, batches[at % len(batches)]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            at += 1

        return step, lambda: loss_of(job, model, batch_size) if rank == 0 else None

    return _run(train, processes, seconds)


def run_all_reduce(parameters: int, processes: int, seconds: float) -> Exchanged:
    """Only the exchange: a vector of this many floats, summed over all processes."""

    def reduce(rank: int) -> tuple[Callable[[], None], Callable[[], float | None]]:
        vector = torch.zeros(parameters)
        return lambda: dist.all_reduce(vector), lambda: None

    return _run(reduce, processes, seconds)


Prepare = Callable[[int], tuple[Callable[[], None], Callable[[], float | None]]]


def _run(prepare: Prepare, processes: int, seconds: float) -> Exchanged:
    found = run_group(lambda rank: _measure(prepare, rank, seconds), processes, seconds)
    steps, spent = found[0]["steps"], found[0]["seconds"]
    return Exchanged(
        processes=processes,
        batches=steps * processes,
        steps=steps,
        seconds=spent,
        batches_per_second=steps * processes / spent,
        cpu_us_per_batch=1e6 * sum(one["cpu_seconds"] for one in found) / (steps * processes),
        loss_all_samples=found[0]["loss"],
    )


# Objects that use gloo, never freed: torch waits for the thread of gloo while it holds the interpreter lock,
# and that thread may wait for the lock. The process is killed instead.
_kept: list[Any] = []


def _measure(prepare: Prepare, rank: int, seconds: float) -> dict[str, Any]:
    step, loss = prepare(rank)
    keep(step)
    chunk = chunk_steps(step)
    done, cpu_before, began = 0, time.process_time(), time.monotonic()
    while agree(time.monotonic() - began < seconds):
        for _ in range(chunk):
            step()
        done += chunk
    spent, cpu = time.monotonic() - began, time.process_time() - cpu_before
    return {"steps": done, "seconds": spent, "cpu_seconds": cpu, "loss": loss()}


def chunk_steps(step: Callable[[], None]) -> int:
    """Warm up (the first steps build buckets), and count the steps between two agreements."""
    for _ in range(3):
        step()
    began = time.monotonic()
    for _ in range(5):
        step()
    seconds = torch.tensor([(time.monotonic() - began) / 5])
    dist.broadcast(seconds, 0)
    return max(1, min(CHUNK_STEPS_MAX, int(CHUNK_SECONDS / float(seconds))))


def agree(mine: bool) -> bool:
    """The answer of the first process, so that all make the same number of steps."""
    flag = torch.tensor([1.0 if mine else 0.0])
    dist.broadcast(flag, 0)
    return bool(flag.item())


# --- processes that exchange over gloo ----------------------------------------------------------------


def keep(used: Any) -> None:
    """Keep an object that uses gloo until the process is killed."""
    _kept.append(used)


def run_group(work: Callable[[int], Any], processes: int, seconds: float) -> list[Any]:
    """Call `work(rank)` in each process of a gloo group, for about `seconds`; returns their results."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "gloo"
        works = {
            f"DDP process {rank + 1}": _member(work, meeting, rank, processes) for rank in range(processes)
        }
        with crew(works, seconds) as members:
            return [member.hear() for member in members]


def _member(work: Callable[[int], Any], meeting: Path, rank: int, processes: int) -> Work:
    def be_member(line: Line) -> None:
        # All processes are on this machine: a host name that does not resolve must not stop them.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meet(meeting, rank, processes)
        line.say(work(rank))
        # No process ends before all have answered: that would break the last exchange of the others.
        line.hear()

    return be_member


def meet(meeting: Path, rank: int, processes: int) -> None:
    """Join the group of all processes that meet by this file."""
    use_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=GLOO_TIMEOUT_SECONDS),
    )
