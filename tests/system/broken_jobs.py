"""Jobs whose optimizer breaks, or takes its time, in the middle of a step; and a disk that syncs slowly.

Every step subtracts one from each parameter, so that the weights themselves say of which step they are:
weights of one step are all equal.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import w5xde

# Two matrices of this side each; above 1 MiB no copy of the model is kept to undo a step.
LARGE, SMALL = 512, 4
# Set by the optimizer's first step: what takes its time does so from then on, and starts are quick.
has_begun = threading.Event()


def number(name: str) -> float:
    return float(os.environ.get(f"TEST_{name}", "0"))


def take_seconds(name: str) -> None:
    """Stand still for as long as this variable says."""
    if has_begun.is_set():
        threading.Event().wait(number(name))


if number("SYNC_SECONDS"):
    quick_sync = os.fsync

    def slow_sync(file: int) -> None:
        take_seconds("SYNC_SECONDS")
        quick_sync(file)

    os.fsync = slow_sync


class Pair(nn.Module):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(side, side))
        self.second = nn.Parameter(torch.zeros(side, side))


def loss(net: nn.Module, batch: Any) -> Tensor:
    """Its gradient is one in every place."""
    return net.get_parameter("first").sum() + net.get_parameter("second").sum() + 0 * batch[0].sum()


class Breaking(torch.optim.SGD):
    """Plain SGD, one parameter after another; TEST_BREAK_AT is its own step at which it breaks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._steps += 1
        has_begun.set()
        breaks = os.environ.get("TEST_BREAK_HOW") if self._steps == number("BREAK_AT") else None
        first, second = self.param_groups[0]["params"]
        first.sub_(first.grad)
        take_seconds("STEP_SECONDS")
        if breaks == "raises":
            raise ValueError("the optimizer is broken")
        second.sub_(second.grad)
        if breaks == "nan":
            second.fill_(float("nan"))


def evaluate(net: nn.Module) -> dict[str, float]:
    take_seconds("EVALUATION_SECONDS")
    return {"mean": float(net.get_parameter("second").mean())}


def _job(side: int) -> w5xde.Job:
    return w5xde.Job(
        model=lambda: Pair(side),
        data=lambda: TensorDataset(torch.zeros(64, 1)),
        loss=loss,
        optimizer=Breaking,
        evaluate=evaluate,
    )


large, small = _job(LARGE), _job(SMALL)
