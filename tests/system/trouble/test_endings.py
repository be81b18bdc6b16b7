"""How runs end that break or are interrupted twice: with whole weights that say of which step they are."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import w5xde
from tests.processes import ROOT, command, events, forked
from w5xde.callbacks.status import RunStatus
from w5xde.cli.main import main
from w5xde.errors import NOT_OVER
from w5xde.runtime.durable.audit import audit_run

JOBS = str(ROOT / "tests" / "system" / "broken_jobs.py")
# A run of small steps, with checkpoints only where the run begins and ends.
FLAGS = ["--name", "mine", "--nodes", "1", "--batch-size", "8", "--batches-per-step", "1"]


def step_of(model: Path) -> int:
    """The step of which all weights in this file are."""
    tensors = load_file(model)
    found = {float(value) for tensor in tensors.values() for value in tensor.unique()}
    assert len(found) == 1, f"weights of several steps: {sorted(found)}"
    return int(-found.pop())


class Shell:
    """Runs commands with --json in a folder: exit code, the object on stdout, and what was said."""

    def __init__(self, capfd: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capfd, self._patch = capfd, patch
        self.run = folder / "runs" / "mine"
        patch.chdir(folder)

    def __call__(self, *arguments: str, break_at: int = 0, how: str = "") -> tuple[int, dict[str, Any], str]:
        self._patch.setenv("TEST_BREAK_AT", str(break_at))
        self._patch.setenv("TEST_BREAK_HOW", how)
        self._capfd.readouterr()
        status = main([*arguments, "--json"])
        told = self._capfd.readouterr()
        return status, json.loads(told.out), told.err


@pytest.fixture
def shell(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    return Shell(capfd, monkeypatch, tmp_path)


def result_of(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "manifest.json").read_text())["result"]
    return result


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_a_large_model_that_breaks_ends_with_the_weights_of_its_newest_checkpoint(
    how: str, shell: Shell
) -> None:
    run = shell.run
    status, before, said = shell("train", f"{JOBS}:large", *FLAGS, "--steps", "4")
    assert (status, before["weights_step"], step_of(run / "model.safetensors")) == (0, 4, 4), said
    # The second life breaks at its third step, which is in no checkpoint.
    flags = ["--resume", "mine", "--steps", "20", "--checkpoint-every", "1h"]
    status, broken, said = shell("train", *flags, break_at=3, how=how)
    assert status == 30, said
    newest = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    assert 4 <= newest < 7
    assert step_of(run / "model.safetensors") == newest
    # Every place that names the weights says the same.
    status, exported, _ = shell("export", "mine", "--out", "exported.safetensors")
    assert (status, exported["steps"], step_of(Path("exported.safetensors"))) == (0, newest, newest)
    for result in (broken, result_of(run)):
        assert (result["weights_step"], result["weights_sha256"]) == (newest, exported["weights_sha256"])
        assert result["metrics"] == {"mean": -newest}
    assert f"weights of step {newest}" in said
    assert "error" in broken
    status, audit, _ = shell("audit", "mine")
    assert (status, audit["clean"], audit["model_step"]) == (0, True, newest)


def test_a_run_that_breaks_without_any_checkpoint_saves_no_model(shell: Shell) -> None:
    flags = [*FLAGS, "--steps", "20", "--checkpoint-every", "off"]
    status, broken, said = shell("train", f"{JOBS}:large", *flags, break_at=3, how="nan")
    assert status == 30, said
    assert not (shell.run / "model.safetensors").exists()
    for result in (broken, result_of(shell.run)):
        assert (result["weights_step"], result["weights_sha256"]) == (None, None)
    assert "no model is saved" in said
    assert audit_run(shell.run).is_clean


def test_a_small_model_whose_optimizer_raises_keeps_the_weights_of_the_step_before(shell: Shell) -> None:
    flags = [*FLAGS, "--steps", "20"]
    status, broken, said = shell("train", f"{JOBS}:small", *flags, break_at=6, how="raises")
    assert status == 30, said
    assert "step 6 is undone: the optimizer is broken\n" in said
    run = shell.run
    assert (step_of(run / "model.safetensors"), broken["weights_step"]) == (5, 5)
    status, exported, _ = shell("export", "mine")
    assert (status, exported["steps"], exported["weights_sha256"]) == (0, 5, broken["weights_sha256"])
    # The optimizer's state went back too: what comes after is the run that never broke.
    status, after, said = shell("train", "--resume", "mine")
    assert (status, after["weights_step"]) == (0, 20), said
    assert step_of(run / "model.safetensors") == 20
    assert audit_run(run).is_clean


def test_the_audit_finds_a_model_that_the_run_did_not_save(shell: Shell) -> None:
    shell("train", f"{JOBS}:small", *FLAGS, "--steps", "3")
    run = shell.run
    assert audit_run(run).summary()["model_step"] == 3
    model = run / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    assert any("model.safetensors" in each for each in audit_run(run).findings.violations)
    model.unlink()
    assert audit_run(run).is_clean


# --- interrupted twice ----------------------------------------------------------------------------


def interrupt_twice(folder: Path, job: str, *flags: str, said: str, **extra: str) -> tuple[str, float]:
    """Stop a run by two interrupts; returns what it said, and the seconds from the second one to its end."""
    more = {f"TEST_{name}": value for name, value in extra.items()}
    with command("train", f"{JOBS}:{job}", *FLAGS, *flags, cwd=folder, **more) as run:
        run.wait_for(said)
        run.interrupt()
        run.wait_for("once more stops now")
        time_of_second = time.monotonic()
        run.interrupt()
        status = run.wait()
        seconds = time.monotonic() - time_of_second
    assert status == NOT_OVER, run.text
    for word in ("Traceback", "Error", "exception"):
        assert word not in run.text
    return run.text, seconds


def test_a_second_interrupt_in_the_middle_of_a_step_leaves_no_torn_model(tmp_path: Path) -> None:
    text, seconds = interrupt_twice(tmp_path, "large", "--steps", "9999", said="loss", STEP_SECONDS="4")
    assert seconds < 3.0
    assert "no model is saved" in text
    run = tmp_path / "runs" / "mine"
    assert not (run / "model.safetensors").exists()
    assert "result" not in json.loads((run / "manifest.json").read_text())


def test_a_second_interrupt_leaves_the_model_of_the_run_before(shell: Shell) -> None:
    shell("train", f"{JOBS}:large", *FLAGS, "--steps", "3")
    with command("train", "--resume", "mine", "--steps", "99", TEST_STEP_SECONDS="4") as run:
        run.wait_for("joined")
        run.interrupt()
        run.wait_for("once more stops now")
        run.interrupt()
        assert run.wait() == NOT_OVER, run.text
    assert step_of(shell.run / "model.safetensors") == 3
    report = audit_run(shell.run)
    assert (report.is_clean, report.summary()["model_step"]) == (True, 3)


@pytest.mark.parametrize("job", ["small", "large"])
def test_a_second_interrupt_does_not_wait_for_a_slow_disk(job: str, tmp_path: Path) -> None:
    flags = ["--steps", "9999", "--checkpoint-every", "1steps", "--log", "verbose"]
    # So slow that the second interrupt comes before the run is saved, however busy this machine is.
    _, seconds = interrupt_twice(tmp_path, job, *flags, said="epoch 2 is complete", SYNC_SECONDS="8")
    assert seconds < 3.0
    model = tmp_path / "runs" / "mine" / "model.safetensors"
    if model.exists():
        step_of(model)


def test_a_second_interrupt_stops_a_notebooks_run_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stepped(w5xde.Callback):
        def on_step(self, run: RunStatus, step: int, loss: float) -> None:
            if step == 1:
                os.write(theirs, b"x")

    async def cell() -> None:
        w5xde.train(
            f"{JOBS}:large", nodes=1, steps=99, name="mine", runs=str(tmp_path), callbacks=[Stepped()]
        )

    def notebook() -> None:
        sys.stderr = os.fdopen(theirs, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            asyncio.new_event_loop().run_until_complete(cell())

    monkeypatch.setenv("TEST_STEP_SECONDS", "4")
    ours, theirs = os.pipe()
    with forked(notebook) as child:
        assert os.read(ours, 1) == b"x"
        child.interrupt()
        assert b"once more stops now" in os.read(ours, 1000)
        time_of_second = time.monotonic()
        child.interrupt()
        assert child.wait() == 0
    assert time.monotonic() - time_of_second < 3.0
    os.close(ours)
    os.close(theirs)


def test_a_second_interrupt_stops_the_last_evaluation_too(tmp_path: Path) -> None:
    _, seconds = interrupt_twice(
        tmp_path, "small", "--steps", "3", said="training ended", EVALUATION_SECONDS="30"
    )
    assert seconds < 3.0
    # What was trained had been saved by then.
    run = tmp_path / "runs" / "mine"
    assert step_of(run / "model.safetensors") == 3
    assert [each["version"] for each in events(run) if each["kind"] == "model"] == [3]
