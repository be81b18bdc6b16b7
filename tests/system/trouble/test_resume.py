"""A run goes on after its coordinator was killed: with the same weights, and an audit to show it."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Subset

import w5xde
from tests.processes import JOBS, AtStep, command, events, forked, node
from tests.system.jobs import data
from w5xde.cli.main import main
from w5xde.control.node import Checked, Dial, Lost, NodeCore, Opened, Welcomed
from w5xde.errors import NOT_OVER
from w5xde.learn.job.job import load_job
from w5xde.runs import read_manifest

SETTINGS: dict[str, Any] = {"batches_per_step": 2, "epochs": 6, "seed": 3}
STEPS = 24  # 7 batches an epoch, in 4 steps
FLAGS = ["--batches-per-step", "2", "--epochs", "6", "--seed", "3"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    result = w5xde.train(f"{JOBS}:job", nodes=1, runs=str(tmp_path_factory.mktemp("runs")), **SETTINGS)
    assert result.summary["steps"] == STEPS
    return str(result.summary["weights_sha256"])


def kill_at(step: int, job: str, runs: Path, **settings: Any) -> Path:
    """A run whose coordinator is killed, with SIGKILL, right after this step; returns its folder."""
    return kill_by(AtStep({step: lambda run: os.kill(os.getpid(), signal.SIGKILL)}), job, runs, **settings)


def kill_by(killer: w5xde.Callback, job: str, runs: Path, **settings: Any) -> Path:
    """A run whose coordinator is killed by this callback of its own; returns its folder."""
    more = {"nodes": 2, "name": "mine", "runs": str(runs), "callbacks": [killer]} | settings
    with forked(lambda: w5xde.train(f"{JOBS}:{job}", **more)) as child:
        assert child.wait() == -signal.SIGKILL
    return runs / "mine"


def resume(runs: Path, **settings: Any) -> w5xde.Result:
    return w5xde.train(f"{JOBS}:job", resume="mine", runs=str(runs), **settings)


def audit(runs: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The run is clean; what the audit says of it."""
    capfd.readouterr()
    status = main(["audit", "mine", "--runs", str(runs), "--json"])
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert (status, found["violations"]) == (0, [])
    return found


# --- the same weights -----------------------------------------------------------------------------


def test_a_killed_command_is_resumed_by_its_name_alone(
    undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [*FLAGS, "--name", "mine", "--checkpoint-every", "3steps", "--log", "verbose"]
    with command("train", f"{JOBS}:slow", *options, cwd=tmp_path, TEST_BATCH_SECONDS="0.08") as run:
        run.wait_for("epoch 2 is complete")
        # Its nodes would end by themselves, a few seconds later.
        run.kill_with_children()
    monkeypatch.setenv("TEST_BATCH_SECONDS", "0")
    assert main(["train", "--resume", "mine", "--runs", str(tmp_path / "runs"), "--json"]) == 0
    summary = json.loads(capfd.readouterr().out)
    assert summary["weights_sha256"] == undisturbed
    assert (summary["steps"], summary["epochs"]) == (STEPS, 6)
    found = audit(tmp_path / "runs", capfd)
    assert (found["lives"], found["crashes"], found["samples"]) == (2, 1, 6 * 200)
    assert found["steps_redone"] <= 6


def test_killed_again_and_again_it_comes_to_the_same_end(
    undisturbed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kill_at(3, "job", tmp_path, checkpoint_every="2steps", **SETTINGS)
    for step in (9, 11, 17):
        kill_at(step, "job", tmp_path, resume="mine")
    assert resume(tmp_path).summary["weights_sha256"] == undisturbed
    found = audit(tmp_path, capfd)
    assert (found["lives"], found["crashes"], found["steps"]) == (5, 4, STEPS)


def test_a_scaled_rate_is_told_and_a_resumed_run_keeps_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = "learning rate 0.01 × √2 = 0.01414, betas (0.9, 0.999)² = (0.81, 0.998)"
    train = ["train", f"{JOBS}:job", *FLAGS, "--scale-for-batch", "--runs", str(tmp_path), "--json"]
    assert main([*train, "--name", "whole"]) == 0
    shown = capfd.readouterr()
    assert f"scaled for 2 batches a step: {told}" in shown.err
    whole = json.loads(shown.out)
    assert whole["scaled_for_batch"]["text"] == told
    assert read_manifest(tmp_path / "whole")["scaled_for_batch"] == whole["scaled_for_batch"]
    kill_at(9, "job", tmp_path, scale_for_batch=True, checkpoint_every="2steps", **SETTINGS)
    resumed = resume(tmp_path).summary
    assert resumed["scaled_for_batch"]["text"] == told
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_a_run_killed_before_its_first_step_begins_anew(
    undisturbed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kill_at(1, "job", tmp_path, **SETTINGS)
    assert resume(tmp_path).summary["weights_sha256"] == undisturbed
    audit(tmp_path, capfd)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_with_durable_steps_none_is_redone(
    mode: str, undisturbed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = SETTINGS | {"mode": mode, "durability": "step", "checkpoint_every": "5steps"}
    kill_at(1, "job", tmp_path, **settings)
    for step in (2, 8, 14):
        kill_at(step, "job", tmp_path, resume="mine")
    result = resume(tmp_path)
    if mode == "sync":
        assert result.summary["weights_sha256"] == undisturbed
    found = audit(tmp_path, capfd)
    assert (found["steps_redone"], found["steps"], found["crashes"]) == (0, STEPS, 4)
    assert result.summary["batches"] == sum(node["batches"] for node in result.summary["nodes"])
    steps = [event for event in events(result.folder) if event["kind"] == "step"]
    assert all(step.get("durable") for step in steps)


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_every_sample_of_an_async_stream_counts_once_however_often_it_is_killed(
    durability: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"mode": "async", "epochs": 4, "checkpoint_every": "3steps", "durability": durability}
    # A late update would count for less.
    settings["delay_correction"] = False
    kill_at(5, "counting_stream", tmp_path, **settings)
    for step in (12, 13, 20):
        kill_at(step, "counting_stream", tmp_path, resume="mine")
    result = w5xde.train(f"{JOBS}:counting_stream", resume="mine", runs=str(tmp_path))
    counts = result.model.get_parameter("count").detach()
    assert torch.equal(counts, torch.full_like(counts, 4.0))
    assert audit(tmp_path, capfd)["samples"] == 4 * 200


def test_nodes_come_back_by_themselves_to_a_coordinator_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_BATCH_SECONDS", "0.02")
    ticket = tmp_path / "ticket"
    settings = SETTINGS | {
        "epochs": 9999,
        "checkpoint_every": "2steps",
        "nodes": 0,
        "ticket_file": str(ticket),
    }
    with node(ticket, node_name="one", wait=60) as one, node(ticket, node_name="two", wait=60) as two:
        kill_at(7, "slow", tmp_path, **settings)
        with command("serve", "--resume", "mine", "--runs", str(tmp_path)) as coordinator:
            coordinator.wait_for("joined")
            coordinator.wait_for("joined")
            coordinator.interrupt()
            assert coordinator.wait() == NOT_OVER, coordinator.text
        assert [one.wait(), two.wait()] == [0, 0]
    records = events(tmp_path / "mine")
    restarted = next(at for at, record in enumerate(records) if record.get("incarnation") == 2)
    lent = next(record for record in records[restarted:] if record["kind"] == "lend")
    assert lent["time"] - records[restarted]["time"] < 5.0
    assert set(audit(tmp_path, capfd)["nodes"]) == {"one", "two"}
    result = json.loads((tmp_path / "mine" / "manifest.json").read_text())["result"]
    more = SETTINGS | {"epochs": None, "steps": result["steps"], "runs": str(tmp_path), "nodes": 1}
    assert w5xde.train(f"{JOBS}:job", **more).summary["weights_sha256"] == result["weights_sha256"]


def test_a_node_never_waits_long_before_it_looks_again() -> None:
    """Or the first lease after a restart would come later than after five seconds."""
    node = NodeCore(random.Random(1), wait_seconds=5.0)
    node.start(0.0)
    node.handle(Opened(), 0.0)
    node.handle(Welcomed(), 0.0)
    node.handle(Checked(), 0.0)
    waits = [node.handle(Lost("killed"), 0.0)]
    waits += [node.handle(Lost("nobody"), second) for second in map(float, range(300))]
    assert max(effect.after_seconds for (effect,) in waits if isinstance(effect, Dial)) <= 4.0


# --- going on for longer, or not at all -----------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has come to its end, in the folder that is returned."""
    runs = tmp_path_factory.mktemp("runs")
    settings = SETTINGS | {"epochs": 3, "checkpoint_every": "2steps"}
    w5xde.train(f"{JOBS}:job", nodes=2, name="mine", runs=str(runs), **settings)
    return runs


@pytest.fixture
def runs(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be spoiled."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "mine", tmp_path / "mine")
    return tmp_path


def test_a_finished_run_goes_on_for_more_epochs(
    undisturbed: str, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", "latest", "--epochs", "6", "--runs", str(runs), "--json"]) == 0
    summary = json.loads(capfd.readouterr().out)
    assert (summary["weights_sha256"], summary["epochs"]) == (undisturbed, 6)
    assert summary["batches"] == 6 * 7 == sum(node["batches"] for node in summary["nodes"])
    assert audit(runs, capfd)["lives"] == 2


def test_a_finished_run_that_is_resumed_is_finished(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = json.loads((runs / "mine" / "manifest.json").read_text())["result"]
    result = resume(runs)
    assert result.reason == "all steps done"
    assert result.summary["weights_sha256"] == before["weights_sha256"]
    assert result.summary["steps"] == before["steps"]
    audit(runs, capfd)


def test_the_run_to_resume_may_come_from_the_environment(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("W5XDE_RESUME", "mine")
    assert main(["train", "--epochs", "4", "--runs", str(runs), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["epochs"] == 4


@pytest.mark.parametrize(
    ("arguments", "status", "code", "words"),
    [
        (
            ["train", f"{JOBS}:other", "--resume", "mine"],
            40,
            "W5-405",
            "parameter 0.weight (17, 10) float32, expected (16",
        ),
        (["train", f"{JOBS}:counting", "--resume", "mine"], 40, "W5-405", "the job does not fit the run"),
        (
            ["train", "--resume", "mine", "--batch-size", "7"],
            2,
            "W5-211",
            "batch-size is 32 in run mine, not 7",
        ),
        (
            ["train", "--resume", "mine", "--mode", "async"],
            2,
            "W5-211",
            "mode is sync in run mine, not async",
        ),
        (["train", "--resume", "mine", "--seed", "4"], 2, "W5-211", "seed is 3 in run mine, not 4"),
        (["train", "--resume", "yours"], 40, "W5-401", "there is no run yours in"),
        (["train"], 2, "W5-210", "which job?"),
        (["audit", "yours"], 40, "W5-401", "runs here are mine"),
        (["export", "yours"], 40, "W5-401", "runs here are mine"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_by_the_difference(
    arguments: list[str], status: int, code: str, words: str, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (runs / "mine" / "manifest.json").read_bytes()
    assert main([*arguments, "--runs", str(runs)]) == status
    told = capfd.readouterr().err
    assert told.startswith(f"error[{code}]: ")
    assert words in told
    assert "Traceback" not in told
    assert (runs / "mine" / "manifest.json").read_bytes() == before, "what is refused leaves no trace"
    assert audit(runs, capfd)["lives"] == 1


def test_a_run_that_was_started_from_python_asks_for_its_job(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tests.system.jobs import job

    w5xde.train(job, nodes=1, steps=2, name="here", runs=str(runs))
    assert main(["train", "--resume", "here", "--runs", str(runs)]) == 2
    assert "started from Python, so its job has no file" in capfd.readouterr().err
    assert w5xde.train(job, resume="here", steps=4, runs=str(runs)).summary["steps"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoint-every", "often"], "must be like 30s, 5m, 500steps or off"),
        (["--checkpoint-every", "0s"], "must be like 30s"),
        (["--checkpoint-every", "1.5steps"], "must be like 30s"),
        (["--checkpoint-every", "-5m"], "must be like 30s|expected one argument"),
        (["--keep-checkpoints", "2"], "keep-checkpoints 2 must be 3 or more"),
        (["--keep-checkpoints", "many"], "keep-checkpoints 'many' must be a whole number"),
        (["--durability", "always"], "durability 'always' must be checkpoint or step"),
        (["--durability", "step", "--checkpoint-every", "off"], "durability step needs checkpoints"),
        (["--resume", ""], "no run"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_a_sentence(
    arguments: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"{JOBS}:job", *arguments, "--runs", str(tmp_path / "runs")]) in (2, 40)
    told = capfd.readouterr().err
    assert any(each in told for each in words.split("|")), told
    assert "Traceback" not in told
    assert not (tmp_path / "runs").exists()


def test_without_checkpoints_there_is_nothing_to_resume_from_but_the_run_can_be_audited(
    tmp_path: Path, undisturbed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = kill_at(9, "job", tmp_path, checkpoint_every="off", **SETTINGS)
    assert not (folder / "checkpoints").exists()
    audit(tmp_path, capfd)
    assert resume(tmp_path).summary["weights_sha256"] == undisturbed
    assert not (folder / "checkpoints").exists()
    assert audit(tmp_path, capfd)["steps"] == STEPS
    assert main(["export", "mine", "--runs", str(tmp_path)]) == 40


# --- what was damaged -----------------------------------------------------------------------------


def spoil(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    undisturbed: str, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    newest = max((runs / "mine" / "checkpoints").iterdir())
    spoil(newest)
    assert main(["audit", "mine", "--runs", str(runs)]) == 1
    assert newest.name in capfd.readouterr().out
    assert main(["train", "--resume", "mine", "--epochs", "6", "--runs", str(runs)]) == 0
    told = capfd.readouterr()
    assert newest.name in told.out + told.err
    assert "model.safetensors" in told.out + told.err
    manifest = json.loads((runs / "mine" / "manifest.json").read_text())
    assert manifest["result"]["weights_sha256"] == undisturbed
    assert (runs / "mine" / "checkpoints" / f"damaged-{newest.name}").is_dir()
    found = audit(runs, capfd)
    assert newest.name in " ".join(found["remarks"])
    assert found["steps_redone"] > 0


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew_in_silence(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for checkpoint in (runs / "mine" / "checkpoints").iterdir():
        spoil(checkpoint)
    assert main(["export", "mine", "--runs", str(runs)]) == 40
    assert "W5-407" in capfd.readouterr().err
    assert main(["train", "--resume", "mine", "--epochs", "6", "--runs", str(runs)]) == 40
    told = capfd.readouterr().err
    assert "error[W5-407]: no checkpoint of run mine is whole: step-0" in told
    assert "start a new run" in told


def test_an_edited_line_of_the_ledger_is_found(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = runs / "mine" / "ledger-000001.jsonl"
    text = path.read_text()
    assert audit(runs, capfd)["clean"]
    path.write_text(text.replace('"node":"local-1"', '"node":"local-2"', 1))
    assert main(["audit", "mine", "--runs", str(runs)]) == 1
    assert "is not what was written" in capfd.readouterr().out
    path.write_text("".join(text.splitlines(keepends=True)[:-1]))
    assert main(["audit", "mine", "--runs", str(runs), "--json"]) == 1
    assert not json.loads(capfd.readouterr().out)["clean"]


def test_the_exported_weights_are_the_runs_own(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = load_file(runs / "mine" / "model.safetensors")
    for kind, read in (("pt", lambda path: torch.load(path, weights_only=True)), ("safetensors", load_file)):
        assert main(["export", "mine", "--to", kind, "--runs", str(runs), "--json"]) == 0
        written = json.loads(capfd.readouterr().out)
        found = read(written["file"])
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        result = json.loads((runs / "mine" / "manifest.json").read_text())["result"]
        assert written["weights_sha256"] == result["weights_sha256"]
        assert written["steps"] == result["steps"]
    assert main(["export", "mine", "--runs", str(runs), "--out", "no/such/folder/x"]) == 40
    assert "choose another --out" in capfd.readouterr().err


def test_another_number_of_samples_or_too_few_epochs_are_refused(tmp_path: Path) -> None:
    kill_at(6, "job", tmp_path, epochs=9, batches_per_step=4, durability="step")
    with pytest.raises(w5xde.UsageError, match=r"is in epoch [34] already") as few:
        w5xde.train(f"{JOBS}:job", resume="mine", runs=str(tmp_path), epochs=2)
    assert "--epochs" in few.value.fix
    job = dataclasses.replace(load_job(f"{JOBS}:job"), data=lambda: Subset(data(), range(150)))
    with pytest.raises(w5xde.StorageError, match="150 samples, run mine began with 200"):
        w5xde.train(job, resume="mine", runs=str(tmp_path))


def test_checkpoints_that_are_gone_are_not_taken_for_a_new_run(tmp_path: Path) -> None:
    class OnceSaved(w5xde.Callback):
        """Kills as soon as the ledger names a checkpoint: they are written aside, some steps later."""

        def on_step(self, run: w5xde.RunStatus, step: int, loss: float) -> None:
            lines = "".join(path.read_text() for path in (tmp_path / "mine").glob("ledger-*.jsonl"))
            if '"kind":"checkpoint"' in lines:
                os.kill(os.getpid(), signal.SIGKILL)

    folder = kill_by(OnceSaved(), "job", tmp_path, epochs=500, batches_per_step=4, checkpoint_every="2steps")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(w5xde.StorageError, match="had checkpoints, and they are gone"):
        w5xde.train(f"{JOBS}:job", resume="mine", runs=str(tmp_path))
