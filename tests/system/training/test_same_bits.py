"""Same bits whoever helps: the number of nodes, their deaths and their comings leave no trace."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

import w5xde
from tests.processes import JOBS, AtStep, HurryOnce, events, kill_any_node, node, pid_of, run_json
from w5xde.callbacks.status import RunStatus

EPOCHS = 12  # of 7 batches in 2 steps: 24 steps
SETTINGS = {"batches_per_step": 4, "epochs": EPOCHS, "seed": 3}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    result = w5xde.train(f"{JOBS}:job", nodes=1, runs=str(tmp_path_factory.mktemp("runs")), **SETTINGS)
    return str(result.summary["weights_sha256"])


@pytest.mark.parametrize("nodes", [2, 3, 7])
def test_any_number_of_nodes_gives_the_same_weights(nodes: int, undisturbed: str, tmp_path: Path) -> None:
    result = w5xde.train(f"{JOBS}:job", nodes=nodes, runs=str(tmp_path), **SETTINGS)
    assert result.summary["weights_sha256"] == undisturbed
    assert result.summary["samples"] == EPOCHS * 200


def test_killed_and_joining_nodes_leave_no_trace_in_the_weights(
    undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    def kill(name: str) -> Callable[[RunStatus], None]:
        def action(run: RunStatus) -> None:
            killed.append(pid_of(run, name))
            os.kill(killed[-1], signal.SIGKILL)

        return action

    # A killed local node is started anew, so each death is also a late joining; one more comes from outside.
    actions = {3: kill("local-1"), 8: kill("local-2"), 12: kill("local-1"), 16: kill("local-3")}
    ticket, job, hurry = tmp_path / "ticket", f"{JOBS}:slow", tmp_path / "hurry"
    monkeypatch.setenv("TEST_HURRY_FILE", str(hurry))
    all_are_here = HurryOnce(hurry, "local-1", "local-2", "local-3", "guest")
    with node(ticket, node_name="guest") as guest:
        settings = SETTINGS | {"ticket_file": str(ticket), "runs": str(tmp_path)}
        result = w5xde.train(job, nodes=3, callbacks=[AtStep(actions), all_are_here], **settings)
        assert guest.wait() == 0
    assert result.summary["weights_sha256"] == undisturbed
    assert len(set(killed)) == 4
    left = [event for event in events(result.folder) if event["kind"] == "left"]
    assert len(left) >= 4
    assert {node["name"] for node in result.summary["nodes"]} == {"local-1", "local-2", "local-3", "guest"}
    assert result.summary["epochs"] == EPOCHS


def test_a_killed_nodes_batches_are_lent_again_within_a_second(tmp_path: Path) -> None:
    killed: list[tuple[float, str]] = []

    def kill(run: RunStatus) -> None:
        killed.append((time.time(), kill_any_node(run)))

    result = w5xde.train(
        f"{JOBS}:slow",
        nodes=2,
        runs=str(tmp_path),
        steps=8,
        batches_per_step=4,
        callbacks=[AtStep({4: kill})],
    )
    left = next(event for event in events(result.folder) if event["kind"] == "left")
    [(at, name)] = killed
    assert left["node"] == name
    assert left["time"] - at < 1.0


class Freeze(w5xde.Callback):
    """Stops a local node with SIGSTOP, and wakes it once the coordinator has given it up."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.pid = 0
        self.frozen_at = self.left_at = 0.0
        self.joins = 0

    def on_node_join(self, run: RunStatus, node: str) -> None:
        self.joins += node == self._name

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        if step == 4:
            self.pid, self.frozen_at = pid_of(run, self._name), time.monotonic()
            os.kill(self.pid, signal.SIGSTOP)

    def on_node_leave(self, run: RunStatus, node: str, reason: str) -> None:
        self.left_at = time.monotonic()
        os.kill(self.pid, signal.SIGCONT)


def test_a_frozen_node_is_given_up_within_eight_seconds_and_comes_back_when_it_wakes(tmp_path: Path) -> None:
    settings = {**SETTINGS, "epochs": 40}
    plain = w5xde.train(f"{JOBS}:job", nodes=1, runs=str(tmp_path), **settings)
    freeze = Freeze("local-2")
    result = w5xde.train(f"{JOBS}:slow", nodes=2, runs=str(tmp_path), callbacks=[freeze], **settings)
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert freeze.left_at - freeze.frozen_at < 8.0
    assert freeze.joins == 2


def test_json_is_one_object_and_the_run_folder_is_readable_without_w5xde(tmp_path: Path) -> None:
    summary = run_json(
        "train", f"{JOBS}:job", "--nodes", "2", "--epochs", "2", "--name", "mine", cwd=tmp_path
    )
    wanted = (
        "run mode steps epochs batches samples seconds loss_first loss_last metrics weights_sha256 "
        "bytes_sent bytes_received batches_relent nodes"
    )
    assert set(wanted.split()) <= set(summary)
    assert summary["run"] == "mine"
    assert summary["epochs"] == 2
    assert sum(node["batches"] for node in summary["nodes"]) == summary["batches"]
    assert set(summary["nodes"][0]) >= {"name", "batches", "samples", "seconds_busy", "seconds_waiting"}
    folder = tmp_path / "runs" / "mine"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["result"]["weights_sha256"] == summary["weights_sha256"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["samples"] == summary["samples"]
    kinds = [event["kind"] for event in events(folder)]
    # The first checkpoint may be sooner than the first node.
    assert kinds[:2] == ["segment", "start"]
    assert kinds.index("joined") < kinds.index("lend")
    assert kinds[-1] == "stop"
    assert set(load_file(folder / "model.safetensors")) >= {"0.weight", "1.running_mean", "4.bias"}
