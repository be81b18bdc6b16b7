"""A job brings its own settings and callbacks along: what they do, and what beats them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import w5xde
from tests.processes import ROOT, command, run_json
from tests.system import jobs
from w5xde.cli.main import main
from w5xde.config import Settings
from w5xde.errors import JobError, UsageError
from w5xde.learn.job.named_job import settle
from w5xde.setting_sources import SettingSources

FILE = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
import w5xde
from tests.system import jobs

job = w5xde.Job(
    model=jobs.model, data=jobs.data, loss=jobs.loss, optimizer=jobs.optimizer,
    settings=lambda: {{"batch_size": 20, "epochs": 2, "clip_norm": 0.5}},
)
"""


def make(**more: Any) -> w5xde.Job:
    return w5xde.Job(model=jobs.model, data=jobs.data, loss=jobs.loss, optimizer=jobs.optimizer, **more)


def write(folder: Path) -> str:
    (folder / "ported.py").write_text(FILE, encoding="utf-8")
    return str(folder / "ported.py")


def test_the_settings_of_a_job_are_used_and_a_flag_beats_them(tmp_path: Path) -> None:
    file = write(tmp_path)
    found = run_json("train", file, "--nodes", "1", "--epochs", "1", "--name", "one", cwd=tmp_path)
    assert (found["steps"], found["epochs"], found["samples"]) == (jobs.SAMPLES // 40, 1, jobs.SAMPLES)
    settings = json.loads((tmp_path / "runs" / "one" / "manifest.json").read_text())["settings"]
    assert (settings["batch_size"], settings["clip_norm"]) == (20, 0.5)


def test_a_resumed_run_keeps_its_settings_whatever_the_job_says_now(tmp_path: Path) -> None:
    file = write(tmp_path)
    run_json("train", file, "--nodes", "1", "--epochs", "1", "--name", "one", cwd=tmp_path)
    Path(file).write_text(FILE.replace("20", "10"), encoding="utf-8")
    found = run_json("train", "--resume", "one", "--epochs", "2", cwd=tmp_path)
    assert found["steps"] == 2 * jobs.SAMPLES // 40


def test_print_config_says_where_every_setting_comes_from_and_does_not_train(tmp_path: Path) -> None:
    file = write(tmp_path)
    (tmp_path / "w5xde.toml").write_text("clip-norm = 0.25\n", encoding="utf-8")
    words = ["train", file, "--print-config", "--nodes", "1"]
    with command(*words, cwd=tmp_path, W5XDE_SEED="7") as shown:
        assert shown.wait() == 0
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in shown.text.splitlines()}
    assert lines["batch-size"] == ["20", "the job"]
    assert lines["clip-norm"] == ["0.25", "w5xde.toml"]
    assert lines["seed"] == ["7", "W5XDE_SEED"]
    assert lines["nodes"] == ["1", "given"]
    assert lines["mode"] == ["sync", "default"]
    assert not (tmp_path / "runs").exists()
    found = run_json(*words, cwd=tmp_path)["settings"]
    assert found["batch_size"] == {"value": 20, "from": "the job"}


def shown_config(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """What --print-config says of each setting, with its source."""
    file = write(folder).replace("ported.py", "plain.py")
    plain = FILE.replace('"batch_size": 20, "epochs": 2, "clip_norm": 0.5', "")
    Path(file).write_text(plain, encoding="utf-8")
    assert main(["train", file, "--print-config", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}


def test_print_config_shows_the_default_of_every_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = shown_config(tmp_path, capsys)
    assert not [name for name, said in lines.items() if said == "default"]
    assert lines["batch-size"] == "that of the job's DataLoader, else 32 default"
    assert lines["shuffle"] == "as in the job's DataLoader, else on default"
    assert lines["batches-per-step"] == "2 default"
    assert lines["epochs"] == "10 default"
    assert lines["steps"] == "no limit default"
    assert lines["clip-norm"] == "no clipping default"
    assert lines["evaluate-every"] == "once an epoch and at the end default"
    assert lines["tls-cert"] == "none default"


def test_print_config_shows_defaults_that_other_settings_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = shown_config(tmp_path, capsys, "--mode", "rounds", "--steps", "9")
    assert (lines["batches-per-step"], lines["epochs"]) == ("4 default", "no limit default")


def test_print_config_of_a_resumed_run_names_the_run(tmp_path: Path) -> None:
    run_json("train", write(tmp_path), "--nodes", "1", "--epochs", "1", "--name", "one", cwd=tmp_path)
    words = ["train", "--resume", "one", "--epochs", "3", "--print-config"]
    found = run_json(*words, cwd=tmp_path)["settings"]
    assert found["batch_size"] == {"value": 20, "from": "run one"}
    assert found["epochs"] == {"value": 3, "from": "given"}


def test_callbacks_of_a_job_follow_its_run_beside_those_of_the_caller(tmp_path: Path) -> None:
    class Follow(w5xde.Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step(self, run: Any, step: int, loss: float) -> None:
            self.steps.append(step)

    own, callers = Follow(), Follow()
    result = w5xde.train(
        make(callbacks=lambda: [own]), nodes=1, epochs=1, runs=str(tmp_path), log="silent",
        callbacks=[callers],
    )  # fmt: skip
    assert own.steps == callers.steps == list(range(1, result.summary["steps"] + 1))


@pytest.mark.parametrize(
    ("settings", "kind", "sentence"),
    [
        ([("epochs", 1)], JobError, r"Job\(settings=…\) is list"),
        (lambda: 3, JobError, r"settings\(\) returned a int"),
        (lambda: 1 / 0, JobError, r"settings\(\) failed: ZeroDivisionError"),
        ({"epoch": 1}, UsageError, r"unknown setting 'epoch' in the job. Did you mean 'epochs'"),
        ({"batchsize": 1}, UsageError, r"unknown setting 'batchsize' in the job. Did you mean 'batch_size'"),
        ({"epochs": 0}, UsageError, r"epochs 0 must be 1 or more \(in the job\)"),
    ],
)
def test_settings_of_a_job_that_make_no_sense_are_refused(
    tmp_path: Path, settings: Any, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        w5xde.train(make(settings=settings), nodes=1, runs=str(tmp_path))


def settled(job: w5xde.Job, folder: Path, **given: Any) -> Settings:
    return settle(SettingSources("train", given, {}, folder), job)[1].resolve()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"staleness": 3}, "staleness is for mode async, and the mode is sync"),
        ({"staleness": 3, "mode": "rounds"}, "staleness is for mode async, and the mode is rounds"),
        ({"evaluate_every": 5}, "evaluate-every is for evaluations, and the job has none"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(
    tmp_path: Path, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        settled(make(), tmp_path, **given)
    assert caught.value.fix.startswith("leave it out, or ")


def test_a_setting_that_the_job_needs_or_that_a_file_has_is_used(tmp_path: Path) -> None:
    assert settled(make(settings={"mode": "async"}), tmp_path, staleness=3).staleness == 3
    assert settled(make(evaluate=lambda model: {"loss": 1.0}), tmp_path, evaluate_every=5).evaluate_every == 5
    own = make(validation=jobs.data, measure=lambda model, batch: {"loss": 1.0})
    assert settled(own, tmp_path, evaluate_every=5).evaluate_every == 5
    # A file may be for several jobs and modes.
    (tmp_path / "w5xde.toml").write_text("staleness = 3\nevaluate-every = 5\n", encoding="utf-8")
    assert settled(make(), tmp_path).staleness == 3


@pytest.mark.parametrize(
    ("wrong", "sentence", "fix"),
    [
        (w5xde.SaveBest("loss"), "callbacks is a SaveBest, not a list", "callbacks=[…]"),
        (None, "callbacks is a NoneType, not a list", "callbacks=[…]"),
        ([w5xde.SaveBest], "the callback SaveBest is a class", "callbacks=[SaveBest(…)]"),
        (["SaveBest"], "a str is no callback", "w5xde.Callback"),
    ],
)
def test_callbacks_that_are_no_list_of_objects_are_refused(
    tmp_path: Path, wrong: Any, sentence: str, fix: str
) -> None:
    given: dict[str, Any] = {"nodes": 0, "runs": str(tmp_path), "log": "silent"}
    for start in (
        lambda: w5xde.train(make(), callbacks=wrong, **given),
        lambda: w5xde.train(make(callbacks=lambda: wrong), **given),
        lambda: w5xde.serve(make(), callbacks=wrong, **given),
        lambda: w5xde.join("w5", make(), callbacks=wrong),
    ):
        with pytest.raises(UsageError, match=sentence) as caught:
            start()
        assert caught.value.code == "W5-260"
        assert fix in caught.value.fix
    assert not list(tmp_path.iterdir())
