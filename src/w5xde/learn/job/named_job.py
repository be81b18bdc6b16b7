"""A job with its names: where it was found, what it is called, and with which versions its files run.

Loads jobs by name for coordinators and nodes. Knows nothing of how a job is trained.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from w5xde.errors import JobError, UsageError
from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.learn.job.code.origin import JobOrigin
from w5xde.learn.job.code.packages import versions_for
from w5xde.learn.job.job import Job, load_job, own_settings
from w5xde.setting_sources import SettingSources

# The name of a job that was made by a program, and has no file that could be named.
FROM_PYTHON = "JOB"


def stem_of(reference: str) -> str:
    """The part of a run's name that comes from its job: `train` of `train.py:small`."""
    place = reference.rpartition(":")[0] or reference
    return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2].lower()


@dataclass(slots=True)
class NamedJob:
    """A job, and its names: as the user wrote it, in the run's name, and from any folder."""

    job: Job
    reference: str
    # The code that the coordinator sent, if the job comes from there.
    code: CodeBundle | None = None
    stem: str = field(init=False)
    place: str = field(init=False)
    # The job file; None if the job is in a module or was made by a program.
    file: Path | None = field(init=False)

    def __post_init__(self) -> None:
        place = self.reference.rpartition(":")[0] or self.reference
        is_file = place.endswith(".py")
        self.file = Path(place).absolute() if is_file else None
        self.stem = stem_of(self.reference)
        self.place = f"{self.file}{self.job_name}" if is_file else self.reference

    @property
    def job_name(self) -> str:
        """The name of the job in its file, with its colon; empty if none was given."""
        return self.reference.removeprefix(self.reference.rpartition(":")[0] or self.reference)

    @property
    def origin(self) -> JobOrigin:
        """Where the job comes from, with the versions of what is installed here."""
        return JobOrigin(self.code.sha256 if self.code is not None else "", versions_for(self.sources))

    @property
    def sources(self) -> list[bytes]:
        """The files that make the job, as far as they are known."""
        if self.code is not None:
            return list(self.code.files.values())
        module = sys.modules.get(self.reference.partition(":")[0])
        file = self.file or getattr(module, "__file__", None)
        try:
            return [Path(file).read_bytes()] if file is not None else []
        except OSError:
            return []


def load_named(job: Job | str, name: str = FROM_PYTHON) -> NamedJob:
    """Load the job that a reference names; `name` is the name of a `Job` object."""
    if isinstance(job, Job):
        return NamedJob(job, name)
    if not isinstance(job, str):
        raise JobError(
            f"the job is a {type(job).__name__}, neither a w5xde.Job nor the name of one",
            code="W5-206",
            fix='give  w5xde.Job(model=…, data=…, loss=…, optimizer=…),  or name its file: "train.py"',
        )
    return NamedJob(load_job(job), job)


def settle(sources: SettingSources, job: Job | str) -> tuple[NamedJob, SettingSources]:
    """Load a job, and let its own settings come in after those of all other sources."""
    # A mistake in the others is refused before the job's file is loaded, which may take seconds.
    sources.resolve()
    named = load_named(job)
    sources = sources.with_job(own_settings(named.job))
    _refuse_idle(sources, named.job)
    return named, sources


def _refuse_idle(sources: SettingSources, job: Job) -> None:
    """Refuse arguments that would do nothing. A file or a job may have settings for several runs."""
    given, mode = sources.arguments, sources.resolve().mode
    if given.get("staleness") is not None and mode != "async":
        raise UsageError(
            f"staleness is for mode async, and the mode is {mode}",
            code="W5-210",
            fix="leave it out, or use mode async",
        )
    if given.get("evaluate_every") is not None and job.evaluate is None and job.validation is None:
        raise UsageError(
            f"evaluate{'_' if sources.in_python else '-'}every is for evaluations, and the job has none",
            code="W5-210",
            fix="leave it out, or let the job evaluate:  Job(…, evaluate=lambda model: {'loss': …})",
        )
