"""Chaos: real processes are killed and frozen while they train, and the weights come out the same.

`w5xde demo --chaos` shows it in a minute (show.py); `python -m w5xde.chaos` goes on for as long as one
likes (soak.py). Both hurt a pool of processes (pool.py) that trains `slow_job`.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from w5xde import demo
from w5xde.chaos.show import run_chaos_demo

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["run_chaos_demo", "slow_job"]

# Digits are learned in seconds, too soon for anybody to be hurt: a batch takes this much longer.
BATCH_SECONDS = 0.05


def slow_loss(model: Module, batch: Any) -> Tensor:
    """The demo's loss on a machine that takes its time. Waiting changes no bit and uses no core."""
    threading.Event().wait(BATCH_SECONDS)
    return demo.loss(model, batch)


slow_job = dataclasses.replace(demo.job, loss=slow_loss)
