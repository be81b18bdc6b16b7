"""Jobs with a validation set that nodes measure, and the plain loop that they must equal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import w5xde
from tests.system import jobs

HELD_OUT = 70
SETTINGS: dict[str, Any] = {"epochs": 3, "batch_size": 8, "batches_per_step": 4}
EPOCH_STEPS = -(-jobs.SAMPLES // 32)


def held_out() -> TensorDataset:
    generator = torch.Generator().manual_seed(99)
    inputs = torch.randn(HELD_OUT, 10, generator=generator)
    return TensorDataset(inputs, inputs.sum(1).remainder(4).floor().long())


def measure(net: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The model is in evaluation mode, or its dropout would make each number another."""
    scores = net(batch[0])
    correct = (scores.argmax(1) == batch[1]).float().mean()
    return {"loss": cross_entropy(scores, batch[1]), "correct": correct}


def plainly(net: nn.Module, data: Dataset[Any] | None = None) -> dict[str, float]:
    """What a plain loop finds."""
    found, samples = {"loss": 0.0, "correct": 0.0}, 0
    net.eval()
    with torch.no_grad():
        for batch in DataLoader(data if data is not None else held_out(), batch_size=8):
            for name, value in measure(net, batch).items():
                found[name] += len(batch[1]) * float(value)
            samples += len(batch[1])
    return {name: value / samples for name, value in found.items()}


def validated(**more: Any) -> w5xde.Job:
    given: dict[str, Any] = {
        "model": jobs.model,
        "data": jobs.data,
        "loss": jobs.loss,
        "optimizer": jobs.optimizer,
        "validation": held_out,
        "measure": measure,
    }
    return w5xde.Job(**given | more)


class Told(NamedTuple):
    """A result, as callbacks are told of it, and the weights that it is of."""

    step: int | None
    epoch: int | None
    metrics: dict[str, float]
    weights: dict[str, Tensor]


class Heard(w5xde.Callback):
    """Keeps the results of all evaluations."""

    def __init__(self) -> None:
        self.told: list[Told] = []

    def on_evaluate(self, run: w5xde.RunStatus, metrics: w5xde.Evaluation) -> None:
        weights = {name: tensor.clone() for name, tensor in metrics.weights().items()}
        self.told.append(Told(metrics.step, metrics.epoch, dict(metrics), weights))

    @property
    def results(self) -> list[tuple[int | None, int | None, dict[str, float]]]:
        return [each[:3] for each in self.told]


def train(folder: Path, job: w5xde.Job | None = None, **settings: Any) -> tuple[w5xde.Result, Heard]:
    heard = Heard()
    callbacks = [heard, *settings.pop("callbacks", ())]
    job = job or validated()
    return w5xde.train(job, runs=str(folder), callbacks=callbacks, **SETTINGS | settings), heard


def noting(
    file: Path, inner: Callable[[nn.Module, Any], Any] = measure, seconds: float = 0.0
) -> Callable[[nn.Module, Any], Any]:
    """A `measure` that notes in which process it runs, and takes a while."""

    def note(net: nn.Module, batch: Any) -> Any:
        with file.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        return inner(net, batch)

    return note


def processes(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]
