"""A run with ReduceLROnPlateau gives the weights of a plain loop, whichever nodes help and whatever dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import w5xde
from tests.processes import AtStep, events, forked, kill_any_node
from tests.system.training.counters import EPOCH_STEPS, EPOCHS, SETTINGS, counting, rows, steps_of
from w5xde.cli.main import main

GOAL = 9.0


def distance(net: nn.Module) -> dict[str, float]:
    """How far the weights are from a goal that they pass."""
    return {"loss": abs(steps_of(net) - GOAL), "other": 0.0}


def schedule(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0)


JOB = counting(distance, scheduler=schedule)


def plainly(epochs: int = EPOCHS) -> tuple[float, list[float]]:
    """A plain loop: its weight, and its learning rate after each epoch."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler, rates = schedule(optimizer), []
    for _ in range(epochs):
        for _ in range(EPOCH_STEPS):
            weight.grad = torch.tensor([-1.0])
            optimizer.step()
        scheduler.step(abs(float(weight.detach()) - GOAL))
        rates.append(optimizer.param_groups[0]["lr"])
    return float(weight.detach()), rates


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_the_weights_are_those_of_a_plain_loop_for_any_number_of_nodes(tmp_path: Path, nodes: int) -> None:
    result = w5xde.train(
        JOB,
        runs=str(tmp_path),
        callbacks=[AtStep({6: kill_any_node})] if nodes > 1 else [],
        **SETTINGS | {"nodes": nodes},
    )
    weight, rates = plainly()
    assert steps_of(result.model) == weight
    assert rates[0] == 1.0
    assert rates[-2] < 0.5
    changed = [each for each in events(result.folder) if each["kind"] == "learning rate"]
    expected = [epoch for epoch in range(1, EPOCHS - 1) if rates[epoch] != rates[epoch - 1]]
    assert [each["version"] for each in changed] == [(epoch + 1) * EPOCH_STEPS for epoch in expected]
    # The rate belongs to its step in every row, also in that of the evaluation that changed it.
    for row in rows(result.folder):
        epoch, is_measured = row["epoch"], row["evaluation_step"] == row["step"]
        if epoch and is_measured and row["step"] < EPOCHS * EPOCH_STEPS:
            assert row["learning_rate"] == rates[epoch - 1]


@pytest.mark.parametrize("die_at", [7, 8, 9, 13])
def test_a_killed_run_reduces_its_rate_after_the_same_steps(
    tmp_path: Path, die_at: int, capfd: pytest.CaptureFixture[str]
) -> None:
    die = AtStep({die_at: lambda run: os.kill(os.getpid(), signal.SIGKILL)})
    more: dict[str, Any] = {"name": "mine", "checkpoint_every": "1steps", "callbacks": [die]}
    with forked(lambda: w5xde.train(JOB, runs=str(tmp_path), **SETTINGS | more)) as child:
        assert child.wait() == -signal.SIGKILL
    result = w5xde.train(JOB, resume="mine", runs=str(tmp_path))
    assert steps_of(result.model) == plainly()[0]
    assert main(["audit", "mine", "--runs", str(tmp_path)]) == 0


def test_a_run_that_ended_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    for epochs in range(1, EPOCHS + 1):
        begin = {"name": "mine"} if epochs == 1 else {"resume": "mine"}
        result = w5xde.train(JOB, runs=str(tmp_path), **SETTINGS | begin | {"epochs": epochs})
        assert steps_of(result.model) == plainly(epochs)[0]


@pytest.mark.parametrize("mode", ["async", "rounds"])
def test_the_rate_is_reduced_in_every_mode(tmp_path: Path, mode: str) -> None:
    more: dict[str, Any] = {"round_rate": 1.0, "compress": "none"} if mode == "rounds" else {}
    more |= {"mode": mode, "nodes": 1, "batches_per_step": 1, "batch_size": 8}
    result = w5xde.train(JOB, runs=str(tmp_path), **SETTINGS | more)
    assert steps_of(result.model) == pytest.approx(plainly()[0], abs=1e-3)
