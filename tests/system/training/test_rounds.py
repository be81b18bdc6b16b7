"""Rounds mode with real processes: the same bits whoever helps and whatever dies, and every sample once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import w5xde
from tests.processes import JOBS, AtStep, coordinator, events, forked, kill_any_node, node
from tests.system import jobs
from tests.system.liars import Lies
from w5xde.callbacks.status import RunStatus
from w5xde.cli.main import main
from w5xde.errors import JobError, UsageError, W5xdeError
from w5xde.learn.rounds import columns
from w5xde.runs import read_manifest
from w5xde.runtime.durable.audit import audit_run

# 10 batches in 5 steps of 2 columns; rounds of at most 3 steps, so of 3 and 2.
SETTINGS: dict[str, Any] = {
    "mode": "rounds", "batches_per_step": 2, "batch_size": 20, "local_steps": 3, "epochs": 12, "seed": 3,
}  # fmt: skip
STEPS, ROUNDS = 60, 24


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    result = w5xde.train(f"{JOBS}:job", nodes=1, runs=str(tmp_path_factory.mktemp("runs")), **SETTINGS)
    assert (result.summary["steps"], result.summary["rounds"]) == (STEPS, ROUNDS)
    return str(result.summary["weights_sha256"])


@pytest.mark.parametrize("nodes", [2, 3, 7])
def test_any_number_of_nodes_gives_the_same_weights(nodes: int, undisturbed: str, tmp_path: Path) -> None:
    result = w5xde.train(f"{JOBS}:job", nodes=nodes, runs=str(tmp_path), **SETTINGS)
    assert result.summary["weights_sha256"] == undisturbed
    assert result.summary["samples"] == 12 * 200
    assert audit_run(result.folder).is_clean


def lives(runs: Path, actions: dict[int, Callable[[RunStatus], None]], **settings: Any) -> None:
    """One life of a run, whose coordinator is killed by one of its own actions."""
    more = {"nodes": 3, "name": "mine", "runs": str(runs), "callbacks": [AtStep(actions)]} | settings
    with forked(lambda: w5xde.train(f"{JOBS}:slow", **more)) as child:
        assert child.wait() == -signal.SIGKILL


def kill_coordinator(run: RunStatus) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killing_nodes(killed: Path, *steps: int) -> dict[int, Callable[[RunStatus], None]]:
    """Actions that kill a node after each of these steps, and note that in a file."""

    def kill(run: RunStatus) -> None:
        with killed.open("a") as file:
            print(kill_any_node(run), file=file, flush=True)

    return dict.fromkeys(steps, kill)


@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_ten_kills_of_nodes_and_three_of_the_coordinator_leave_no_trace(
    durability: str, undisturbed: str, tmp_path: Path
) -> None:
    kept, killed = {"checkpoint_every": "5steps", "durability": durability}, tmp_path / "killed"
    end = kill_coordinator
    lives(tmp_path, killing_nodes(killed, 3, 6, 8) | {13: end}, **SETTINGS | kept)
    lives(tmp_path, killing_nodes(killed, 18, 21, 23) | {28: end}, resume="mine")
    lives(tmp_path, killing_nodes(killed, 33, 38) | {43: end}, resume="mine")
    last = AtStep(killing_nodes(killed, 48, 53))
    result = w5xde.train(f"{JOBS}:slow", nodes=3, resume="mine", runs=str(tmp_path), callbacks=[last])
    assert result.summary["weights_sha256"] == undisturbed
    found = audit_run(result.folder).findings
    assert (found.violations, found.steps, found.crashes) == ([], STEPS, 3)
    if durability == "step":
        assert found.steps_redone == 0
    assert len(killed.read_text().splitlines()) >= 10


def test_nodes_that_come_back_to_a_resumed_coordinator_keep_their_parameters(
    undisturbed: str, tmp_path: Path
) -> None:
    settings = SETTINGS | {"checkpoint_every": "1steps", "nodes": 0}
    with coordinator(tmp_path, **settings) as first, node(first.ticket, node_name="guest") as guest:
        first.wait_for_step(20)
        first.kill()
        result = w5xde.train(f"{JOBS}:slow", resume=first.folder.name, runs=str(tmp_path), nodes=0)
        assert guest.wait() == 0
    assert result.summary["weights_sha256"] == undisturbed


def test_every_sample_of_a_stream_counts_once(tmp_path: Path) -> None:
    settings = SETTINGS | {"batch_size": 4, "local_steps": "grow", "checkpoint_every": "4steps", "epochs": 3}
    more = {"nodes": 2, "name": "mine", "runs": str(tmp_path), "callbacks": [AtStep({7: kill_coordinator})]}
    with forked(lambda: w5xde.train(f"{JOBS}:counting_stream", **settings | more)) as child:
        assert child.wait() == -signal.SIGKILL
    result = w5xde.train(f"{JOBS}:counting_stream", resume="mine", runs=str(tmp_path))
    assert result.summary["epochs"] == 3
    found = audit_run(result.folder).findings
    assert found.violations == []
    plain = w5xde.train(f"{JOBS}:counting_stream", nodes=1, runs=str(tmp_path), name="plain", **settings)
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert result.summary["samples"] == plain.summary["samples"] == found.samples


@pytest.mark.parametrize("data", ["local", "cached"])
def test_data_that_nodes_have_gives_the_same_weights(data: str, undisturbed: str, tmp_path: Path) -> None:
    result = w5xde.train(f"{JOBS}:job", nodes=2, runs=str(tmp_path), data=data, **SETTINGS)
    assert result.summary["weights_sha256"] == undisturbed


# --- trust ----------------------------------------------------------------------------------------

MANY: dict[str, Any] = SETTINGS | {"batches_per_step": 6, "batch_size": 10, "nodes": 6, "log": "silent"}


def train_with(folder: Path, loss: Any, **settings: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    job = w5xde.Job(model=jobs.model, data=jobs.data, loss=loss, optimizer=jobs.optimizer)
    result = w5xde.train(job, runs=str(folder), name="run", **MANY | settings)
    return result.summary, events(folder / "run")


@pytest.mark.parametrize("lie", ["sign flipped", "a thousand times too large"])
def test_with_verification_the_weights_are_those_of_an_honest_pool(lie: str, tmp_path: Path) -> None:
    clean, told = train_with(tmp_path / "clean", jobs.loss, verify=1.0)
    assert clean["verified_batches"] >= clean["batches"]
    assert not [record for record in told if record["kind"] in ("cheat", "fault", "doubt")]
    result, told = train_with(
        tmp_path / "lies", Lies(tmp_path, lie, jobs.loss, nodes=6, liars=2), verify=0.2, epochs=20
    )
    honest, _ = train_with(tmp_path / "honest", jobs.loss, epochs=20)
    assert result["weights_sha256"] == honest["weights_sha256"]
    assert {record["node"] for record in told if record["kind"] in ("cheat", "fault")}


def test_a_robust_mean_of_columns_survives_a_liar(tmp_path: Path) -> None:
    honest, _ = train_with(tmp_path / "honest", jobs.loss, robust="trim:1", epochs=30)
    lies = Lies(tmp_path, "a thousand times too large", jobs.loss, nodes=6, liars=1)
    result, _ = train_with(tmp_path / "lies", lies, robust="trim:1", max_update_norm="off", epochs=30)
    assert result["loss_last"] < honest["loss_first"]


def test_a_node_whose_parameters_went_wrong_gets_them_anew(
    undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, right, seen = os.getpid(), columns.replica_digest, []

    def sometimes_wrong(moving: Any, last: Any) -> bytes:
        seen.append(1)
        return bytes(16) if os.getpid() != here and len(seen) == 5 else right(moving, last)

    monkeypatch.setattr(columns, "replica_digest", sometimes_wrong)
    result = w5xde.train(f"{JOBS}:job", nodes=2, runs=str(tmp_path), **SETTINGS)
    assert result.summary["weights_sha256"] == undisturbed
    told = [record for record in events(result.folder) if record["kind"] == "replica"]
    assert {record["node"] for record in told} == {"local-1", "local-2"}
    assert "gets them anew" in told[0]["text"]
    assert audit_run(result.folder).is_clean


# --- choices --------------------------------------------------------------------------------------


def test_auto_chooses_once_and_another_run_can_repeat_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--batch-size", "4", "--batches-per-step", "2", "--epochs", "10", "--runs", str(tmp_path)]
    rounds = ["train", f"{JOBS}:job", "--mode", "rounds", *flags, "--json"]
    assert main([*rounds, "--local-steps", "auto", "--name", "first"]) == 0
    shown = capfd.readouterr()
    assert "rounds of 2 to 20 steps (or what the link needs), learning rate × 1.5" in shown.err
    first = json.loads(shown.out)
    [chosen] = [each for each in events(tmp_path / "first") if each["kind"] == "round lengths"]
    assert chosen["text"].startswith("a round talks for")
    assert read_manifest(tmp_path / "first")["round_lengths"] == chosen["round_lengths"]
    assert audit_run(tmp_path / "first").is_clean
    assert main([*rounds, "--local-steps", "@first", "--name", "again"]) == 0
    again = json.loads(capfd.readouterr().out)
    assert again["weights_sha256"] == first["weights_sha256"]
    assert first["bytes_per_sample"] > 0
    assert all(0 < each["computing"] <= 1 for each in first["nodes"])


@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        ({"local_steps": 6}, "W5-216", "rounds of 6 steps do not fit: an epoch has 5 whole steps"),
        ({"local_steps": 3, "steps": 2}, "W5-216", "the run has 2 steps"),
        ({"compress": "up: int8"}, "W5-210", "weights would depend on which node computed what"),
        ({"compress": "auto:lossy"}, "W5-210", "chooses by the link"),
        ({"local_steps": "some"}, "W5-210", "must be grow, auto, @RUN or a number"),
        ({"round_rate": 0}, "W5-210", "must be a positive number"),
        ({"local_steps": "@nothing"}, "W5-401", "nothing"),
        ({"scale_for_batch": True}, "W5-210", "in mode rounds nodes make steps of one batch"),
        ({"mode": "sync"}, "W5-210", "local_steps 3 is for mode rounds"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_fix(
    settings: dict[str, Any], code: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(W5xdeError) as caught:
        w5xde.train(f"{JOBS}:job", nodes=1, runs=str(tmp_path), **SETTINGS | settings)
    assert caught.value.code == code
    assert text in str(caught.value)


def test_an_optimizer_that_cannot_be_handed_over_is_refused_by_name(tmp_path: Path) -> None:
    job = w5xde.Job(
        model=jobs.model,
        data=jobs.data,
        loss=jobs.loss,
        optimizer=lambda params: torch.optim.NAdam(params, lr=0.01),
    )
    with pytest.raises(JobError, match="rounds cannot hand the state of NAdam over") as caught:
        w5xde.train(job, nodes=1, runs=str(tmp_path), **SETTINGS)
    assert caught.value.code == "W5-235"


def test_a_resumed_run_keeps_its_rounds(tmp_path: Path) -> None:
    w5xde.train(f"{JOBS}:job", nodes=1, runs=str(tmp_path), name="mine", **SETTINGS)
    for changed in ({"local_steps": 2}, {"round_rate": 1.0}, {"mode": "sync"}, {"compress": "none"}):
        with pytest.raises(UsageError) as caught:
            w5xde.train(f"{JOBS}:job", resume="mine", runs=str(tmp_path), epochs=14, **changed)
        assert caught.value.code in ("W5-211", "W5-210")
