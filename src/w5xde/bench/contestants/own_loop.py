"""A contestant: a plain PyTorch loop, as people write it, whose gradients `w5xde.Pool` computes.

Batches are read beforehand, as for the plain loop; a call has as many of them as a step of the run that it is
compared with.
"""

from __future__ import annotations

import os
import time

from w5xde.bench.contestants.ddp import Exchanged
from w5xde.bench.contestants.plain import WARM_UP_STEPS
from w5xde.bench.contestants.product import WARM_UP_PART, WARM_UP_SECONDS
from w5xde.bench.jobs import SEED, loss_of, read_batches
from w5xde.bench.measure.meter import cpu_seconds, tree
from w5xde.bench.measure.processes import Line, run_apart
from w5xde.learn.job.build import build_model
from w5xde.learn.job.job import Job
from w5xde.learn.model.device import use_threads
from w5xde.pool.pool import Pool
from w5xde.setting_sources import ENVIRONMENT_PREFIX


def run_own_loop(job: Job, nodes: int, batch_size: int, parts: int, seconds: float) -> Exchanged:
    """Train for `seconds` after a warm-up, with so many batches in each call."""

    def train(line: Line) -> dict[str, float]:
        use_threads(1)
        # A benchmark does not take the user's own settings.
        for name in [each for each in os.environ if each.startswith(ENVIRONMENT_PREFIX)]:
            del os.environ[name]
        model = build_model(job, SEED)
        optimizer = job.optimizer(model.parameters())
        batches = read_batches(job, batch_size)
        calls = [batches[at : at + parts] for at in range(0, len(batches) - parts + 1, parts)]
        done, warm_up = 0, min(WARM_UP_SECONDS, WARM_UP_PART * seconds)
        with Pool(model, {"loss": job.loss}, nodes=nodes, seed=SEED, devices="cpu", log="silent") as pool:

            def step() -> None:
                nonlocal done
                pool.backward(calls[done % len(calls)])
                optimizer.step()
                optimizer.zero_grad()
                done += 1

            began = time.monotonic()
            while time.monotonic() - began < warm_up or done < WARM_UP_STEPS:
                step()
            family = tree(os.getpid())
            before, began, cpu_before = done, time.monotonic(), cpu_seconds(family)
            while time.monotonic() - began < seconds:
                step()
            spent, cpu, steps = time.monotonic() - began, cpu_seconds(family) - cpu_before, done - before
        return {"steps": steps, "seconds": spent, "cpu": cpu, "loss": loss_of(job, model, batch_size)}

    found = run_apart(train, "the loop with a pool", WARM_UP_SECONDS + seconds)
    steps, spent = int(found["steps"]), found["seconds"]
    return Exchanged(
        processes=nodes,
        batches=steps * parts,
        steps=steps,
        seconds=spent,
        batches_per_second=steps * parts / spent,
        cpu_us_per_batch=1e6 * found["cpu"] / (steps * parts),
        loss_all_samples=found["loss"],
    )
