"""Devices and threads: where torch computes, and on how many cores. Knows nothing of what it computes."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from w5xde.errors import UsageError
from w5xde.learn.job.job import describe
from w5xde.learn.model import cgroup
from w5xde.learn.model.containers import with_parts


def core_count() -> int:
    """The number of cores that this process may use: those it may run on, or less if a container has less."""
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    # A part of a core counts as one: a process that is stopped now and then uses all of it.
    return cores if quota is None else min(cores, max(1, math.ceil(quota)))


def use_threads(count: int) -> None:
    """Let torch use this many threads for the computations of the calling thread.

    torch splits sums by the number of threads, so the bits of results depend on it.
    """
    torch.set_num_threads(max(1, count))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this many threads inside the context."""
    before = torch.get_num_threads()
    use_threads(count)
    try:
        yield
    finally:
        use_threads(before)


@contextlib.contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Make a GPU multiply float32 exactly in the context; its convolutions usually keep ten bits (TF32)."""
    places: tuple[Any, ...] = ()
    if device.type == "cuda":
        places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    try:
        before = [place.allow_tf32 for place in places]
    except RuntimeError:
        # The job has set torch's newer switches, and then the older ones cannot be read: leave them alone.
        places, before = (), []
    for place in places:
        place.allow_tf32 = False
    try:
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.allow_tf32 = was


def choose_device(wanted: str) -> torch.device:
    """The wanted device, the first if there are several; for `auto` the best one of this machine."""
    wanted = wanted.split(",", maxsplit=1)[0].strip()
    if wanted == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UsageError(f"--devices {wanted}: {describe(error)}", code="W5-301", fix=DEVICE_FIX) from error
    is_available = getattr(getattr(torch, device.type, None), "is_available", lambda: False)
    if device.type != "cpu" and not is_available():
        raise UsageError(
            f"--devices {wanted} was asked for, but torch {torch.__version__} finds none here",
            code="W5-301",
            fix=DEVICE_FIX,
        )
    return device


DEVICE_FIX = "--devices auto takes the best there is, --devices cpu always works"


def to_device(value: Any, device: torch.device) -> Any:
    """The same batch with its tensors on a device, in memory that torch allocates.

    Matrix kernels round differently by the alignment of their inputs, and torch aligns all memory alike:
    without the copy the bits would depend on which node computes.
    """
    if isinstance(value, Tensor):
        if device.type != "cpu":
            return value.to(device, non_blocking=True)
        return value.detach().clone().requires_grad_(value.requires_grad)
    return with_parts(value, lambda part: to_device(part, device))
