"""Starts a run on an engine: names it, writes the words of its commands, and reads its result at the end.

Loads no torch: the job is loaded where the coordinator runs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Protocol

from w5xde.config import Settings
from w5xde.engines.words import join_words, passed_on, serve_words
from w5xde.errors import NOT_OVER, ClusterError, JobError, StorageError, TrainingError, UsageError
from w5xde.learn.job.named_job import stem_of
from w5xde.runs import MANIFEST, free_name, read_manifest
from w5xde.runtime.durable.again import FinishedRun, find_finished
from w5xde.sanitize import harmless
from w5xde.setting_sources import SettingSources
from w5xde.specs.engine_settings import node_range, parse_labels


class Show(Protocol):
    """Tells the user lines, and a result."""

    def say(self, text: str) -> None: ...

    def show_result(self, result: FinishedRun) -> None: ...


def train_on_engine(job: str, sources: SettingSources, show: Show) -> FinishedRun:
    """Train a job on the engine that the settings name, until its run has ended; returns the result.

    Raises the error of a command that failed there. The result is shown, too: by the coordinator's command.
    """
    settings = sources.resolve()
    file = _file_of(job)
    if sources.arguments.get("ticket_file") is not None:
        raise UsageError(
            f"ticket-file is for runs of this machine, and this one is on {settings.engine}",
            code="W5-210",
            fix="leave it out: the ticket of such a run is in RUNS/.identity/RUN/ticket",
        )
    runs = Path(settings.runs).absolute()
    run = settings.name or free_name(runs, f"{harmless(stem_of(job))}-{time.strftime('%Y%m%d-%H%M%S')}")
    if (finished := find_finished(settings)) is not None:
        show.say(f"run {run} is complete: nothing is left to do")
        show.show_result(finished)
        return finished
    if settings.resume is None and (runs / run).exists():
        raise StorageError(
            f"there is a run named {run} already",
            code="W5-403",
            fix=f"go on with it by  --resume {run} , or choose another --name",
        )
    try:
        status = _run_on_ray(job, file, (runs, run), settings, sources, show)
    except TrainingError as error:
        error.summary = result_of(runs / run).summary
        raise
    try:
        return result_of(runs / run)
    except ClusterError:
        if status == NOT_OVER:
            # Stopped before there was anything to be told.
            raise KeyboardInterrupt from None
        raise


def ticket_of(folder: Path) -> Path:
    """The file with the ticket of a run on an engine: beside its key, on the storage that all hosts see."""
    return folder.parent / ".identity" / folder.name / "ticket"


def _file_of(job: str) -> str:
    """The file of a job; empty if it is in a module."""
    place = job.rpartition(":")[0] or job
    if not place.endswith(".py"):
        return ""
    if not Path(place).is_file():
        raise JobError(
            f"there is no job file {place}",
            code="W5-206",
            fix="give the path of a Python file that makes a w5xde.Job",
        )
    return place


def require_ray(extra: str) -> None:
    """Refuse to go on without Ray; `extra` is the one of w5xde that brings it."""
    try:
        import ray  # noqa: F401 - only to see whether it is there
    except ImportError as error:
        raise UsageError(
            f"Ray cannot be imported: {error}",
            code="W5-600",
            why="it is an extra, which this environment lacks",
            fix=f"pip install 'w5xde[{extra}]'",
        ) from None


def _run_on_ray(
    job: str,
    file: str,
    place: tuple[Path, str],
    settings: Settings,
    sources: SettingSources,
    show: Show,
) -> int:
    require_ray("ray")
    from w5xde.engines.ray.actors import RunPlan
    from w5xde.engines.ray.cluster import Needs
    from w5xde.engines.ray.driver import RayTask, key_of, run_on_ray

    runs, run = place
    ticket = ticket_of(runs / run)
    arguments = dict(sources.arguments)
    plan = RunPlan(
        key_of(runs, run),
        str(Path.cwd()),
        [
            "serve", job, "--name", run, "--resume", "auto", "--runs", str(runs), "--json", "--nodes", "0",
            "--identity", str(ticket.parent), "--ticket-file", str(ticket), *serve_words(arguments),
        ],
        [
            "join", f"@{ticket}", job, "--wait", "forever", "--json",
            "--nodes", str(max(1, int(settings.gpus_per_node))), *join_words(arguments),
        ],
        [
            "ticket", "new", run, "--runs", str(runs), "--lifetime", "never", "--uses", "any",
            "--label", settings.engine, "--out", str(ticket),
        ],
        str(ticket),
        passed_on(os.environ),
    )  # fmt: skip
    return run_on_ray(
        RayTask(
            plan,
            runs / run,
            file,
            node_range(settings.nodes),
            Needs(
                settings.cpus_per_node or float(settings.threads),
                settings.gpus_per_node,
                parse_labels(settings.labels),
            ),
            goes_on=sources.is_same_again,
            advertises=arguments.get("advertise") is not None,
            say=show.say,
        )
    )


def result_of(folder: Path) -> FinishedRun:
    """The result of a run that has ended, as its manifest has it."""
    try:
        manifest: dict[str, Any] = read_manifest(folder)
        return FinishedRun(folder, manifest["result"], str(manifest["reason"]))
    except (StorageError, KeyError) as error:
        raise ClusterError(
            f"{folder / MANIFEST} has no result of this run",
            code="W5-607",
            why=str(error),
            fix="go on with the same command, with --name and --resume auto",
        ) from error
