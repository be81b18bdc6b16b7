"""A model whose only parameter is the number of its steps, so that its weights tell their step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import w5xde

# With batches of 4 and 2 batches a step.
EPOCHS, EPOCH_STEPS = 6, 4
SETTINGS: dict[str, Any] = {"nodes": 2, "epochs": EPOCHS, "batch_size": 4, "batches_per_step": 2}


class StepCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(1))


def count_steps(net: nn.Module, batch: Any) -> Tensor:
    return -net.get_parameter("steps").sum()


def counting(evaluate: Callable[[nn.Module], Any], **more: Any) -> w5xde.Job:
    given: dict[str, Any] = {
        "model": StepCounter,
        "data": lambda: TensorDataset(torch.zeros(8 * EPOCH_STEPS, 1)),
        "loss": count_steps,
        "optimizer": lambda params: torch.optim.SGD(params, lr=1.0),
        "evaluate": evaluate,
    }
    return w5xde.Job(**given | more)


def steps_of(net: nn.Module) -> float:
    return float(net.get_parameter("steps").detach())


def counted(net: nn.Module) -> dict[str, float]:
    """An evaluation that finds the step of the weights."""
    return {"steps": steps_of(net)}


class Heard(w5xde.Callback):
    """Keeps all that is told about evaluations."""

    def __init__(self) -> None:
        # The step of the measured weights, their epoch, what was found, and the step of the run then.
        self.evaluations: list[tuple[int | None, int | None, dict[str, float], int]] = []

    def on_evaluate(self, run: w5xde.RunStatus, metrics: w5xde.Evaluation) -> None:
        self.evaluations.append((metrics.step, metrics.epoch, dict(metrics), run.step))

    @property
    def steps(self) -> list[int | None]:
        return [step for step, _, _, _ in self.evaluations]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
