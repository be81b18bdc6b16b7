"""A contestant, if Ray is installed: an asynchronous parameter server made of Ray actors.

The usual pattern: one actor holds model and optimizer, and the workers are actors that compute gradients on
the weights that they get. The server applies each gradient when it arrives and sends that worker the newest
weights.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import time
from typing import Any

from w5xde.bench.contestants.ddp import Exchanged
from w5xde.bench.jobs import SEED, loss_of, read_batches
from w5xde.bench.measure.meter import cpu_seconds, tree
from w5xde.bench.measure.processes import Line, run_apart
from w5xde.learn.job.build import build_model
from w5xde.learn.job.job import Job
from w5xde.learn.model.device import use_threads

WARM_UP_SECONDS = 1.0
# Ray starts a dozen processes of its own before anything else.
START_SECONDS = 60.0


def is_installed() -> bool:
    return importlib.util.find_spec("ray") is not None


class Server:
    """Holds the model, and applies each gradient when it arrives."""

    def __init__(self, job: Job) -> None:
        use_threads(1)
        self._model = build_model(job, SEED)
        self._parameters = list(self._model.parameters())
        self._optimizer = job.optimizer(self._parameters)

    def weights(self) -> list[Any]:
        return [parameter.detach().numpy() for parameter in self._parameters]

    def apply(self, gradients: list[Any]) -> list[Any]:
        import torch

        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            # A copy: what Ray hands out may not be written to.
            parameter.grad = torch.tensor(gradient)
        self._optimizer.step()
        return self.weights()

    def loss(self, job: Job, batch_size: int) -> float:
        return loss_of(job, self._model, batch_size)


class Worker:
    """Computes gradients of its own batches, one at a time."""

    def __init__(self, job: Job, batch_size: int, rank: int, workers: int) -> None:
        use_threads(1)
        self._job = job
        self._model = build_model(job, SEED)
        self._parameters = list(self._model.parameters())
        self._batches = read_batches(job, batch_size)[rank::workers]
        self._at = 0

    def gradients(self, weights: list[Any]) -> list[Any]:
        import torch

        with torch.no_grad():
            for parameter, weight in zip(self._parameters, weights, strict=True):
                parameter.copy_(torch.tensor(weight))
        for parameter in self._parameters:
            parameter.grad = None
        self._job.loss(self._model, self._batches[self._at % len(self._batches)]).backward()  # type: ignore[no-untyped-call]
        self._at += 1
        return [parameter.grad.numpy() for parameter in self._parameters if parameter.grad is not None]


def run_ray(job: Job, workers: int, batch_size: int, seconds: float) -> Exchanged:
    """Train for `seconds` after a warm-up, in a separate Ray cluster."""
    said = run_apart(
        lambda line: _run(line, job, workers, batch_size, seconds), "Ray", seconds + START_SECONDS
    )
    return Exchanged(**said)


def _run(line: Line, job: Job, workers: int, batch_size: int, seconds: float) -> dict[str, Any]:
    import os

    ray = importlib.import_module("ray")
    ray.init(num_cpus=workers + 1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        server = ray.remote(Server).remote(job)
        hands = [ray.remote(Worker).remote(job, batch_size, rank, workers) for rank in range(workers)]
        weights = server.weights.remote()
        pending = {hand.gradients.remote(weights): hand for hand in hands}
        applied, begin, cpu_begin, began = 0, None, 0.0, time.monotonic()
        while begin is None or time.monotonic() - began < seconds:
            [ready], _ = ray.wait(list(pending), num_returns=1)
            hand = pending.pop(ready)
            weights = server.apply.remote(ready)
            pending[hand.gradients.remote(weights)] = hand
            applied += 1
            if begin is None and applied >= workers and time.monotonic() - began > WARM_UP_SECONDS:
                # Wait until everything sent so far is applied, so that it does not count.
                ray.get(weights)
                begin, began, cpu_begin = applied, time.monotonic(), cpu_seconds(tree(os.getpid()))
        ray.get(weights)
        spent, batches = time.monotonic() - began, applied - begin
        cpu = cpu_seconds(tree(os.getpid())) - cpu_begin
        loss = ray.get(server.loss.remote(job, batch_size))
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
    return {
        "processes": workers,
        "batches": batches,
        "steps": batches,
        "seconds": spent,
        "batches_per_second": batches / spent,
        "cpu_us_per_batch": 1e6 * cpu / batches,
        "loss_all_samples": loss,
    }
