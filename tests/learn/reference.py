"""The plain loop: one process, one model, ordinary PyTorch. What the pool must agree with.

Shares no code with the trainer, the learner or the layout. Of w5xde it knows only which samples make a
batch (`MapSource`), the seed of each batch, and how a loss is told where it is; the rest is written the way
anybody would write it.
"""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import Tensor, nn

from w5xde import Job
from w5xde.config import Settings
from w5xde.learn.data.sources import MapSource
from w5xde.learn.train.position import Position, at
from w5xde.specs.data_settings import BATCH_SAMPLES
from w5xde.tree import batch_seed


class Parameters(list[nn.Parameter]):
    """The parameters of a model, which also know their names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.named_parameters = model.named_parameters


def batch_samples(settings: Settings) -> int:
    return settings.batch_size or BATCH_SAMPLES


def train_plainly(job: Job, settings: Settings) -> nn.Module:
    """The model after all steps, trained the way one machine would."""
    seed_all(settings.seed)
    model = job.model()
    seed_all(settings.seed)
    source = MapSource(
        job.data(), batch_size=batch_samples(settings), seed=settings.seed, shuffle=settings.shuffles
    )
    optimizer = job.optimizer(Parameters(model))
    scheduler = None if job.scheduler is None else job.scheduler(optimizer)
    steps = _steps(source.samples, settings)
    for step, (epoch, batches) in enumerate(steps):
        sizes = {
            i: min(batch_samples(settings), source.samples - i * batch_samples(settings)) for i in batches
        }
        total = sum(sizes.values())
        start = {
            name: buffer.detach().clone()
            for name, buffer in model.named_buffers()
            if not runs_on(model, name)
        }
        left: list[dict[str, Tensor]] = []
        for i in batches:
            batch = source.read(epoch, i)
            put_buffers(model, start)
            seed_all(batch_seed(settings.seed, epoch, i))
            with at(Position(step, epoch, i, len(steps))):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.precision == "bf16"):
                    loss = job.loss(model, batch)
                (loss * (sizes[i] / total)).backward()
            left.append({name: buffer.detach().clone() for name, buffer in model.named_buffers()})
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()
        put_buffers(model, {name: meeting(start[name], [each[name] for each in left]) for name in start})
    return model


def _steps(samples: int, settings: Settings) -> list[tuple[int, range]]:
    """`(epoch, its batches)` for each step; a step never spans two epochs."""
    batches = math.ceil(samples / batch_samples(settings))
    return [
        (epoch, range(first, min(first + settings.step_batches, batches)))
        for epoch in range(settings.epochs or 1)
        for first in range(0, batches, settings.step_batches)
    ]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the generator that a loss draws from


def runs_on(model: nn.Module, name: str) -> bool:
    """Whether a buffer goes on from batch to batch: a mean over all of them cannot start anew at each."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, nn.BatchNorm1d | nn.BatchNorm2d) and owner.momentum is None


def put_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        owner, _, local = name.rpartition(".")
        setattr(model.get_submodule(owner), local, value.clone())


def meeting(start: Tensor, left: list[Tensor]) -> Tensor:
    """Where a buffer goes: the mean of what the batches left, counters by the sum of what they added."""
    if all(torch.equal(_raw(each), _raw(start)) for each in left):
        return start
    if start.dtype is torch.bool:
        return torch.stack(left).any(0)
    if start.is_floating_point() or start.is_complex():
        return torch.stack(left).mean(0)
    return start + sum(each - start for each in left)


def differences(found: nn.Module, plain: nn.Module) -> dict[str, float]:
    """How far each tensor is from the plain loop's, relative to its norm; infinity where it must be equal."""
    ours, theirs = found.state_dict(), plain.state_dict()
    if list(ours) != list(theirs):
        raise ValueError(f"other tensors: {sorted(set(ours) ^ set(theirs))}")
    return {name: _relative(ours[name], theirs[name]) for name in ours}


def _relative(ours: Tensor, theirs: Tensor) -> float:
    if torch.equal(_raw(ours), _raw(theirs)):
        return 0.0
    if not theirs.is_floating_point() and not theirs.is_complex():
        return math.inf
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    finite = torch.isfinite(theirs)
    if not torch.equal(ours[~finite], theirs[~finite]):
        return math.inf
    distance = torch.linalg.vector_norm(ours[finite].to(wide) - theirs[finite].to(wide))
    return float(distance / torch.linalg.vector_norm(theirs[finite].to(wide)))


def _raw(tensor: Tensor) -> Tensor:
    """As bytes, so that NaN is no other than NaN and every dtype can be compared."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def initial(job: Job, settings: Settings) -> nn.Module:
    """The model before the first step."""
    seed_all(settings.seed)
    return job.model()
