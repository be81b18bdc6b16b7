"""A resumed run with another learning rate: deliberate, recorded, and remembered after a crash."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import w5xde
from tests.processes import AtStep, events, forked
from tests.system.training.counters import EPOCH_STEPS, SETTINGS, counted, counting, steps_of
from w5xde.cli.main import main
from w5xde.runs import read_manifest

JOB = counting(counted)


def begin(folder: Path, **settings: Any) -> None:
    """Eight steps with a rate of 1."""
    w5xde.train(JOB, name="mine", runs=str(folder), **SETTINGS | {"epochs": 2} | settings)


def resume(folder: Path, *callbacks: w5xde.Callback, **settings: Any) -> w5xde.Result:
    return w5xde.train(JOB, resume="mine", runs=str(folder), callbacks=callbacks, **settings)


def audit(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert main(["audit", "mine", "--runs", str(folder), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["violations"] == []


@pytest.mark.parametrize("mode", ["sync", "rounds"])
def test_the_rate_is_changed_from_the_next_step_on_and_stays_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    more: dict[str, Any] = {"round_rate": 1.0, "compress": "none"} if mode == "rounds" else {}
    begin(tmp_path, mode=mode, **more)
    seen: dict[int, float | None] = {}
    watch = AtStep({step: lambda run, step=step: seen.update({step: run.learning_rate}) for step in (9, 12)})  # type: ignore[misc]
    result = resume(tmp_path, watch, epochs=3, override="lr=0.25")
    assert steps_of(result.model) == pytest.approx(8 + 4 * 0.25)
    assert seen[12] == 0.25
    [told] = [each for each in events(tmp_path / "mine") if each["kind"] == "override"]
    assert (told["version"], told["before"], told["after"]) == (8, [1.0], [0.25])
    assert told["text"] == "the learning rate is changed from 1 to 0.25, after step 8"
    assert read_manifest(tmp_path / "mine")["overrides"] == [{"life": 2, "version": 8, "override": "lr=0.25"}]
    # It is for once: the next life does not change the rate again.
    again = resume(tmp_path, epochs=4)
    assert steps_of(again.model) == pytest.approx(9 + 4 * 0.25)
    audit(tmp_path, capfd)


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_a_crash_before_the_next_checkpoint_does_not_forget_the_rate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], durability: str
) -> None:
    begin(tmp_path, durability=durability)
    die = AtStep({10: lambda run: os.kill(os.getpid(), signal.SIGKILL)})
    with forked(lambda: resume(tmp_path, die, epochs=4, override="lr=x0.5", checkpoint_every="1h")) as child:
        assert child.wait() == -signal.SIGKILL
    result = resume(tmp_path, epochs=4)
    assert result.summary["steps"] == 4 * EPOCH_STEPS
    assert steps_of(result.model) == 8 + 8 * 0.5
    audit(tmp_path, capfd)


def test_the_job_may_not_change_the_rate_and_the_error_says_how(tmp_path: Path) -> None:
    import torch

    begin(tmp_path)
    other = counting(counted, optimizer=lambda params: torch.optim.SGD(params, lr=0.5))
    with pytest.raises(w5xde.StorageError, match=r"lr is 0\.5, expected 1\.0") as caught:
        w5xde.train(other, resume="mine", runs=str(tmp_path), epochs=3)
    assert "--override lr=…" in caught.value.fix


def test_a_manifest_with_a_wrong_override_is_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    manifest = tmp_path / "mine" / "manifest.json"
    facts = json.loads(manifest.read_text())
    for wrong in ([1], [{"life": 2, "version": 8, "override": "lr=-1"}], {"life": 2}):
        manifest.write_text(json.dumps(facts | {"overrides": wrong}))
        with pytest.raises(w5xde.StorageError) as caught:
            resume(tmp_path, epochs=3)
        assert caught.value.code == "W5-401"


def test_only_a_run_that_is_resumed_can_be_changed(tmp_path: Path) -> None:
    with pytest.raises(w5xde.UsageError, match="override changes a run that is resumed"):
        w5xde.train(JOB, override="lr=1", runs=str(tmp_path))
