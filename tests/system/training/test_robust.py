"""Robust means in real pools: the same sharing gives the same bits, also after the coordinator was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import w5xde
from tests.processes import JOBS
from tests.system.trouble.test_resume import audit, kill_at, resume

# As many batches in a step as nodes: each has one, and of whom which is does not matter to a median.
SETTINGS: dict[str, Any] = {
    "robust": "median",
    "nodes": 3,
    "batches_per_step": 3,
    "epochs": 6,
    "seed": 3,
    "durability": "step",
    "checkpoint_every": "5steps",
}
STEPS = 18  # 7 batches an epoch, in steps of 3, 3 and 1


def test_the_same_sharing_gives_the_same_bits_however_often_it_is_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = w5xde.train(f"{JOBS}:job", runs=str(tmp_path / "other"), **SETTINGS).summary
    kill_at(1, "job", tmp_path, **SETTINGS)
    for step in (4, 11):
        kill_at(step, "job", tmp_path, resume="mine", nodes=3)
    again = resume(tmp_path).summary
    assert again["weights_sha256"] == undisturbed["weights_sha256"]
    # The last step of each epoch has one batch, and so one node.
    assert (again["robust"], again["degraded_steps"], again["steps"]) == ("median", 6, STEPS)
    found = audit(tmp_path, capfd)
    assert (found["steps_redone"], found["steps"], found["crashes"]) == (0, STEPS, 3)


def test_it_is_not_the_sum_and_it_learns(tmp_path: Path) -> None:
    more = {"epochs": 15, "durability": "checkpoint"}
    robust = w5xde.train(f"{JOBS}:job", runs=str(tmp_path / "a"), **SETTINGS | more).summary
    plain = w5xde.train(
        f"{JOBS}:job", runs=str(tmp_path / "b"), **SETTINGS | more | {"robust": "off"}
    ).summary
    assert robust["weights_sha256"] != plain["weights_sha256"]
    assert plain["degraded_steps"] == 0
    assert robust["loss_last"] < robust["loss_first"]
