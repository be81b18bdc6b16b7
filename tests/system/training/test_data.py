"""DataLoaders, samplers, collate functions and weights in real runs: the same bits wherever data is read."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import w5xde
from tests.learn.jobs import make, mlp, points
from tests.processes import ROOT, AtStep, events, forked
from w5xde.cli.main import main
from w5xde.runs import read_manifest
from w5xde.runtime.durable.audit import audit_run

JOBS = str(ROOT / "tests" / "system" / "data_jobs.py")
SETTINGS: dict[str, Any] = {"epochs": 3, "batches_per_step": 3, "seed": 4}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W5XDE_CACHE", str(tmp_path / "cache"))


def train(job: str, runs: Path, **settings: Any) -> w5xde.Result:
    return w5xde.train(f"{JOBS}:{job}", runs=str(runs), **SETTINGS | settings)


def weights(result: w5xde.Result) -> str:
    assert audit_run(result.folder).is_clean
    return str(result.summary["weights_sha256"])


# How often each job is trained, and with what; the first is compared with the others.
WAYS: dict[str, list[dict[str, Any]]] = {
    "text": [{"nodes": 1}, {"nodes": 7}, {"nodes": 2, "data": "local"}, {"nodes": 2, "verify": 1.0}],
    "bucketed": [
        {"nodes": 1},
        {"nodes": 3, "data": "local", "loader_workers": 1},
        {"nodes": 2, "loader_workers": 2},
        {"nodes": 2, "data": "local", "verify": 1.0},
    ],
    "drawn": [{"nodes": 1}, {"nodes": 7}, {"nodes": 2, "data": "local"}, {"nodes": 2, "data": "cached"}],
    "globally": [
        {"nodes": 1},
        {"nodes": 2, "data": "local"},
        {"nodes": 2, "loader_workers": 1, "verify": 1.0},
    ],
}


@pytest.mark.parametrize("job", WAYS)
def test_the_bits_do_not_depend_on_nodes_nor_on_where_batches_are_read(job: str, tmp_path: Path) -> None:
    first, *others = (train(job, tmp_path, **how) for how in WAYS[job])
    found = [weights(each) for each in others]
    assert found == [weights(first)] * len(found)
    assert len({each.summary["samples"] for each in (first, *others)}) == 1


def test_the_ledger_counts_the_samples_that_were_drawn(tmp_path: Path) -> None:
    """70 places an epoch, of which the last 2 are no full batch: 17 batches of 4."""
    result = train("drawn", tmp_path, nodes=2)
    assert (result.summary["samples"], result.summary["batches"]) == (3 * 68, 3 * 17)
    assert read_manifest(result.folder)["settings"]["batch_size"] == 4
    assert read_manifest(result.folder)["settings"]["drop_last"] is True
    report = audit_run(result.folder)
    assert (report.findings.samples, report.is_clean) == (3 * 68, True)


def test_a_robust_run_weighs_its_batches(tmp_path: Path) -> None:
    result = train("text", tmp_path, nodes=3, robust="median")
    assert result.summary["steps"] == 3 * 4
    weights(result)


def test_an_async_run_weighs_its_batches(tmp_path: Path) -> None:
    for more in ({}, {"batches_per_step": 1}, {"batches_per_step": 1, "local_steps": "off"}):
        result = train("text", tmp_path, nodes=2, mode="async", **more)
        assert result.summary["samples"] == 3 * 46
        weights(result)


@pytest.mark.parametrize("job", ["text", "bucketed"])
@pytest.mark.parametrize("durability", ["checkpoint", "step"])
def test_a_killed_run_goes_on_with_the_same_order_and_the_same_weights(
    job: str, durability: str, tmp_path: Path
) -> None:
    whole = train(job, tmp_path / "whole", nodes=1)
    how = {"name": "mine", "durability": durability, "checkpoint_every": "2steps", "nodes": 2}
    for step, more in ((3, how), (6, {"resume": "mine"})):
        killer = AtStep({step: lambda run: os.kill(os.getpid(), signal.SIGKILL)})
        settings = (SETTINGS | more) if "name" in more else more
        with forked(
            lambda settings=settings, killer=killer: w5xde.train(
                f"{JOBS}:{job}", runs=str(tmp_path), callbacks=[killer], **settings
            )
        ) as child:
            assert child.wait() == -signal.SIGKILL
    result = w5xde.train(f"{JOBS}:{job}", runs=str(tmp_path), resume="mine")
    assert weights(result) == weights(whole)
    assert result.summary["samples"] == whole.summary["samples"]
    if durability == "step":
        assert audit_run(result.folder).findings.steps_redone == 0


def test_another_sampler_cannot_go_on_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train("drawn", tmp_path, nodes=1, name="mine", steps=4, epochs=None)
    monkeypatch.setenv("TEST_OTHER_SAMPLER", "1")
    with pytest.raises(w5xde.StorageError, match="the sampler draws another order") as caught:
        w5xde.train(f"{JOBS}:drawn", runs=str(tmp_path), resume="mine", steps=8)
    assert caught.value.code == "W5-405"


def test_what_was_taken_over_and_what_was_typed_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--epochs", "1", "--runs", str(tmp_path), "--nodes", "1", "--json"]
    assert main(["train", f"{JOBS}:drawn", "--batch-size", "6", "--no-drop-last", *flags]) == 0
    shown = capfd.readouterr()
    assert "taken over from the DataLoader: batches of 4, WeightedRandomSampler" in shown.err
    assert "--batch-size 6 is used, not the DataLoader's 4" in shown.err
    assert "--no-drop-last is used, not the DataLoader's True" in shown.err
    assert "6 × 2 = 12 samples a step" in shown.err
    assert json.loads(shown.out)["samples"] == 70
    assert main(["train", f"{JOBS}:drawn", "--no-shuffle", *flags]) == 2
    assert "error[W5-253]: --no-shuffle contradicts the job" in capfd.readouterr().err
    assert main(["train", f"{JOBS}:bucketed", *flags]) == 0
    assert "2 batches of the sampler a step" in capfd.readouterr().err


def test_a_batch_without_a_weight_is_tried_elsewhere_and_set_aside(tmp_path: Path) -> None:
    bad = points()[30][0]

    def weight(batch: Any) -> float:
        return -1.0 if (batch[0] == bad).all(1).any() else 1.0

    how = SETTINGS | {"epochs": 1, "batch_size": 4, "runs": str(tmp_path), "shuffle": False}
    result = w5xde.train(make(mlp(), weight=weight), nodes=2, skip_bad_batches=True, **how)
    (aside,) = [event for event in events(result.folder) if event["kind"] == "aside"]
    assert (aside["batch"], aside["samples"]) == (7, 4)
    assert "weight() gave -1 for batch 7, which is no weight (W5-255)" in aside["reason"]
    assert result.summary["samples"] == 46
