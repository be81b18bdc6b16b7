"""`w5xde deploy slurm`: what its files say and refuse. tests/engines/slurm runs them on a real Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.printed import printed
from w5xde.cli.main import main
from w5xde.deploy.slurm.command import time_seconds

FILES = ("pool.sbatch", "nodes.sbatch", "submit.sh")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("job = 1\n")
    return tmp_path


def deploy(*words: str, out: str = "files") -> Path:
    """Write the files, for a Slurm of one host: tests run in a folder for temporary files."""
    assert main(["deploy", "slurm", "train.py", "--one-host", "--out", out, *words]) == 0
    return Path(out)


def options(file: Path) -> list[str]:
    """What sbatch reads in a file: the lines before the first command."""
    lines = file.read_text().splitlines()
    end = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    return [line.removeprefix("#SBATCH ") for line in lines[:end] if line.startswith("#SBATCH ")]


def command(file: Path) -> list[str]:
    """The words that srun starts."""
    line = next(line for line in file.read_text().splitlines() if line.startswith("srun "))
    words = shlex.split(line)
    return words[words.index("w5xde") :]


def run_script(file: Path, **variables: str) -> tuple[int, str]:
    """Run a job's script without Slurm; returns its exit code and what it says."""
    done = subprocess.run(
        ["bash", str(file)], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_every_script_is_valid_bash_also_with_odd_paths(folder: Path) -> None:
    odd = folder / "it's a $HOME; `folder`"
    odd.mkdir()
    os.chdir(odd)
    Path("train.py").write_text("job = 1\n")
    files = deploy("--setup", "module load python", "--sbatch=--qos=low", "--", "--epochs", "5")
    for name in FILES:
        subprocess.run(["bash", "-n", str(files / name)], check=True)
    assert value(command(files / "pool.sbatch"), "serve") == str(odd / "train.py")
    assert value(command(files / "pool.sbatch"), "--runs") == str(odd / "runs")
    assert os.access(files / "submit.sh", os.X_OK)


def test_the_coordinator_is_a_job_that_goes_on_with_its_run() -> None:
    file = deploy("--name", "tuesday", "--partition", "long", "--", "--epochs", "5") / "pool.sbatch"
    found = options(file)
    assert {"--requeue", "--open-mode=append", "--dependency=singleton", "--partition=long"} <= {*found}
    assert {"--job-name=w5-tuesday-pool", "--cpus-per-task=2", "--signal=TERM@120"} <= {*found}
    assert not any(word.startswith("--time") for word in found)
    words = command(file)
    assert (value(words, "--name"), value(words, "--resume"), value(words, "--epochs")) == (
        "tuesday",
        "auto",
        "5",
    )
    place = str(Path("runs/tuesday.slurm").absolute())
    assert value(words, "--ticket-file") == f"{place}/ticket"
    assert value(words, "--identity") == f"{place}/identity"


def test_the_nodes_are_an_array_that_waits_for_the_ticket_file() -> None:
    chosen = ["--nodes", "64", "--at-most", "32", "--partition", "long", "--nodes-partition", "preempt,low"]
    more = ["--cpus-per-node", "8", "--time", "2-12", "--account", "physics", "--nodes-sbatch=--mem=8G"]
    files = deploy(*chosen, *more, "--sbatch=--qos=low", "--warning", "90", "--", "--threads", "4")
    found = options(files / "nodes.sbatch")
    assert {"--array=1-64%32", "--partition=preempt,low", "--cpus-per-task=8", "--time=2-12"} <= {*found}
    assert {"--account=physics", "--mem=8G", "--qos=low", "--signal=TERM@90", "--requeue"} <= {*found}
    assert "--mem=8G" not in options(files / "pool.sbatch")
    words = command(files / "nodes.sbatch")
    assert words[1:4] == [
        "join",
        f"@{Path('runs/train.slurm/ticket').absolute()}",
        str(Path("train.py").absolute()),
    ]
    # Eight cores are two processes of four threads.
    assert value(words, "--nodes") == "2"


def test_a_node_with_gpus_runs_a_process_for_each() -> None:
    file = deploy("--gpus-per-node", "4", "--cpus-per-node", "16") / "nodes.sbatch"
    assert "--gres=gpu:4" in options(file)
    assert value(command(file), "--nodes") == "4"
    assert "--array=1-2" in options(file)


def test_all_files_are_printed_without_out() -> None:
    shown = printed("slurm", "train.py", "--one-host")
    assert [line for line in shown.splitlines() if line.startswith("# =====")] == [
        f"# ===== {name} =====" for name in FILES
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("12:00:01", 43201),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("0-00:05:00", 300),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert time_seconds(text) == seconds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--partition", "gpu; rm -r ~"], "is not a name that Slurm knows"),
        (["--nodes-partition", "a b"], "is not a name that Slurm knows"),
        (["--account", "$USER"], "is not a name that Slurm knows"),
        (["--sbatch=--comment=a b"], "--qos=low"),
        (["--sbatch=--mail-user=me\n#SBATCH --array=1"], "--qos=low"),
        (["--sbatch=--array=1-9"], "give --nodes and --at-most"),
        (["--nodes-sbatch=--time=9"], "give --time"),
        (["--setup", "a\nb"], "is not one line"),
        (["--wait", "soon"], "30s, 10m, 1h or forever"),
        (["--nodes", "0"], "whole number"),
        (["--time", "soon"], "W5-620"),
        (["--time", "2"], "error[W5-620]: --time 2 is 120 s"),
        (["--", "--ticket-file", "mine"], "W5-632"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "slurm", "train.py", "--one-host", *words]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert "fix: " in found.err
    assert found.out == ""


def test_folders_that_each_host_has_for_itself_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "slurm", "train.py", "--runs", "/tmp/runs"]) == 2
    assert (
        "error[W5-621]: --runs is /tmp/runs, and every host has a /tmp of its own" in capsys.readouterr().err
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        job = Path(folder, "train.py")
        job.write_text("job = 1\n")
        assert main(["deploy", "slurm", str(job), "--runs", "/shared"]) == 2
    assert "error[W5-621]: the job file is " in capsys.readouterr().err


def test_a_job_says_that_its_host_does_not_share_the_folder() -> None:
    files = deploy()
    for name, variables in (("pool.sbatch", {"SLURM_JOB_ID": "7"}), ("nodes.sbatch", _element())):
        code, said = run_script(files / name, **variables)
        assert code == 2
        assert "error[W5-621]: there is no " in said
        assert "train.slurm/submitted" in said


def test_a_job_says_that_its_host_has_no_w5xde(folder: Path) -> None:
    files = deploy("--setup", "PATH=/nowhere:/usr/bin:/bin")
    Path("runs/train.slurm").mkdir(parents=True)
    Path("runs/train.slurm/submitted").touch()
    code, said = run_script(files / "nodes.sbatch", **_element())
    assert code == 2
    assert "error[W5-622]: there is no command w5xde here" in said


def test_an_element_that_starts_after_the_end_leaves_at_once(folder: Path) -> None:
    files = deploy()
    _pretend(folder, 1)
    Path("runs/train.slurm/over").touch()
    code, said = run_script(files / "nodes.sbatch", PATH=f"{folder}/bin:{os.environ['PATH']}", **_element())
    assert (code, said.endswith("the run is over\n")) == (0, True)


@pytest.mark.parametrize(
    ("ended", "told", "asks", "says"),
    [
        (75, False, True, "stopped before the run was over; queued again"),
        (75, True, False, "stopped before the run was over; Slurm ended this job"),
        (137, False, True, "killed by signal 9; queued again"),
        (137, True, False, "killed by signal 9; Slurm ended this job"),
        (20, False, False, "exit code 20: trying again would not help"),
    ],
)
def test_an_element_asks_for_another_start_only_if_that_helps(
    folder: Path, ended: int, told: bool, asks: bool, says: str
) -> None:
    files = deploy()
    _pretend(folder, ended, told=told)
    code, said = run_script(files / "nodes.sbatch", PATH=f"{folder}/bin:{os.environ['PATH']}", **_element())
    assert code == ended
    assert says in said
    asked = folder / "requeued"
    # By its place in the array: the number of a job may be that of all elements.
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7_3\n" if asks else "")


def test_an_element_that_is_killed_again_and_again_is_given_up(folder: Path) -> None:
    files = deploy()
    _pretend(folder, 137)
    said = [
        run_script(files / "nodes.sbatch", PATH=f"{folder}/bin:{os.environ['PATH']}", **_element())[1]
        for _ in range(6)
    ]
    assert [("queued again" in each) for each in said] == [True] * 5 + [False]
    assert "more than 5 times: given up" in said[-1]


def _element(**more: Any) -> dict[str, str]:
    return {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "7", **more}


def _pretend(folder: Path, ended: int, *, told: bool = False) -> None:
    """Put commands of Slurm into a folder: an srun that ends so, a scontrol that notes what it is asked."""
    (folder / "runs" / "train.slurm" / "arrays").mkdir(parents=True)
    (folder / "runs" / "train.slurm" / "submitted").touch()
    (folder / "bin").mkdir()
    # What scancel does: it tells the shell too.
    tell = "kill -TERM $PPID\n" if told else ""
    for name, text in {
        "srun": f"{tell}exit {ended}",
        "scontrol": f'echo "$@" >>{folder}/requeued',
        "w5xde": "exit 1",
    }.items():
        file = folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
