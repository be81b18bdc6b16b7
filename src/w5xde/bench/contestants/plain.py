"""A contestant: a plain PyTorch loop in one process, as people write it, with batches read beforehand."""

from __future__ import annotations

import time

from w5xde.bench.contestants.ddp import Exchanged
from w5xde.bench.jobs import SEED, loss_of, read_batches
from w5xde.bench.measure.processes import Line, run_apart
from w5xde.learn.job.build import build_model
from w5xde.learn.job.job import Job
from w5xde.learn.model.device import use_threads

WARM_UP_STEPS = 8


def run_plain(job: Job, batch_size: int, seconds: float, *, threads: int = 1) -> Exchanged:
    """Train for `seconds` after a few steps, with this many torch threads."""

    def train(line: Line) -> dict[str, float]:
        use_threads(threads)
        model = build_model(job, SEED)
        optimizer = job.optimizer(model.parameters())
        batches = read_batches(job, batch_size)
        done = 0

        def step() -> None:
            nonlocal done
            job.loss(model, batches[done % len(batches)]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            done += 1

        while done < WARM_UP_STEPS:
            step()
        began, cpu_before = time.monotonic(), time.process_time()
        while time.monotonic() - began < seconds:
            step()
        spent, cpu = time.monotonic() - began, time.process_time() - cpu_before
        steps = done - WARM_UP_STEPS
        return {"steps": steps, "seconds": spent, "cpu": cpu, "loss": loss_of(job, model, batch_size)}

    found = run_apart(train, "the plain loop", seconds)
    steps, spent = found["steps"], found["seconds"]
    return Exchanged(
        processes=1,
        batches=steps,
        steps=steps,
        seconds=spent,
        batches_per_second=steps / spent,
        cpu_us_per_batch=1e6 * found["cpu"] / steps,
        loss_all_samples=found["loss"],
    )
