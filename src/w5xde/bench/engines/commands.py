"""The contestants as commands: how each is started, watched while it makes steps, and ended.

Each run has a folder of its own, in which its command runs: so no settings file of the user is read. Computes
no figures.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from w5xde.bench.engines.clusters import ADDRESS_VARIABLE
from w5xde.bench.engines.ray_train import TASK, VARIABLES, WORKER, TrainTask
from w5xde.bench.engines.step_times import StepMoment, StepReader, complete_at
from w5xde.bench.engines.timed_jobs import ENOUGH, STEPS
from w5xde.bench.jobs import SEED
from w5xde.bench.measure.processes import end_process
from w5xde.errors import TrainingError

LOOK_SECONDS = 0.05
# Dearer: all processes of the machine are looked at.
LOOK_SECONDS_AT_PROCESSES = 0.5
# How long a run may take to its first step, to be complete, to go on after a loss, and to end: a busy machine
# loads torch in every worker.
PATIENCE_SECONDS = 300.0
LINES_SHOWN = 5
RUN = "bench"
_RAY_TRAIN = "from w5xde.bench.engines.ray_train import main; main()"


@dataclass(frozen=True, slots=True)
class Contestant:
    """How a job is trained, and by which processes."""

    name: str
    # Makes the words for the interpreter; may write files to the folder of the run.
    words: Callable[[TrainTask, Path], list[str]]
    # The processes of the workers that are there, each of which is the one that its engine minds.
    workers: Callable[[Path], list[int]]
    is_ours: bool = True


def _our_words(task: TrainTask, folder: Path, *more: str) -> list[str]:
    every = f"{task.checkpoint_steps}steps" if task.checkpoint_steps else "off"
    flags = {
        "mode": "sync",
        "nodes": task.workers,
        "batch-size": task.batch_size,
        "batches-per-step": task.workers,
        "epochs": 10**6,
        "seed": SEED,
        "threads": 1,
        "devices": "cpu",
        "checkpoint-every": every,
        "runs": folder / "runs",
        "name": RUN,
    }
    words = [f"--{flag}={value}" for flag, value in flags.items()]
    return ["-m", "w5xde", "train", f"w5xde.bench.engines.timed_jobs:{task.job}", *words, *more]


def _our_words_on_ray(task: TrainTask, folder: Path) -> list[str]:
    return _our_words(task, folder, "--engine=ray")


def _ray_train_words(task: TrainTask, folder: Path) -> list[str]:
    (folder / TASK).write_bytes(msgspec.json.encode(task))
    return ["-c", _RAY_TRAIN]


def _our_workers(folder: Path) -> list[int]:
    """The actors that mind the commands of nodes, which name the folder of the run."""
    found = set()
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = each.cmdline()
            if "join" in words and any(str(folder) in word for word in words):
                found.add(each.ppid())
    # A node may have processes of its own, with the same words.
    return sorted(pid for pid in found if "ray::" in " ".join(_words(pid)))


def _words(pid: int) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).cmdline())
    return []


def _ray_train_workers(folder: Path) -> list[int]:
    """By rank: the first one notes the steps."""
    found = []
    for file in sorted(folder.glob(WORKER.format("*"))):
        # One that is being written is read the next time.
        with contextlib.suppress(ValueError):
            found.append(int(file.read_text(encoding="ascii")))
    return [pid for pid in found if psutil.pid_exists(pid)]


ON_RAY = Contestant("w5xde on Ray", _our_words_on_ray, _our_workers)
LOCAL = Contestant("w5xde, local pool", _our_words, lambda folder: [])
RAY_TRAIN = Contestant("Ray Train", _ray_train_words, _ray_train_workers, is_ours=False)


class EngineRun:
    """A run of a contestant, while its command runs."""

    def __init__(self, contestant: Contestant, task: TrainTask, folder: Path, address: str) -> None:
        self.folder = folder
        self.task = task
        self._contestant = contestant
        self._reader = StepReader(folder / STEPS)
        self._output = folder / "output.txt"
        words = contestant.words(task, folder)
        with self._output.open("wb") as output:
            self.began_at = time.time()
            self._process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env={**os.environ, **VARIABLES, ADDRESS_VARIABLE: address},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the benchmark, which ends the command.
                start_new_session=True,
            )

    def moments(self) -> list[StepMoment]:
        """The steps so far."""
        return self._reader.read()

    def workers(self) -> list[int]:
        """The processes of the workers that are there."""
        return self._contestant.workers(self.folder)

    def wait_for(
        self, is_so: Callable[[list[StepMoment]], Any], what: str, look_seconds: float = LOOK_SECONDS
    ) -> None:
        """Wait until something is so, by the steps; an error if the command ends before, or it takes long."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so(self.moments()):
            if self._process.poll() is not None:
                raise self._failure(f"ended with code {self._process.returncode} before any {what}")
            if time.monotonic() > deadline:
                raise self._failure(f"had no {what} in {PATIENCE_SECONDS:.0f} s")
            time.sleep(look_seconds)

    def wait_until_replaced(self, pid: int) -> None:
        """Wait until another process has the place of a worker that was killed, and works."""

        def is_replaced(moments: list[StepMoment]) -> bool:
            workers = self.workers()
            return len(workers) >= self.task.workers and pid not in workers

        self.wait_for(is_replaced, "worker in place of the killed one", LOOK_SECONDS_AT_PROCESSES)
        replaced_at = time.time()
        self.wait_for(
            lambda moments: complete_at(
                [each for each in moments if each.at > replaced_at], self.task.workers
            ),
            "step of all workers",
        )

    def kill_worker(self) -> tuple[int, float]:
        """Kill the last worker, as a host does that runs out of memory; returns its process, and when."""
        workers = self.workers()
        if len(workers) < self.task.workers:
            raise self._failure(f"has {len(workers)} of {self.task.workers} workers on this machine")
        os.kill(workers[-1], signal.SIGKILL)
        return workers[-1], time.time()

    def ends(self) -> bool:
        """Let the run end; returns whether its command did so in time, and without an error."""
        (self.folder / ENOUGH).touch()
        try:
            return self._process.wait(PATIENCE_SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False

    def _failure(self, what: str) -> TrainingError:
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        last = " | ".join(line.strip() for line in lines[-LINES_SHOWN:] if line.strip())
        return TrainingError(f"{self._contestant.name} {what}", code="W5-320", why=last)

    def failure(self) -> TrainingError:
        """The error of a command that did not end in order."""
        return self._failure(f"did not end in order (code {self._process.poll()})")

    def close(self) -> None:
        """End the command if it still runs; on a cluster its workers end with it."""
        if self._process.poll() is None:
            end_process(self._process.pid)
            # The process is reaped; this only tells the object so.
            self._process.poll()


@contextlib.contextmanager
def run_of(contestant: Contestant, task: TrainTask, runs: Path, address: str) -> Iterator[EngineRun]:
    """Start a run in a new folder below this one; what still runs at the end is killed."""
    number = 1 + sum(each.is_dir() for each in runs.iterdir())
    folder = runs / f"{number:03}-{task.job}-{contestant.name.replace(', ', '-').replace(' ', '-')}"
    folder.mkdir()
    run = EngineRun(contestant, task, folder, address)
    try:
        yield run
    finally:
        run.close()
