"""The Python interface as a person uses it: progress and ticket are printed, and a result fits a screen."""

from __future__ import annotations

from pathlib import Path

import pytest

import w5xde
from tests.processes import JOBS, events
from w5xde.ticket import parse


def test_training_shows_its_progress_and_its_ticket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = w5xde.train(f"{JOBS}:job", nodes=1, steps=3, runs=str(tmp_path))
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "32 × 2 = 64 samples a step" in lines[0]
    assert f"to join:  w5xde join {result.ticket}" in lines[2]
    assert parse(result.ticket).addresses
    assert "local-1 joined" in lines
    assert any(line.startswith("done  run ") for line in lines)


@pytest.mark.parametrize("quiet", [{"progress": False}, {"log": "silent"}], ids=["progress", "log"])
def test_training_is_silent_if_it_is_told_so(
    quiet: dict[str, object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = w5xde.train(f"{JOBS}:job", nodes=1, steps=3, runs=str(tmp_path), **quiet)  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")
    assert result.ticket


def test_the_repr_of_a_result_fits_a_screen_and_has_no_secret(tmp_path: Path) -> None:
    result = w5xde.train(f"{JOBS}:job", nodes=1, steps=3, runs=str(tmp_path), progress=False)
    result.summary["metrics"] = {f"metric_{number}": 0.5 for number in range(50)}
    lines = repr(result).splitlines()
    assert len(lines) <= 10
    shown = "\n".join(line for line in lines if ".folder" not in line)
    assert max(map(len, shown.splitlines())) <= 100
    assert "3 steps" in shown
    assert "metric_0 0.5" in shown
    assert "and 46 more metrics" in shown
    assert "276 parameters" in shown
    assert result.ticket not in repr(result)
    assert repr(result) == str(result)


def test_few_steps_are_told_before_training_and_in_the_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = w5xde.train(f"{JOBS}:job", nodes=1, epochs=2, runs=str(tmp_path))
    [told] = [event["text"] for event in events(result.folder) if event["kind"] == "few steps"]
    assert "--batches-per-step 1" in told
    lines = capsys.readouterr().out.splitlines()
    assert lines.index(told) < lines.index("local-1 joined")


def test_a_run_with_steps_of_its_own_is_not_told_of_few(tmp_path: Path) -> None:
    result = w5xde.train(f"{JOBS}:job", nodes=1, steps=3, runs=str(tmp_path), progress=False)
    assert "few steps" not in {event["kind"] for event in events(result.folder)}
