"""The trial of `Job.weight`: weighs the first batch before any node is used, and refuses what cannot work.

Knows nothing of nodes.
"""

from __future__ import annotations

import torch

from w5xde.errors import JobError
from w5xde.learn.data.sources import MapSource, Source
from w5xde.learn.job.job import BatchFailed, Job
from w5xde.learn.model.device import to_device
from w5xde.learn.train.weighing import unit_of, weigh
from w5xde.specs.round_settings import ROUNDS


def try_weight(job: Job, source: Source, mode: str) -> float:
    """What weights are counted in, by the weight of the first batch; 0 if the job weighs no batches."""
    weight = job.weight
    if weight is None:
        return 0.0
    if mode == ROUNDS:
        raise JobError(
            "a job with weight= cannot be trained in rounds",
            code="W5-257",
            why="there every step of a node has one batch, which is the mean of its step whatever it weighs",
            fix="use --mode sync, or leave weight= out: columns are then weighted by their samples",
        )
    samples = len(source.indices(0, 0)) if isinstance(source, MapSource) else source.batch_size
    batch = source.first(samples)
    try:
        found = weigh(weight, to_device(batch, torch.device("cpu")), "the first batch")
        again = weigh(weight, to_device(batch, torch.device("cpu")), "the first batch")
    except BatchFailed as error:
        raise _no_weight(str(error)) from error
    if found != again:
        raise _no_weight(f"weight() gave {found:g} and then {again:g} for the first batch")
    return unit_of(found, samples)


def _no_weight(what: str) -> JobError:
    fix = "return one number that is not negative, and depends on the batch alone: for example its tokens"
    return JobError(what, code="W5-255", fix=fix)
