"""The commands as a person uses them: help, joining, stopping, settings, what is printed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import w5xde
from tests.processes import (
    JOBS,
    AtStep,
    command,
    environment,
    events,
    run_json,
    run_python,
    sha256_of,
    ticket_of,
)
from tests.sockets import clear_ticket
from w5xde.cli.main import main
from w5xde.errors import NOT_OVER


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["join", "--help"], ["--version"]])
def test_help_is_instant_because_torch_is_not_imported(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom w5xde.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = run_python("-c", program)
    assert done.stderr.strip() == "False"
    assert "w5xde" in done.stdout


def test_every_command_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "serve", "join", "demo", "audit", "export", "explain", "doctor", "ticket"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert f"w5xde {name}" in capsys.readouterr().out.split("examples:")[1]


def test_serve_prints_the_exact_line_to_join(tmp_path: Path) -> None:
    with command(
        "serve", f"{JOBS}:job", "--port", "0", "--epochs", "3", cwd=tmp_path, is_fresh=True
    ) as coordinator:
        line = coordinator.wait_for("to join:")
        words = line.split("to join:")[1].split()
        assert words[:2] == ["w5xde", "join"]
        accept = ["--accept-code", sha256_of(coordinator)]
        with command(*words[1:], *accept, "--name", "helper", is_fresh=True) as node:
            assert node.wait() == 0, node.text
        assert "joined jobs-" in node.text
        assert coordinator.wait() == 0
    assert "helper joined" in coordinator.text
    assert "weights sha256" in coordinator.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_finishes_politely(number: int, tmp_path: Path) -> None:
    train = ["train", f"{JOBS}:slow", "--epochs", "9999", "--name", "long", "--log", "verbose"]
    with command(*train, cwd=tmp_path) as run:
        run.wait_for("epoch 1 is complete")
        run.send_signal(number)
        # Not 0: what follows in a script must not take it for the whole run.
        assert run.wait() == NOT_OVER, run.text
    assert ("interrupted" if number == signal.SIGINT else "terminated") in run.text
    result = json.loads((tmp_path / "runs" / "long" / "manifest.json").read_text())["result"]
    assert result["steps"] > 0
    assert (tmp_path / "runs" / "long" / "model.safetensors").exists()


def test_the_second_interrupt_stops_now(tmp_path: Path) -> None:
    # A step takes two nodes eight seconds, so the first interrupt is still waiting for it at the second one.
    train = ["train", f"{JOBS}:slow", "--epochs", "9999", "--batch-size", "6", "--batches-per-step", "32"]
    with command(*train, cwd=tmp_path, TEST_BATCH_SECONDS="0.5") as run:
        run.wait_for("joined")
        run.interrupt()
        run.wait_for("once more stops now")
        run.interrupt()
        assert run.wait() == NOT_OVER, run.text


def test_a_run_whose_last_step_was_under_way_is_over(tmp_path: Path) -> None:
    """It is interrupted, finishes what is begun, and nothing is left to do."""
    train = ["train", f"{JOBS}:slow", "--steps", "1", "--nodes", "1", "--batches-per-step", "4"]
    with command(*train, cwd=tmp_path, TEST_BATCH_SECONDS="0.5") as run:
        run.wait_for("joined")
        run.interrupt()
        run.wait_for("once more stops now")
        assert run.wait() == 0, run.text
    assert "all steps done" in run.text


def test_a_run_that_is_terminated_before_it_begins_can_be_tried_again(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    for words in (["train", "long.py"], ["join", "@ticket", "long.py"]):
        (tmp_path / "ticket").write_text(clear_ticket("127.0.0.1:1"))
        with command(*words, cwd=tmp_path) as run:
            run.wait_for("loading")
            run.send_signal(signal.SIGTERM)
            assert run.wait() == NOT_OVER, run.text
        assert "Traceback" not in run.text


def test_a_node_leaves_politely_and_the_run_goes_on(tmp_path: Path) -> None:
    options = ["--port", "0", "--nodes", "1", "--epochs", "9999"]
    with command("serve", f"{JOBS}:slow", *options, cwd=tmp_path) as coordinator:
        ticket = ticket_of(coordinator)
        with command("join", ticket, f"{JOBS}:slow", "--name", "guest") as node:
            coordinator.wait_for("guest joined")
            node.interrupt()
            assert node.wait() == NOT_OVER, node.text
        assert "left as asked" in node.text
        coordinator.wait_for("guest left (it said goodbye)")
        with command("join", ticket, f"{JOBS}:slow", "--json") as again:
            coordinator.wait_for("guest joined")
            coordinator.interrupt()
            assert coordinator.wait() == NOT_OVER
            # The run may be resumed, and needs its nodes then.
            assert again.wait() == NOT_OVER, again.text
        assert '"over":false' in again.text


def test_a_slow_node_says_how_much_of_its_work_counted(tmp_path: Path) -> None:
    flags = ["--port", "0", "--nodes", "1", "--steps", "60", "--batch-size", "10", "--batches-per-step", "2"]
    with command("serve", f"{JOBS}:slow", *flags, "--name", "mine", cwd=tmp_path) as coordinator:
        ticket = ticket_of(coordinator)
        with command(
            "join", ticket, f"{JOBS}:slow", "--nodes", "1", "--name", "snail", TEST_BATCH_SECONDS="0.4"
        ) as node:
            assert node.wait() == 0, node.text
        assert coordinator.wait() == 0, coordinator.text
    result = json.loads((tmp_path / "runs" / "mine" / "manifest.json").read_text())["result"]
    credited = {each["name"]: each["batches"] for each in result["nodes"]}
    said = re.search(r"snail: (\d+) batch(?:es)? of mine computed, busy for .*, (\d+) counted \(", node.text)
    assert said is not None, node.text
    computed, counted = int(said[1]), int(said[2])
    assert counted == credited["snail"]
    assert computed >= counted


def test_settings_come_from_flag_then_environment_then_file(tmp_path: Path) -> None:
    (tmp_path / "w5xde.toml").write_text('batch-size = 10\nmode = "async"\nepochs = 1\n')
    run_json(
        "train",
        f"{JOBS}:job",
        "--nodes",
        "1",
        "--batch-size",
        "50",
        "--name",
        "x",
        cwd=tmp_path,
        W5XDE_MODE="sync",
    )
    settings = json.loads((tmp_path / "runs" / "x" / "manifest.json").read_text())["settings"]
    assert (settings["batch_size"], settings["mode"], settings["epochs"]) == (50, "sync", 1)


def test_an_unknown_key_in_the_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "w5xde.toml").write_text("batchsize = 10\n")
    done = run_python("-m", "w5xde", "train", f"{JOBS}:job", cwd=tmp_path)
    assert done.returncode == 2
    assert "Did you mean 'batch-size'?" in done.stderr


def test_silent_says_nothing_and_stdout_belongs_to_the_result(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "import torch, w5xde\nfrom torch import nn\nprint('loading')\n"
        "def data():\n    print('reading')\n    return torch.utils.data.TensorDataset(torch.randn(64, 3))\n"
        "def loss(model, batch):\n    print('computing')\n    return model(batch[0]).pow(2).mean()\n"
        "job = w5xde.Job(model=lambda: nn.Linear(3, 1), data=data, loss=loss,"
        " optimizer=lambda p: torch.optim.SGD(p, lr=0.1))\n"
    )
    summary = run_json("train", "noisy.py", "--epochs", "1", "--log", "silent", cwd=tmp_path)
    assert summary["epochs"] == 1


def test_a_result_that_nobody_reads_does_not_end_as_if_the_run_were_over(tmp_path: Path) -> None:
    """The reader of its pipe is gone: an engine tries again, and then the run is found complete."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [
        "train",
        f"{JOBS}:job",
        "--nodes",
        "1",
        "--steps",
        "1",
        "--name",
        "mine",
        "--resume",
        "auto",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "w5xde", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(),
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert done.returncode == NOT_OVER, done.stderr
    assert run_json(*words[:-1], cwd=tmp_path)["over"]


def test_a_failing_callback_is_told_with_its_line_and_hears_of_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(w5xde.Callback):
        def __init__(self) -> None:
            self.told: list[str] = []

        def on_step(self, run: w5xde.RunStatus, step: int, loss: float) -> None:
            self.told.append(f"step {step}")
            raise ValueError("not my day")

        def on_end(self, run: w5xde.RunStatus, summary: dict[str, Any]) -> None:
            self.told.append(f"end after {summary['steps']}")
            raise SystemExit("nor mine")

    broken, other = Broken(), AtStep({4: lambda run: seen.append(run.step)})
    seen: list[int] = []
    result = w5xde.train(f"{JOBS}:job", nodes=1, epochs=1, runs=str(tmp_path), callbacks=[broken, other])
    assert result.summary["epochs"] == 1
    assert broken.told == ["step 1", f"end after {result.summary['steps']}"]
    assert seen == [4]
    [first] = [each["text"] for each in events(result.folder) if each["kind"] == "callback failed"]
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if 'raise ValueError("not my day")' in text
    )
    assert first.startswith("the callback Broken failed and is not called again")
    assert first.endswith(f"ValueError: not my day (test_commands.py, line {line})")
    printed = capfd.readouterr().err
    assert first in printed
    assert f'File "{__file__}", line {line}, in on_step' in printed
    # By then the ledger is closed.
    assert "the callback Broken failed and was told of the end: SystemExit: nor mine" in printed


def test_training_in_a_notebook_goes_on_beside_its_own_loop(tmp_path: Path) -> None:
    async def cell() -> w5xde.Result:
        return w5xde.train(f"{JOBS}:job", nodes=1, steps=3, runs=str(tmp_path))

    assert asyncio.run(cell()).summary["steps"] == 3


def test_python_takes_its_number_of_nodes_from_the_environment_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("W5XDE_NODES", "3")
    result = w5xde.train(f"{JOBS}:job", steps=3, runs=str(tmp_path))
    # Not the nodes of the summary: three steps may be over before the last of them has joined.
    assert json.loads((result.folder / "manifest.json").read_text())["settings"]["nodes"] == 3


def test_torchs_threads_are_the_users_again_afterwards(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    w5xde.train(f"{JOBS}:job", nodes=1, steps=1, threads=before + 1, runs=str(tmp_path))
    assert torch.get_num_threads() == before


def test_a_job_object_trains_without_a_file(tmp_path: Path) -> None:
    from tests.system.jobs import job

    result = w5xde.train(job, nodes=2, steps=3, runs=str(tmp_path))
    assert result.summary["steps"] == 3
    assert result.model.training
