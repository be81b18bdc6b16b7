"""All exceptions of w5xde, by whose fault they are.

    W5xdeError
    ├── UserError              refused before a socket opens, with advice
    │   ├── UsageError           a flag, a variable or w5xde.toml (exit 2)
    │   ├── JobError             the job file, model, data, loss or optimizer (exit 20)
    │   └── StorageError         the run folder (exit 40)
    │       └── BusyError          another process has it for the moment: try again (exit 75)
    ├── JoinError              no coordinator answers, or it refuses (exit 10)
    ├── ProtocolError
    │   ├── LocalProtocolError   we tried to send an illegal message: our bug, stop
    │   └── RemoteProtocolError  the peer sent one: close that connection, carry on
    ├── TrainingError          training cannot go on (exit 30)
    └── ClusterError           the engine's cluster is gone; the run can go on elsewhere (exit 75)

A node that dies is not an exception but an event, and so is an interrupt of a run (exit 75).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from w5xde.explanations import EXPLANATIONS
from w5xde.sanitize import harmless

# The exit code of a command that was stopped, or whose node left, before the run was over: try again.
NOT_OVER = 75


class W5xdeError(Exception):
    """An error that a person can act on: what happened, why, and how to fix it."""

    exit_code = 70

    def __init__(self, what: str, *, code: str = "W5-700", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.why = why
        self.fix = fix
        # For Python's traceback, which shows no other part than `what`.
        self.add_note("\n".join([f"  code: {code}", *self.lines()[1:]]))

    def lines(self) -> list[str]:
        """The message for the terminal: one line for each part."""
        parts = [f"error[{self.code}]: {self.what}"]
        if self.why:
            parts.append(f"  why: {self.why}")
        if self.fix:
            parts.append(f"  fix: {self.fix}")
        # A newer coordinator may refuse us with a code that this version does not know.
        if self.code in EXPLANATIONS:
            parts.append(f"  more: w5xde explain {self.code}")
        return [harmless(part) for part in parts]


class UserError(W5xdeError):
    """The user asked for something impossible; nothing has been started yet."""

    exit_code = 2


class UsageError(UserError):
    """A setting is unknown, malformed or contradicts another."""


class JobError(UserError):
    """The job cannot be trained as it is written."""

    exit_code = 20


class StorageError(UserError):
    """The run folder cannot be used."""

    exit_code = 40


class BusyError(StorageError):
    """The run folder is in use, perhaps only for a moment: the same command may succeed later."""

    exit_code = NOT_OVER


class JoinError(W5xdeError):
    """This machine cannot join: no coordinator answers, or it refuses."""

    exit_code = 10


class ClusterError(W5xdeError):
    """The cluster that placed the processes of a run is gone, or has forgotten them: try again."""

    exit_code = NOT_OVER


class ProtocolError(W5xdeError):
    """Bytes or messages that break the protocol."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; only its connection is closed."""

    exit_code = 10


class TrainingError(W5xdeError):
    """Training cannot go on with any nodes."""

    exit_code = 30
    # As `Result.summary`; empty if the run broke before it could write one.
    summary: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def because(cls, reason: str, summary: Mapping[str, Any]) -> TrainingError:
        """The error for a reason that the core or the learner gave, with advice."""
        diverged = any(word in reason for word in ("finite", " nan", " inf"))
        run = summary.get("run", "RUN")
        fix = f"correct what the message names, and go on with  w5xde train --resume {run}"
        if diverged:
            fix = "lower the learning rate, or clip the gradient with --clip-norm 1"
        elif "is not complete" in reason:
            fix = (
                "mend the data or the loss and go on with --resume, or leave them out with --skip-bad-batches"
            )
        error = cls(reason, code="W5-311", fix=fix)
        error.summary = summary
        return error
