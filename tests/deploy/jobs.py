"""A job to deploy, whose steps wait for the test: it says in a file how many of them may be made."""

from __future__ import annotations

from pathlib import Path

# A job file of its own, because it is copied to where it runs. GATE is the file.
TEXT = """
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import w5xde
from w5xde.datasets import digits

GATE = Path({gate!r})


def loss(model, batch):
    while w5xde.current().step >= int(GATE.read_text() or 0):
        time.sleep(0.01)
    images, labels = batch
    return cross_entropy(model(images), labels)


job = w5xde.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
    data=digits,
    loss=loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=0.003),
)
"""
GATE = "gate"
# More steps than any run of a test has.
OPEN = 10**9


class GatedJob:
    """The job file, and its gate. `seen_as`: where the job finds their folder, if not where the test does."""

    def __init__(self, folder: Path, seen_as: str | None = None) -> None:
        self.file = folder / "train.py"
        self.file.write_text(TEXT.format(gate=f"{seen_as or folder}/{GATE}"))
        # The coordinator computes a batch of the first step itself before it listens.
        self.allow(1)

    def allow(self, steps: int) -> None:
        """Let the run make so many steps in all."""
        allow(self.file.parent, steps)


def allow(folder: Path, steps: int) -> None:
    """Let the run of the job in this folder make so many steps in all."""
    aside = folder / f"{GATE}.new"
    aside.write_text(str(steps))
    aside.replace(folder / GATE)
