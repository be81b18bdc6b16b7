"""How a job of a framework is trained here, in one process, and compared with the framework's own model."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from tests.learn.pool import Trained, train_in_pool
from tests.learn.reference import differences
from w5xde import Job
from w5xde.config import Settings
from w5xde.learn.job.job import own_settings
from w5xde.setting_sources import SettingSources

NODE_COUNTS = (1, 2, 7)


def settings_of(job: Job, **flags: Any) -> Settings:
    """The settings of a run of this job: its own, and flags that beat them."""
    return SettingSources("train", flags).with_job(own_settings(job)).resolve()


def train_here(job: Job, **flags: Any) -> Trained:
    """Train with 1, 2 and 7 nodes, which share the work at random: all must end with the same bits."""
    settings = settings_of(job, **flags)
    runs = [train_in_pool(job, settings, nodes=count, seed=count) for count in NODE_COUNTS]
    hashes = {count: run.sha256 for count, run in zip(NODE_COUNTS, runs, strict=True)}
    if len(set(hashes.values())) != 1:
        raise AssertionError(f"the bits depend on the number of nodes: {hashes}")
    return runs[0]


def check_same(
    trained: nn.Module, theirs: nn.Module, start: nn.Module, *, within: float = 1e-6, but_for: str = ""
) -> float:
    """Require the weights of the other loop, within a relative difference, and that they moved at all.

    Returns the largest difference. `but_for` is a pattern of names of tensors that are not compared.
    """
    if max(differences(theirs, start).values()) < 1e-3:
        raise AssertionError("nothing was trained, so nothing is shown")
    found = differences(trained, theirs)
    compared = {name: far for name, far in found.items() if not (but_for and re.search(but_for, name))}
    wrong = {name: far for name, far in compared.items() if not far <= within}
    if wrong:
        raise AssertionError(f"not the weights of the other loop: {wrong}")
    return max(compared.values())
