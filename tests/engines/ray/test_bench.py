"""`w5xde bench engines` on a cluster of its own: every figure is there, and no process is left."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import run_python

# Every process of four runs loads torch; a busy machine takes minutes.
SECONDS_MAX = 1500.0
pytestmark = pytest.mark.timeout(SECONDS_MAX + 300)
MARK = "BENCH_ENGINES_TEST"


def marked(mark: str) -> list[psutil.Process]:
    """The processes that were started with this mark in their environment."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get(MARK) == mark:
                found.append(each)
    return found


def rows_of(folder: Path, mark: str) -> list[dict[str, Any]]:
    words = ["--rows", "text-local,kill", "--nodes", "2", "--pairs", "1", "--seconds", "1"]
    command = ["-m", "w5xde", "bench", "engines", *words, "--json"]
    done = run_python(*command, cwd=folder, seconds_max=SECONDS_MAX, variables={MARK: mark})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cluster"] == "started for this"
    assert found["audit_clean"]
    return list(found["rows"])


def test_runs_on_ray_stand_beside_the_local_pool_and_ray_train_and_survive_a_kill(tmp_path):
    mark = secrets.token_hex(8)
    speed, kill = rows_of(tmp_path, mark)
    assert [(row["row"], row["status"]) for row in (speed, kill)] == [
        ("text-local", "measured"),
        ("kill", "measured"),
    ]
    for run in (*speed["ours"], *speed["theirs"]):
        assert run["first_step_seconds"] > 0
        assert run["batches_per_second"] > 0
    [ours], [theirs] = kill["ours"], kill["theirs"]
    for run in (ours, theirs):
        assert run["is_over"]
        assert run["seconds_without_step"] > 0
        assert run["seconds_behind"] > 0
    # Ours lends again what the killed node had. Ray Train goes back to a checkpoint: the newest, or the one
    # before if its controller has not heard of that yet.
    samples_a_step = 2 * kill["batch_size"]
    assert ours["samples_again"] <= 2 * samples_a_step
    assert theirs["samples_again"] <= 2 * 50 * samples_a_step
    assert marked(mark) == []
    assert list(tmp_path.iterdir()) == []
