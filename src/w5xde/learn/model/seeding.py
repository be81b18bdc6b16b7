"""Seeds for the global random generators of torch, Python and numpy. Knows nothing of batches."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import numpy.random  # loaded lazily by numpy: here once, instead of in each forked node
import torch

_NUMPY_SEED_MASK = 2**32 - 1


def seed_everything(seed: int) -> None:
    """Seed every global generator that a model, a data set or a loss may draw from."""
    if torch.accelerator.current_accelerator() is None:
        # This build of torch knows the CPU alone. `torch.manual_seed` would note the seed, and the stack as
        # text, for each kind of accelerator: half a megabyte of source lines in every node.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    seed_python(seed)
    seed_numpy(seed)


def seed_python(seed: int) -> None:
    random.seed(seed)


def seed_numpy(seed: int) -> None:
    np.random.seed(seed & _NUMPY_SEED_MASK)  # noqa: NPY002 - the generator user code draws from


def torch_seeder(device: torch.device) -> Callable[[int], None]:
    """A function that seeds torch for one device; `torch.manual_seed` visits every backend and is slower."""
    cpu = torch.default_generator

    def seed_cpu(seed: int) -> None:
        cpu.manual_seed(seed)

    def seed_both(seed: int) -> None:
        cpu.manual_seed(seed)
        getattr(torch, device.type).manual_seed(seed)

    return seed_cpu if device.type == "cpu" else seed_both


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Restore the global CPU generators after the context."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


class DrawnFrom:
    """Tells which global generators have been drawn from since it was created."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)  # noqa: NPY002

    @property
    def torch(self) -> bool:
        return not torch.equal(self._torch, torch.get_rng_state())

    @property
    def python(self) -> bool:
        return self._python != random.getstate()

    @property
    def numpy(self) -> bool:
        before, now = self._numpy["state"], np.random.get_state(legacy=False)["state"]  # noqa: NPY002
        return before["pos"] != now["pos"] or bool((before["key"] != now["key"]).any())
