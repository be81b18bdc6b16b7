"""A run that the files of `w5xde deploy slurm` started on a Slurm, and what must be true of it at its end."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import w5xde
from tests.engines.slurm.rig import Slurm, wait_until
from tests.processes import JOBS, whole_lines
from w5xde.cli.main import main

NAME = "mine"
# 204 batches: two nodes take at least 51 s for them, and 5 s once `hurry` was called.
SETTINGS = {"epochs": 6, "batch_size": 6, "batches_per_step": 4}
BATCH_SECONDS = "0.05"


@functools.cache
def weights_of_one_process() -> str:
    """The hash of the weights that the job has without any cluster."""
    with tempfile.TemporaryDirectory() as runs:
        result = w5xde.train(f"{JOBS}:job", runs=runs, nodes=1, progress=False, **SETTINGS)
        return str(result.summary["weights_sha256"])


class DeployedRun:
    """The job `slow`, deployed into a folder; its jobs in Slurm are `pool` and the array `nodes`."""

    def __init__(self, slurm: Slurm, folder: Path, *flags: str) -> None:
        self._slurm = slurm
        self.folder = folder
        self._runs = folder / "runs"
        self._hurry_file = folder / "hurry"
        words = ["slurm", f"{JOBS}:slow", "--name", NAME, "--runs", str(self._runs), "--one-host"]
        # Every job fills a host, so that taking a host means one job.
        words += ["--coordinator-cpus", "1", *flags, "--out", str(folder / "files")]
        training = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
        assert main(["deploy", *words, "--", *training, "--checkpoint-every=5steps"]) == 0
        self.pool = self.nodes = ""

    def submit(self) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), self._slurm.variables["PATH"]])
        said = self._slurm.run(
            str(self.folder / "files" / "submit.sh"),
            cwd=self.folder,
            PATH=path,
            TEST_BATCH_SECONDS=BATCH_SECONDS,
            TEST_HURRY_FILE=str(self._hurry_file),
        )
        words = said.splitlines()[1].split()
        self.pool, self.nodes = words[words.index("scancel") + 1 :][:2]

    def element(self, number: int) -> str:
        return f"{self.nodes}_{number}"

    def log(self, job: str) -> str:
        """What a job has printed, at all its starts."""
        name = f"pool-{job}.log" if job == self.pool else f"node-{job}.log"
        file = self.folder / "files" / name
        return file.read_text(errors="replace") if file.exists() else ""

    def logs(self) -> str:
        files = sorted((self.folder / "files").glob("*.log"))
        return "\n".join(f"== {each.name}\n{each.read_text(errors='replace')}" for each in files)

    def wait_for(self, job: str, text: str, times: int = 1) -> None:
        """Wait until a job has printed a text so often."""
        wait_until(
            lambda: self.log(job).count(text) >= times,
            lambda: f"{job} did not print {text!r} {times} times\n{self._slurm.queue()}\n{self.logs()}",
        )

    def wait_until_joined(self, *numbers: int, times: int = 1) -> None:
        for number in numbers:
            self.wait_for(self.element(number), f"joined {NAME}", times)

    @property
    def run_folder(self) -> Path:
        return self._runs / NAME

    def step(self) -> int:
        lines = whole_lines(self.run_folder / "metrics.jsonl")
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step() >= step, lambda: f"still at step {self.step()}\n{self.logs()}")

    def hurry(self) -> None:
        self._hurry_file.touch()

    def finish(self) -> dict[str, Any]:
        """Let the run end: it must be right, and leave nothing."""
        self.hurry()
        assert self._slurm.wait_for_end(self.pool) == "COMPLETED", self.logs()
        self._slurm.wait_for_no_process()
        result: dict[str, Any] = json.loads((self.run_folder / "manifest.json").read_text())["result"]
        assert result["weights_sha256"] == weights_of_one_process()
        # 1 would mean that it is not clean.
        assert main(["audit", NAME, "--runs", str(self._runs)]) == 0
        return result
