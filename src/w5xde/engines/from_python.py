"""`w5xde.train(job, engine=…)`: finds the file of a job that a program made, and brings its model back."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from w5xde.callbacks import Callback
from w5xde.engines.start import Show, ticket_of, train_on_engine
from w5xde.errors import JobError, UsageError
from w5xde.learn.job.job import Job
from w5xde.learn.job.named_job import load_named
from w5xde.runs import read_manifest
from w5xde.runtime.durable.again import FinishedRun
from w5xde.runtime.telemetry.result import Result
from w5xde.setting_sources import SettingSources


class _Silence:
    """Shows nothing."""

    def say(self, text: str) -> None:
        pass

    def show_result(self, result: FinishedRun) -> None:
        pass


def train_elsewhere(
    job: Job | str, sources: SettingSources, callbacks: Iterable[Callback], show: Show, *, is_shown: bool
) -> Result:
    """Train a job on the engine that the settings name; returns when its run has ended."""
    if list(callbacks):
        raise UsageError(
            "callbacks are for runs of this process, and an engine trains elsewhere",
            code="W5-610",
            fix="give them to the job, which is loaded there:  Job(…, callbacks=lambda: [...])",
        )
    ended = train_on_engine(reference_of(job), sources, show if is_shown else _Silence())
    seed = int(read_manifest(ended.folder)["settings"]["seed"])
    file = ticket_of(ended.folder)
    ticket = file.read_text().strip() if file.exists() else ""
    model = ended.load_model(load_named(job).job, seed)
    return Result(model, ended.summary, ended.folder, ended.reason, ticket)


def reference_of(job: Job | str) -> str:
    """Where commands find a job; one that a program made must be at the top level of the program's file."""
    if isinstance(job, str):
        return job
    # The program itself comes first: modules that it imports its job from know it too.
    modules = [sys.modules["__main__"], *sys.modules.values()]
    for module in modules:
        file = getattr(module, "__file__", None)
        names = [name for name, value in vars(module).items() if value is job] if file else []
        if names and str(file).endswith(".py"):
            return f"{file}:{names[0]}"
    raise JobError(
        "this job is in no file, and an engine starts commands that load it from one",
        code="W5-609",
        fix="write  job = w5xde.Job(…)  at the top level of a file, and train it there under"
        "  if __name__ == '__main__':",
    )
