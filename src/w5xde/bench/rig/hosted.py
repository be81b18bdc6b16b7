"""The contestants on the hosts of a rig: a process of a gloo group, our coordinator, our node.

Each host runs this module. An order is plain data, from which every process builds the same job: a text model
whose loss is measured on text that it does not learn from.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from w5xde.api import run_node
from w5xde.bench import jobs
from w5xde.bench.contestants.ddp import keep, meet
from w5xde.bench.contestants.learners import LearnTask, MarkWatcher, batches_of, coordinate, loop
from w5xde.bench.contestants.product import Announcing, settings_for
from w5xde.bench.measure.curves import Curve
from w5xde.bench.measure.processes import Line
from w5xde.bench.rig.hosts import DEVICE, HostedWork, be_host, moved_bytes
from w5xde.bench.rig.link_check import CHECK_WORKS
from w5xde.bench.rig.low_talk import WHOLE_STEPS, WHOLE_STEPS_MIN, MethodStart, method_of
from w5xde.bench.rig.torchft_peer import Place, be_lighthouse, torchft_method
from w5xde.bench.suites.learn_jobs import text_adamw
from w5xde.learn.job.build import build_model
from w5xde.learn.job.job import Job
from w5xde.learn.model.device import use_threads
from w5xde.ticket import parse

# Batches with which the time of a backward pass is estimated, to pace a job.
PACE_BATCHES = 3


class HostedTask(msgspec.Struct, frozen=True):
    """A task for all processes of a contestant; most fields are those of `LearnTask`."""

    parameters: int
    learning_rate: float
    batch_size: int
    seed: int
    nodes: int
    mark_samples: float
    samples_max: float
    seconds_max: float
    mark_seconds: float = 0.0
    target: float | None = None
    hint: float | None = None
    # 0: losses are not measured, and a few batches are used again and again.
    probe_samples: int = 0
    # A batch takes at least this long: the process sleeps after it has computed. 0: as long as it takes.
    paced_seconds: float = 0.0
    # Processes in the nodes' namespaces, by which to find the counters of their links, and what those said
    # before this contestant began.
    node_pids: tuple[int, ...] = ()
    bytes_before: int = 0

    def job(self) -> Job:
        job = replace(jobs.split_text_job(self.parameters), optimizer=text_adamw(self.learning_rate))
        return paced(job, self.batch_size, self.paced_seconds) if self.paced_seconds else job

    def learn_task(self, job: Job) -> LearnTask:
        shared = {name: getattr(self, name) for name in self.__struct_fields__ if name in LearnTask.__slots__}
        return LearnTask(
            job=job,
            **shared,
            held_out=lambda: jobs.held_out_windows(self.probe_samples),
            count_bytes=lambda: moved_bytes(self.node_pids) - self.bytes_before,
        )

    def computing(self, seconds: float, batches: float) -> float:
        """The seconds that a node computed, if it was on a core for these, and learnt from these batches."""
        return batches * self.paced_seconds if self.paced_seconds else seconds


def paced(job: Job, batch_size: int, seconds: float) -> Job:
    """A job whose batches take `seconds`: its loss sleeps, so that nodes on one core do not slow each other.

    For measuring the share of time in which nodes compute, if they are more than this machine has cores.
    """
    backward_seconds: list[float] = []

    def estimate() -> float:
        model, windows = job.model(), jobs.held_out_windows(batch_size)
        found = []
        for _ in range(PACE_BATCHES):
            loss = job.loss(model, windows)
            began = time.thread_time()
            loss.backward()  # type: ignore[no-untyped-call]
            found.append(time.thread_time() - began)
        return min(found)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not backward_seconds:
            backward_seconds.append(estimate())
        began = time.monotonic()
        found = job.loss(model, batch)
        if torch.is_grad_enabled():
            time.sleep(max(0.0, seconds - backward_seconds[0] - (time.monotonic() - began)))
        return found

    return replace(job, loss=loss)


def _be_peer(line: Line, given: dict[str, Any]) -> None:
    """A process of a gloo group. The first one decides when it ends, and the others are killed then."""
    task = msgspec.convert(given["task"], HostedTask)
    rank, is_first = given["rank"], given["rank"] == 0
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    meet(Path(given["meeting"]), rank, task.nodes)
    learn_task = task.learn_task(task.job())
    model = build_model(learn_task.job, task.seed)
    family, _, period = given["method"].partition("-")
    if family == "torchft":
        place = Place(given["address"], given["centre"], task.nodes)
        method = torchft_method(learn_task.job, model, int(period), place)
    else:
        # Where nobody looks at the loss, the first steps must not be most of the time.
        whole_steps = WHOLE_STEPS if task.probe_samples else WHOLE_STEPS_MIN
        method = method_of(given["method"], MethodStart(learn_task.job, model, whole_steps))
    keep(method)
    if task.probe_samples:
        batches: Iterable[Any] = batches_of(learn_task, rank, task.nodes)
    else:
        batches = cycle(jobs.read_batches(learn_task.job, task.batch_size)[rank :: task.nodes])
    dist.barrier()
    curve = loop(
        learn_task,
        model,
        method,
        batches,
        parts=task.nodes,
        period=method.period,
        is_first=is_first,
        # An agreement would cost a trip over the slow links for every mark.
        agree=bool if is_first else lambda _: False,
    )
    curve.seconds_computing = task.computing(method.seconds_computing, method.steps)
    line.say(curve)
    # The first process to end would break the last exchange of the others.
    line.hear()


def _be_coordinator(line: Line, given: dict[str, Any]) -> Curve:
    """Our coordinator: says its ticket, and returns its curve."""
    task = msgspec.convert(given["task"], HostedTask)
    use_threads(1)
    watcher = MarkWatcher(task.learn_task(task.job()))
    summary = coordinate(watcher.task, Announcing(watcher, line), **given["settings"])
    curve = watcher.snapshots.curve()
    on_core = sum(node["seconds_on_core"] for node in summary["nodes"]) / task.nodes
    curve.seconds = summary["seconds"]
    curve.seconds_computing = task.computing(on_core, summary["batches"] / task.nodes)
    return curve


def _be_node(line: Line, given: dict[str, Any]) -> None:
    """Our node: hears the ticket, and works until the run is over."""
    task = msgspec.convert(given["task"], HostedTask)
    ticket = parse(line.hear())
    settings = settings_for("runs", batch_size=task.batch_size, seed=task.seed, **given["settings"])
    run_node(ticket, task.job(), settings, keeps=False)


WORKS: dict[str, HostedWork] = {
    **CHECK_WORKS,
    "peer": _be_peer,
    "coordinator": _be_coordinator,
    "node": _be_node,
    "lighthouse": be_lighthouse,
}

if __name__ == "__main__":
    be_host(WORKS, int(sys.argv[1]))
