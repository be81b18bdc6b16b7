"""Chaos: kills and freezes real processes while they train, and checks that the weights come out the same.

`w5xde demo --chaos` shows it in a minute (show.py); `python -m w5xde.chaos` runs as long as asked (soak.py).
Both use a pool of processes (pool.py) that trains `slow_job`. Knows the processes only from outside.
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

# Training on the digits takes seconds, too short for any fault: each batch takes this much longer.
BATCH_SECONDS = 0.05


def slow_loss(model: Module, batch: Any) -> Tensor:
    """The loss of the demo after a pause. Waiting changes no bit and uses no core."""
    threading.Event().wait(BATCH_SECONDS)
    return demo.loss(model, batch)


slow_job = dataclasses.replace(demo.job, loss=slow_loss)
