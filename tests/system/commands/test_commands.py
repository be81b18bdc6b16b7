"""The commands as a person uses them: help, joining, stopping, settings, what is printed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

import w5xde
from tests.processes import JOBS, command, events, run_json, run_python, ticket_of
from w5xde.cli.main import main


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
        with command(*words[1:], "--name", "helper", is_fresh=True) as node:
            assert node.wait() == 0, node.text
        assert "joined jobs-" in node.text
        assert coordinator.wait() == 0
    assert "helper joined" in coordinator.text
    assert "weights sha256" in coordinator.text


def test_the_first_interrupt_finishes_politely(tmp_path: Path) -> None:
    train = ["train", f"{JOBS}:slow", "--epochs", "9999", "--name", "long", "--log", "verbose"]
    with command(*train, cwd=tmp_path) as run:
        run.wait_for("epoch 1 is complete")
        run.interrupt()
        assert run.wait() == 0, run.text
    assert "interrupted" in run.text
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
        assert run.wait() == 130, run.text


def test_a_node_leaves_politely_and_the_run_goes_on(tmp_path: Path) -> None:
    options = ["--port", "0", "--nodes", "1", "--epochs", "9999"]
    with command("serve", f"{JOBS}:slow", *options, cwd=tmp_path) as coordinator:
        ticket = ticket_of(coordinator)
        with command("join", ticket, f"{JOBS}:slow", "--name", "guest") as node:
            coordinator.wait_for("guest joined")
            node.interrupt()
            assert node.wait() == 0, node.text
        assert "left politely" in node.text
        coordinator.wait_for("guest left (it said goodbye)")
        coordinator.interrupt()
        assert coordinator.wait() == 0


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


def test_a_failing_callback_does_not_end_the_training(tmp_path: Path) -> None:
    class Broken(w5xde.Callback):
        def on_step(self, run: w5xde.RunStatus, step: int, loss: float) -> None:
            raise ValueError("not my day")

    result = w5xde.train(f"{JOBS}:job", nodes=1, epochs=1, runs=str(tmp_path), callbacks=[Broken()])
    assert result.summary["epochs"] == 1
    assert "not my day" in str(events(result.folder))


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
