"""Seeds: the global generators draw what they would draw after the libraries' own calls."""

from __future__ import annotations

import linecache
import random

import numpy as np
import torch

from w5xde.learn.model.seeding import as_before, seed_everything


def draws() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), random.random(), float(np.random.rand())  # noqa: NPY002


def test_every_generator_draws_as_after_its_own_seed() -> None:
    with as_before():
        seed_everything(7)
        ours = draws()
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        assert draws() == ours


def test_a_seed_reads_no_source_files() -> None:
    """torch would keep their text in each node, for accelerators that its build does not know."""
    linecache.clearcache()
    with as_before():
        seed_everything(7)
    assert not linecache.cache
