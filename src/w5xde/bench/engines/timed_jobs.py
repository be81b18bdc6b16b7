"""The jobs of `bench engines` as `w5xde train` gets them: those of `jobs`, with a callback that notes steps.

The callback works in the folder of the command, which the benchmark makes for each run: it writes the moments
of the steps there, and ends the run when the benchmark has put a file there that says so.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from w5xde.bench import jobs
from w5xde.bench.engines.step_times import StepMoment
from w5xde.callbacks import Callback
from w5xde.callbacks.status import RunStatus
from w5xde.learn.job.job import Job

# Files in the folder of a run: the moments of its steps; and, when it has lasted long enough, an empty one.
STEPS, ENOUGH = "steps.txt", "enough"


class StepNotes(Callback):
    """Notes each step with the nodes that have computed something, and ends the run when it is told to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._enough = folder / ENOUGH

    def on_start(self, run: RunStatus) -> None:
        # Added to: a coordinator that was started again goes on with it.
        self._file = (self._folder / STEPS).open("a", encoding="ascii", buffering=1)

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        workers = sum(node.batches > 0 for node in run.nodes)
        self._file.write(StepMoment(step, time.time(), workers).line())
        if self._enough.exists():
            run.stop("measured")

    def on_end(self, run: RunStatus, summary: dict[str, object]) -> None:
        self._file.close()


def _timed(job: Job) -> Job:
    return replace(job, callbacks=lambda: [StepNotes(Path.cwd())])


# Without the callback, for contestants that have none.
JOBS = {"seed": jobs.seed, "text": jobs.text, "large": jobs.large}
seed, text, large = (_timed(job) for job in JOBS.values())
