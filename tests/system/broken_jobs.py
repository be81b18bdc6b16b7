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

# The optimizer's step, counted in this process, at which it breaks; 0: never.
BREAK_AT = int(os.environ.get("TEST_BREAK_AT", "0"))
# How it breaks: it raises, or it leaves numbers that are not finite.
BREAK_HOW = os.environ.get("TEST_BREAK_HOW", "raises")
# How long a step stands still when half of the parameters have moved.
STEP_SECONDS = float(os.environ.get("TEST_STEP_SECONDS", "0"))
EVALUATION_SECONDS = float(os.environ.get("TEST_EVALUATION_SECONDS", "0"))
# Two matrices of this side each; above 1 MiB no copy of the model is kept to undo a step.
LARGE, SMALL = 512, 4

_sync, _sync_seconds = os.fsync, float(os.environ.get("TEST_SYNC_SECONDS", "0"))
if _sync_seconds:

    def slow_sync(file: int) -> None:
        threading.Event().wait(_sync_seconds)
        _sync(file)

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
    """Plain SGD, one parameter after another."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._steps += 1
        first, second = self.param_groups[0]["params"]
        first.sub_(first.grad)
        if STEP_SECONDS:
            threading.Event().wait(STEP_SECONDS)
        if self._steps == BREAK_AT and BREAK_HOW == "raises":
            raise ValueError("the optimizer is broken")
        second.sub_(second.grad)
        if self._steps == BREAK_AT:
            second.fill_(float("nan"))


def evaluate(net: nn.Module) -> dict[str, float]:
    threading.Event().wait(EVALUATION_SECONDS)
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
