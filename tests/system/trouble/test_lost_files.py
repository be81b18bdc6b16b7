"""Files of a run that are gone or damaged: resume says so or refuses, and the audit finds it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import w5xde
from tests.system.harness import JOBS, events
from tests.system.trouble.test_resume import SETTINGS, kill_at, resume, spoil
from w5xde.cli.main import main


def audit(runs: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capfd.readouterr()
    status = main(["audit", "mine", "--runs", str(runs), "--json"])
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert status == (0 if found["clean"] else 1)
    return found


def run_twice(runs: Path) -> Path:
    """Two lives of one run, each with a ledger segment and checkpoints of its own."""
    kill_at(7, "job", runs, checkpoint_every="2steps", **SETTINGS)
    return kill_at(15, "job", runs, resume="mine", checkpoint_every="2steps")


def lives(folder: Path) -> list[int]:
    return [event["incarnation"] for event in events(folder) if event["kind"] == "start"]


@pytest.mark.parametrize("gone", ["000001", "000002", "*"])
def test_a_lost_segment_of_the_ledger_is_said_and_the_audit_finds_it(
    gone: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = run_twice(tmp_path)
    assert audit(tmp_path, capfd)["clean"]
    for path in folder.glob(f"ledger-{gone}.jsonl"):
        path.unlink()
    assert not audit(tmp_path, capfd)["clean"]
    result = resume(tmp_path)
    assert result.summary["steps"] == 24, "its newest checkpoint is whole, so training goes on"
    said = [event["text"] for event in events(folder) if event["kind"] == "lost"]
    assert len(said) == 1
    assert "the ledger" in said[0]
    assert lives(folder)[-1] == 3, "no life has the number of an earlier one"
    found = audit(tmp_path, capfd)
    assert any(said[0] in violation for violation in found["violations"])


def test_without_checkpoints_and_with_a_lost_segment_resume_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = run_twice(tmp_path)
    shutil.rmtree(folder / "checkpoints")
    for path in folder.glob("ledger-*.jsonl"):
        path.unlink()
    with pytest.raises(w5xde.StorageError, match="lost") as refused:
        resume(tmp_path)
    assert refused.value.code == "W5-407"
    assert not audit(tmp_path, capfd)["clean"]


def test_checkpoints_that_are_all_damaged_are_found_by_the_audit_after_a_refused_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = run_twice(tmp_path)
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        spoil(checkpoint)
    for _ in range(2):
        with pytest.raises(w5xde.StorageError, match="no checkpoint of run mine is whole"):
            resume(tmp_path)
        found = audit(tmp_path, capfd)
        assert any("no whole checkpoint" in each for each in found["violations"])
        assert all(wrong != "whole" for wrong in found["checkpoints"].values())


def test_a_lost_register_of_tickets_is_not_begun_anew_in_silence(tmp_path: Path) -> None:
    folder = kill_at(7, "job", tmp_path, checkpoint_every="2steps", **SETTINGS)
    (folder / "tickets.json").unlink()
    with pytest.raises(w5xde.StorageError, match="lost its register of tickets") as refused:
        resume(tmp_path)
    assert refused.value.code == "W5-414"
    assert "--new-identity" in refused.value.fix
    assert not (folder / "tickets.json").exists()
    assert resume(tmp_path, new_identity=True).summary["steps"] == 24


def test_a_file_instead_of_the_folder_of_runs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for runs in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["train", f"{JOBS}:job", "--runs", str(runs)]) == 40
        told = capsys.readouterr().err
        assert "error[W5-404]" in told
        assert "already" not in told
