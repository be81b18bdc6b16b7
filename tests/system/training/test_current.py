"""w5xde.current() in real pools: the planned step on every node, in every mode, and when verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import w5xde
from tests.processes import JOBS

FLAGS = {"batch_size": 10, "epochs": 4, "log": "silent"}


def train(runs: Path, monkeypatch: pytest.MonkeyPatch, step: int, **given: Any) -> dict[str, Any]:
    monkeypatch.setenv("TEST_STEP", str(step))
    flags = {**FLAGS, "batches_per_step": step, "runs": str(runs), **given}
    # A loss that is somewhere else fails, and with it the run.
    return w5xde.train(f"{JOBS}:placed", **flags).summary


@pytest.mark.parametrize("mode", ["sync", "rounds"])
def test_the_same_bits_whoever_helps(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"local_steps": 3} if mode == "rounds" else {}
    found = {
        train(tmp_path, monkeypatch, 3, nodes=nodes, mode=mode, verify=verify, **more)["weights_sha256"]
        for nodes, verify in ((1, 0.0), (3, 0.0), (2, 1.0))
    }
    assert len(found) == 1


@pytest.mark.parametrize("mode", ["sync", "rounds", "async"])
def test_what_is_verified_is_computed_at_the_same_place(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = 1 if mode == "async" else 2
    summary = train(tmp_path, monkeypatch, step, nodes=2, mode=mode, verify=1.0)
    assert (summary["verified_batches"], summary["unverified_batches"]) == (80, 0)


def test_in_async_mode_the_step_is_the_planned_one_however_late_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of steps that nodes make themselves: the model is tiny, and its batches take microseconds."""
    for local_steps in ("on", "off"):
        summary = train(tmp_path, monkeypatch, 1, nodes=3, mode="async", local_steps=local_steps, epochs=20)
        assert (summary["epochs"], summary["bad_batches"]) == (20, [])
