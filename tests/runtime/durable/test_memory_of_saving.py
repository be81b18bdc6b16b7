"""A large model is saved and restored without a second copy of it in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Of parameters and optimizer state: buffers of a few pieces, and what the allocator keeps.
SHARE_MAX = 0.1
# The optimizer's new state, and the file that it is read from, are both in memory for a moment.
RESUME_SHARE_MAX = 4 / 3 + SHARE_MAX


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Bytes of parameters and optimizer state, and how many more each phase took."""
    command = [sys.executable, "-m", "tests.runtime.durable.saving", str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


@pytest.mark.parametrize("phase", ["checkpoint", "end"])
def test_saving_takes_no_second_copy_of_the_model(report: dict[str, int], phase: str) -> None:
    assert report[phase] <= SHARE_MAX * report["state"]


def test_after_an_evaluation_no_copy_of_a_large_model_stays(report: dict[str, int]) -> None:
    assert report["models"] == 1


def test_resuming_reads_one_file_after_another(report: dict[str, int]) -> None:
    assert report["resume"] <= RESUME_SHARE_MAX * report["state"]
