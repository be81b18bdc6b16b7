"""Runs that version 0.1.0 wrote before the restructuring, killed in the middle: they resume and audit.

`tests/system/old_runs` has one for each way to train and to keep, made by `w5xde train jobs.py:slow --nodes 2
--epochs 2 --batch-size 10 --checkpoint-every 2steps --seed 5` and killed with SIGKILL after four steps.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import w5xde
from tests.processes import JOBS
from w5xde.runtime.durable.audit import audit_run

OLD_RUNS = Path(__file__).parents[1] / "old_runs"
SAMPLES, EPOCHS = 200, 2


@pytest.mark.parametrize("name", ["sync-checkpoint", "async-checkpoint", "sync-step"])
def test_a_run_of_before_is_audited_resumed_and_audited_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipfile.ZipFile(OLD_RUNS / f"{name}.zip").extractall(tmp_path)
    (tmp_path / name / "tickets.json").chmod(0o600)
    before = audit_run(tmp_path / name)
    assert before.is_clean
    assert before.findings.steps >= 4
    monkeypatch.setenv("TEST_BATCH_SECONDS", "0")
    result = w5xde.train(f"{JOBS}:slow", resume=name, runs=str(tmp_path), log="silent")
    assert (result.summary["epochs"], result.summary["samples"]) == (EPOCHS, EPOCHS * SAMPLES)
    after = audit_run(tmp_path / name)
    assert after.is_clean
    assert (after.findings.epochs, after.findings.samples) == (EPOCHS, EPOCHS * SAMPLES)
