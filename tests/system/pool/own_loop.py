"""A script with a pool, as other machines join it: model, losses and pool first, the loop under a guard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import w5xde

model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3))


def loss(model: nn.Module, part: Any) -> Tensor:
    inputs, labels = part
    return cross_entropy(model(inputs), labels)


def train(pool: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(pool.model.parameters(), 0.1)
    for _ in range(steps):
        inputs = torch.randn(12, 6, generator=generator)
        pool.backward((inputs, inputs.sum(1).remainder(3).floor().long()), parts=4)
        optimizer.step()
        optimizer.zero_grad()


pool = w5xde.Pool(model, losses={"loss": loss}, serve="0.0.0.0:0", nodes=1, log="silent")

if __name__ == "__main__":
    with pool:
        train(pool, 1)
        Path(sys.argv[1]).write_text(str(pool.ticket))
        train(pool, int(sys.argv[2]))
