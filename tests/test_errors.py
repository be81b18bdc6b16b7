"""Errors: what a Python program shows of one that it does not catch, and which runs an error names."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from tests.processes import run_python
from w5xde.cli.main import main
from w5xde.errors import JobError, StorageError, W5xdeError
from w5xde.runs import find_run


def test_a_traceback_shows_code_why_and_fix_and_the_text_of_the_error_stays_the_same() -> None:
    error = JobError("the loss failed", code="W5-205", why="it is not a scalar", fix="return loss.mean()")
    shown = "".join(traceback.format_exception(error))
    for part in ("W5-205", "why: it is not a scalar", "fix: return loss.mean()", "w5xde explain W5-205"):
        assert part in shown
    assert str(error) == error.what == "the loss failed"


def test_an_error_that_a_program_does_not_catch_ends_it_with_the_fix() -> None:
    code = "import w5xde; w5xde.train('nowhere.py', nodes=1)"
    shown = run_python("-c", code).stderr
    assert "there is no job file nowhere.py" in shown
    assert "code: W5-206" in shown
    assert "fix: give the path of a Python file" in shown


@pytest.mark.parametrize("more", [[], ["--log", "verbose"]])
def test_the_command_line_says_each_part_once(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert main(["train", "nowhere.py", *more]) == 20
    shown = capsys.readouterr().err
    assert shown.count("fix:") == shown.count("w5xde explain W5-206") == 1
    assert "code: W5-206" not in shown


def make_run(folder: Path, name: str, seconds: int) -> None:
    (folder / name).mkdir()
    manifest = folder / name / "manifest.json"
    manifest.write_text("{}", encoding="utf-8")
    os.utime(manifest, (seconds, seconds))


def refused(runs: Path) -> W5xdeError:
    with pytest.raises(StorageError) as caught:
        find_run(str(runs), "nope")
    return caught.value


def test_a_run_that_does_not_exist_is_answered_with_the_newest_runs_and_how_many_more(tmp_path: Path) -> None:
    for seconds, name in enumerate(["z", "y", "x", "w", "v", "u", "a"], 1_000_000):
        make_run(tmp_path, name, seconds)
    assert "the newest runs here are a, u, v, w, x (and 2 more)" in refused(tmp_path).fix


def test_a_few_runs_are_all_named_the_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path, "a", 1_000_000)
    make_run(tmp_path, "b", 1_000_001)
    assert "runs here are b, a, or name their folder" in refused(tmp_path).fix
