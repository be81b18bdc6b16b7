"""Times an optimizer step of the user's job on this machine, as a node of a run would make it.

Builds the model and checks it as a node does that joins. Loads torch only when it is called. Knows no
sockets: it gets the coordinator's welcome.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from w5xde.doctor.link_use import TimedStep
from w5xde.errors import JobError
from w5xde.learn.job.job import BatchFailed, Job
from w5xde.messages import TRAINED, Welcome

if TYPE_CHECKING:
    from w5xde.learn.job.node_setup import NodeParts
    from w5xde.learn.train.trainer import Task

# The first steps load kernels and allocate memory.
WARM_UP_SECONDS, WARM_UP_STEPS = 1.0, 3
# The median of as many steps as fit, so that the whole takes less than five seconds.
TIMING_SECONDS, TIMINGS_MAX = 3.0, 200


class NoDataHere(Exception):
    """The job's data cannot be read on this machine; a node of the run would not need it."""

    def __init__(self, error: JobError) -> None:
        super().__init__(error.what)
        self.code = error.code


def time_step(job: Job, welcome: Welcome, batch_size: int | None, device: str) -> TimedStep:
    """Build the job and time a step; JoinError if its model or its data differ from the run's.

    Raises NoDataHere if there is no batch to compute.
    """
    from w5xde.learn.model.device import threads

    # As many as the nodes of the run use; building the job sets them too.
    with threads(welcome.rules.threads):
        return _time_step(job, welcome, batch_size, device)


def _time_step(job: Job, welcome: Welcome, batch_size: int | None, device: str) -> TimedStep:
    from w5xde.learn.data.payload import Packer
    from w5xde.learn.job.node_setup import prepare_node
    from w5xde.learn.model.device import choose_device
    from w5xde.learn.model.layout import DTYPES
    from w5xde.learn.train.trainer import Task
    from w5xde.tree import Span

    parts = prepare_node(job, welcome, choose_device(device))
    samples, batch = _first_batch(job, welcome, batch_size)
    packer = Packer(parts.trainer.types)
    packer.pack(batch)
    task = Task(0, Span(0, 1), 1, samples, [(0, samples, batch)])
    trained = [entry for entry in welcome.layout.entries if entry.role == TRAINED]
    counts = [math.prod(entry.shape) for entry in trained]
    parameter_bytes = sum(
        count * DTYPES[entry.dtype].itemsize for count, entry in zip(counts, trained, strict=True)
    )
    return TimedStep(
        seconds=_median_seconds(lambda: _step(parts, task)),
        parameters=sum(counts),
        parameter_bytes=parameter_bytes,
        samples=samples,
        batch_bytes=packer.body_bytes if welcome.rules.data == "stream" else 0,
    )


def _first_batch(job: Job, welcome: Welcome, batch_size: int | None) -> tuple[int, object]:
    from w5xde.learn.job.build import build_source

    try:
        source = build_source(job, welcome.rules.seed, batch_size, shuffle=True)
        return next(source.readers(0))()
    except JobError as error:
        # A run whose nodes read their own data has compared it already.
        raise NoDataHere(error) from error


def _step(parts: NodeParts, task: Task) -> None:
    try:
        parts.local_steps.compute([task])
    except BatchFailed as error:
        raise JobError(
            f"a step with the first batch failed: {error}",
            code="W5-205",
            fix="call loss(model(), batch) on one batch by hand to see the whole error",
        ) from error


def _median_seconds(step: Callable[[], None]) -> float:
    began, warm_ups = time.perf_counter(), 0
    while warm_ups == 0 or (warm_ups < WARM_UP_STEPS and time.perf_counter() - began < WARM_UP_SECONDS):
        step()
        warm_ups += 1
    taken: list[float] = []
    until = time.perf_counter() + TIMING_SECONDS
    while not taken or (len(taken) < TIMINGS_MAX and time.perf_counter() < until):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
