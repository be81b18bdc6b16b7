"""Evaluations of a run with real processes: which weights each one measured, and which were skipped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import w5xde
from tests.processes import events, forked, wait_until
from tests.system import jobs
from tests.system.training.counters import (
    EPOCH_STEPS,
    EPOCHS,
    SETTINGS,
    Heard,
    counted,
    counting,
    rows,
    steps_of,
)


def train(job: w5xde.Job, folder: Path, **settings: Any) -> tuple[w5xde.Result, Heard]:
    heard = Heard()
    return w5xde.train(job, runs=str(folder), callbacks=[heard], **SETTINGS | settings), heard


def slowly(net: nn.Module) -> dict[str, float]:
    """An evaluation that takes longer than several epochs."""
    found = {"steps": steps_of(net)}
    time.sleep(0.3)
    return found


@pytest.mark.parametrize("is_large", [False, True])
def test_every_due_evaluation_is_done_and_carries_the_step_that_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr("w5xde.learn.model.route.LARGE_BYTES_MIN", 0)
    result, heard = train(counting(slowly), tmp_path)
    due = [EPOCH_STEPS * epoch for epoch in range(1, EPOCHS + 1)]
    assert [each[:3] for each in heard.evaluations] == [
        (step, step // EPOCH_STEPS, {"steps": step}) for step in due
    ]
    told = [each for each in events(result.folder) if each["kind"] == "evaluated"]
    assert [(each["step"], each["epoch"], each["metrics"]["steps"]) for each in told] == [
        (step, step // EPOCH_STEPS, step) for step in due
    ]
    measured = {row["evaluation_step"]: row for row in rows(result.folder)}
    assert set(due) <= set(measured)
    for step, row in measured.items():
        assert row["evaluation"] == ({"steps": step} if step is not None else {})
        assert row["learning_rate"] == 1.0
    assert result.summary["metrics"] == {"steps": due[-1]}
    assert (result.summary["metrics_step"], result.summary["metrics_epoch"]) == (due[-1], EPOCHS)
    assert result.summary["evaluations_skipped"] == 0
    assert result.summary["evaluation_wait_seconds"] > 0.3


def test_evaluations_that_are_skipped_are_counted_and_told(tmp_path: Path) -> None:
    result, heard = train(counting(slowly), tmp_path, evaluate="skip")
    for step, epoch, found, _ in heard.evaluations:
        assert step is not None
        assert epoch == step // EPOCH_STEPS
        assert found == {"steps": step}
    skipped = result.summary["evaluations_skipped"]
    assert skipped > 0
    assert len(heard.evaluations) + skipped == EPOCHS
    # The training did not wait: by the time of the first result the run was further.
    first, *_ = heard.evaluations
    assert first[0] is not None
    assert first[3] > first[0]
    told = [each["text"] for each in events(result.folder) if each["kind"] == "evaluation skipped"]
    assert len(told) == 1
    assert "--evaluate wait" in told[0]


@pytest.mark.parametrize("mode", ["sync", "async", "rounds"])
def test_evaluations_by_steps_carry_their_steps_in_every_mode(tmp_path: Path, mode: str) -> None:
    job = counting(counted)
    more = {"round_rate": 1.0, "compress": "none"} if mode == "rounds" else {}
    # One node: its updates are never late, so that each step counts in full.
    result, heard = train(job, tmp_path, mode=mode, nodes=1, batches_per_step=1, evaluate_every=5, **more)
    assert heard.steps[-1] == result.summary["steps"] == EPOCHS * EPOCH_STEPS * 2
    assert len(heard.steps) >= 2
    for step, epoch, found, at in heard.evaluations:
        assert step is not None
        assert found["steps"] == pytest.approx(step, abs=1e-3)
        assert epoch == step // (2 * EPOCH_STEPS)
        assert at >= step


def test_the_learning_rate_is_in_every_row_and_follows_its_schedule(tmp_path: Path) -> None:
    job = w5xde.Job(
        model=jobs.model,
        data=jobs.data,
        loss=jobs.loss,
        optimizer=jobs.optimizer,
        scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5),
        evaluate=lambda net: 1.0,
    )
    seen: dict[int, float | None] = {}

    class Rates(w5xde.Callback):
        def on_step(self, run: w5xde.RunStatus, step: int, loss: float) -> None:
            seen[step] = run.learning_rate

    result = w5xde.train(job, nodes=1, steps=5, runs=str(tmp_path), callbacks=[Rates()])
    assert seen == {1: 0.01, 2: 0.005, 3: 0.005, 4: 0.0025, 5: 0.0025}
    last = rows(result.folder)[-1]
    assert (last["step"], last["learning_rate"], last["learning_rates"]) == (5, 0.0025, [0.0025])
    assert result.summary["learning_rates"] == [0.0025]


def test_an_evaluation_that_fails_does_not_keep_the_training_waiting(tmp_path: Path) -> None:
    calls: list[float] = []

    def evaluate(net: nn.Module) -> float:
        calls.append(steps_of(net))
        if len(calls) == 3:
            raise ValueError("no luck")
        return steps_of(net)

    result, heard = train(counting(evaluate), tmp_path)
    # The first call was the trial of an untrained model.
    assert heard.steps == [4, 12, 16, 20, 24]
    failed = [each["text"] for each in events(result.folder) if each["kind"] == "evaluation failed"]
    assert len(failed) == 1
    assert "step 8" in failed[0]
    assert "no luck" in failed[0]


def test_an_evaluation_that_was_under_way_is_made_up_for_when_the_run_is_resumed(tmp_path: Path) -> None:
    def is_saved() -> bool:
        names = [path.name for path in tmp_path.glob("mine/checkpoints/step-*")]
        return max(names, default="") >= f"step-{EPOCH_STEPS:09}"

    def die(net: nn.Module) -> float:
        """Kill the coordinator in its first evaluation, as soon as it has a checkpoint of that step."""
        if steps_of(net):
            wait_until(is_saved, lambda: "no checkpoint is written")
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    settings: dict[str, Any] = {"name": "mine", "checkpoint_every": "1steps", "epochs": 3}
    with forked(lambda: train(counting(die), tmp_path, **settings)) as child:
        assert child.wait() == -signal.SIGKILL
    heard = Heard()
    job = counting(counted)
    result = w5xde.train(job, resume="mine", runs=str(tmp_path), callbacks=[heard])
    assert result.summary["steps"] == 3 * EPOCH_STEPS
    # Training went on beside it, so that a later checkpoint may be the newest.
    first, *_ = heard.steps
    assert first is not None
    assert EPOCH_STEPS <= first <= 2 * EPOCH_STEPS
    assert [step for step in heard.steps if step != first] == [
        step for step in (2 * EPOCH_STEPS, 3 * EPOCH_STEPS) if step != first
    ]
    assert all(found == {"steps": step} for step, _, found, _ in heard.evaluations)
