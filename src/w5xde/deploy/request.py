"""What the user wants to deploy: a job, the name of its run, and flags for `w5xde serve`.

Reads the job file and does not run it: what it imports may be installed only where it will run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from w5xde.cli.parser import build_parser
from w5xde.config import SHOWN_NAME, Settings
from w5xde.errors import JobError, UsageError
from w5xde.setting_sources import SettingSources

# Flags of `serve` that the files decide, and what to do instead.
_DECIDED = {
    "name": "give --name before the --",
    "resume": "the files say  --resume auto  already",
    "runs": "give --runs (k8s: --storage) before the --",
    **dict.fromkeys(("host", "port", "advertise"), "the files say where the coordinator listens"),
    **dict.fromkeys(
        ("ticket_file", "ticket", "known_ticket", "identity"), "the files say where identity and ticket lie"
    ),
    **dict.fromkeys(("insecure", "new_identity"), "nodes know the coordinator by its identity"),
    **dict.fromkeys(("json", "log", "with_parent"), "an engine shows what its processes print"),
}


@dataclass(frozen=True, slots=True)
class DeployedJob:
    """The job: a file and perhaps a name in it, or a module that is installed where the job runs."""

    reference: str
    # None: a module, or a file that is elsewhere.
    file: Path | None

    @property
    def name(self) -> str:
        """The name of the job in its file, with its colon; empty if none was given."""
        return self.reference.removeprefix(self.reference.rpartition(":")[0] or self.reference)

    @property
    def stem(self) -> str:
        """What the run is called, if the user gives no name."""
        place = self.reference.removesuffix(self.name)
        return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]

    def at(self, folder: str) -> str:
        """The job as it is named where its file lies in this folder."""
        return self.reference if self.file is None else f"{folder}/{self.file.name}{self.name}"

    @property
    def place(self) -> str:
        """The job as it is named from any folder of this machine."""
        return self.reference if self.file is None else f"{self.file}{self.name}"


@dataclass(frozen=True, slots=True)
class DeployRequest:
    """A run to be deployed."""

    job: DeployedJob
    run: str
    # Flags of `w5xde serve`: how to train, and for how long.
    flags: tuple[str, ...] = ()
    # What --ship among them says: which modules beside the job file belong to it.
    ship: str | None = None
    # Torch threads of each process that computes.
    threads: int = 1

    def serve_words(self, job: str, runs: str, *more: str) -> list[str]:
        """The command of the coordinator: right for the first start and for every restart."""
        kept = ["--name", self.run, "--resume", "auto", "--runs", runs]
        return ["w5xde", "serve", job, *kept, *more, *self.flags]


def find_job(reference: str) -> DeployedJob:
    """The job that a user named; its file must be a Python program."""
    place = reference.rpartition(":")[0] or reference
    if not place.endswith(".py"):
        if "/" in place or Path(place).exists():
            raise JobError(f"{place} is not a Python file", code="W5-630", fix="give a file that ends in .py")
        return DeployedJob(reference, None)
    file = Path(place).absolute()
    try:
        ast.parse(file.read_bytes(), filename=place)
    except OSError as error:
        raise JobError(
            f"the job file {place} cannot be read: {error.strerror}",
            code="W5-630",
            fix="give the path of a Python file that has a w5xde.Job",
        ) from error
    except (SyntaxError, ValueError) as error:
        raise JobError(f"{place} is not a Python program: {error}", code="W5-630", fix="mend it") from error
    return DeployedJob(reference, file)


def make_request(job: str, name: str | None, flags: Sequence[str], *, is_here: bool = True) -> DeployRequest:
    """The request for what was typed; `flags` follow the `--`; `is_here`: the job is on this machine."""
    found = find_job(job) if is_here else DeployedJob(job, None)
    run = name or re.sub(r"[^A-Za-z0-9]+", "-", found.stem).strip("-").lower() or "run"
    if not SHOWN_NAME.match(run):
        raise UsageError(
            f"{run!r} is no name for a run",
            code="W5-631",
            why="it must be letters, digits, dots, dashes or underscores, at most 64",
            fix="--name tuesday",
        )
    settings = _checked_flags(job, flags)
    return DeployRequest(found, run, tuple(flags), settings.ship, settings.threads)


def _checked_flags(job: str, flags: Sequence[str]) -> Settings:
    """The settings that flags give; refuses what `w5xde serve` would refuse, and what the files decide."""
    given = vars(build_parser().parse_args(["serve", job, *flags]))
    del given["command"]
    for argument in ("job", "print_config", "help_all"):
        given.pop(argument, None)
    for setting, value in given.items():
        if value is not None and setting in _DECIDED:
            raise UsageError(
                f"the files decide --{setting.replace('_', '-')} themselves",
                code="W5-632",
                fix=_DECIDED[setting],
            )
    return SettingSources("serve", given).resolve()
