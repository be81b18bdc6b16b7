"""`bench engines` without Ray: its own local pool takes every place, so that all but the cluster is real.

The rows themselves run on a cluster, in tests/engines/ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from w5xde.bench.engines import commands, suite
from w5xde.bench.engines.clusters import RayCluster, ray_cluster
from w5xde.bench.engines.commands import LOCAL, RAY_TRAIN, Contestant, run_of
from w5xde.bench.engines.ray_train import TrainTask
from w5xde.bench.engines.suite import EngineRow, EnginesOptions, run_engines
from w5xde.bench.show import plots as plot
from w5xde.bench.show import tables as report
from w5xde.cli.main import main
from w5xde.errors import TrainingError

PNG = b"\x89PNG\r\n\x1a\n"
ROWS = {
    "seed": EngineRow("seeds' job", "seed", 32, RAY_TRAIN, nodes=2),
    "seed-local": EngineRow("seeds' job", "seed", 32, LOCAL, nodes=2, asked=0.95),
}


@contextmanager
def _no_cluster(hosts: int) -> Iterator[RayCluster]:
    yield RayCluster("nowhere:1", is_ours=True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Two rows, with Ray Train missing; ours run in the local pool."""
    monkeypatch.setattr(suite, "require_ray", lambda extra: None)
    monkeypatch.setattr(suite, "ray_cluster", _no_cluster)
    monkeypatch.setattr(suite, "missing", lambda: "No module named 'pyarrow'")
    monkeypatch.setattr(suite, "ON_RAY", LOCAL)
    monkeypatch.setattr(suite, "ENGINE_ROWS", ROWS)
    options = EnginesOptions(tuple(ROWS), pairs=1, seconds=0.5, runs=str(tmp_path / "runs"))
    return run_engines(options, lambda text: None)


def test_rows_are_measured_and_one_without_its_peer_says_what_to_install(measured, tmp_path, capsys):
    alone, beside = measured["rows"]
    assert (alone["status"], alone["fix"]) == ("not installed", "pip install 'w5xde[bench-engines]'")
    assert alone["ratio"] is None
    assert beside["status"] == "measured"
    assert measured["audit_clean"]
    for run in (*alone["ours"], *beside["ours"], *beside["theirs"]):
        assert run["audit_clean"]
        assert run["batches"] == 2 * run["steps"] > 0
        assert run["batches_per_second"] == pytest.approx(run["batches"] / run["seconds"])
        assert 0 < run["first_step_seconds"] <= run["complete_seconds"]
    [ours], [theirs] = beside["ours"], beside["theirs"]
    assert beside["ratio"] == pytest.approx(ours["batches_per_second"] / theirs["batches_per_second"])
    assert beside["first_step"]["ratio"] == pytest.approx(
        ours["first_step_seconds"] / theirs["first_step_seconds"]
    )
    report.show(measured, sys.stdout)
    shown = capsys.readouterr().out
    assert "seed: Ray Train is not installed: pip install 'w5xde[bench-engines]'" in shown
    plot.draw(measured, tmp_path / "engines.png")
    assert (tmp_path / "engines.png").read_bytes().startswith(PNG)


def test_what_a_killed_worker_costs_is_shown(tmp_path, capsys):
    cost = {"seconds_without_step": 0.4, "seconds_behind": 0.3, "samples_again": 16}
    run = {**cost, "step_seconds_before": 0.1, "is_over": True}
    theirs = {**run, "seconds_without_step": None, "seconds_behind": None, "is_over": False}
    figures = suite.loss_figures(suite.Turns([run], [theirs]), 2.0)
    row = {
        "row": "kill",
        "title": "seeds' job",
        "peer": "Ray Train",
        "kills": True,
        "nodes": 4,
        "asked": 2.0,
        "status": "measured",
    }
    facts = {"pairs": 1, "pairs_dropped": 0, "seconds": 1.0, "cluster": "here", "checkpoint_steps": 50}
    about = {"cores": 2, "processor": "x", "python": "3", "torch": "2", "torch_threads": 1}
    found = {"bench": "engines", **facts, "rows": [row | figures], "machine": about}
    report.show(found, sys.stdout)
    shown = capsys.readouterr().out
    assert "one of 4 workers killed" in shown
    assert "400.0 ms" in shown
    assert "0 of 1" in shown
    plot.draw(found, tmp_path / "kill.png")
    assert (tmp_path / "kill.png").read_bytes().startswith(PNG)


def test_a_contestant_that_ends_too_soon_is_told_with_its_last_words(tmp_path):
    words = ["-c", "import sys; sys.exit('so it goes')"]
    broken = Contestant("the broken one", lambda task, folder: words, lambda folder: [])
    with (
        run_of(broken, TrainTask("seed", 32, 2, 0), tmp_path, "") as run,
        pytest.raises(TrainingError, match="the broken one ended with code 1 before any step") as failure,
    ):
        run.wait_for(lambda moments: moments, "step")
    assert failure.value.why == "so it goes"


def test_a_contestant_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "PATIENCE_SECONDS", 0.1)
    words = ["-c", "import time; time.sleep(1000)"]
    endless = Contestant("the endless one", lambda task, folder: words, lambda folder: [])
    with run_of(endless, TrainTask("seed", 32, 2, 0), tmp_path, "") as run:
        assert not run.ends()
        [process] = [each for each in psutil.Process().children() if each.cmdline()[1:] == words]
    assert not process.is_running()


def test_the_cluster_of_the_user_is_taken_and_no_setting_is_handed_on(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    monkeypatch.setenv("W5XDE_BATCH_SIZE", "7")
    with ray_cluster(2) as cluster:
        assert cluster == RayCluster("192.0.2.1:6379", is_ours=False)
        assert "W5XDE_BATCH_SIZE" not in os.environ
        assert "W5XDE_STATE" in os.environ
    assert os.environ["W5XDE_BATCH_SIZE"] == "7"


def test_without_ray_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["bench", "engines"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error[W5-600]: ")
    assert "pip install 'w5xde[bench-engines]'" in told
