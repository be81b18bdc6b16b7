"""What a deployed run has written, and whether it is the one that one process trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import w5xde
from tests.deploy.jobs import OPEN, GatedJob
from tests.processes import run_python, whole_lines

STEPS = 120
# Flags of `w5xde serve` for all deployed runs.
TRAINING = ["--steps", str(STEPS), "--checkpoint-every", "10steps", "--batch-size", "8"]


def step_of(run: Path) -> int:
    """The newest step in a run's metrics; the coordinator writes a row each second."""
    lines = whole_lines(run / "metrics.jsonl")
    return int(json.loads(lines[-1])["step"]) if lines else 0


def compare_with_one_process(run: Path, folder: Path) -> None:
    """One process, in this new folder, trains the same weights."""
    folder.mkdir()
    job = GatedJob(folder)
    job.allow(OPEN)
    result: dict[str, Any] = json.loads((run / "manifest.json").read_text())["result"]
    runs = str(folder / "runs")
    alone = w5xde.train(str(job.file), runs=runs, steps=STEPS, batch_size=8, nodes=1, progress=False)
    assert result["weights_sha256"] == alone.summary["weights_sha256"]
    assert result["steps"] == STEPS


def audit(run: Path) -> None:
    """The ledger counts every batch once."""
    done = run_python("-m", "w5xde", "audit", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
