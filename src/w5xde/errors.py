"""What can go wrong, and whose fault it was.

    W5xdeError
    ├── UserError              refused before a socket opens, with the sentence that fixes it
    │   ├── UsageError           a flag, a variable or w5xde.toml (exit 2)
    │   ├── JobError             the job file, model, data, loss or optimizer (exit 20)
    │   └── StorageError         the run folder (exit 40)
    ├── JoinError              nobody answers, or the coordinator said no (exit 10)
    ├── ProtocolError
    │   ├── LocalProtocolError   we tried to say something illegal: our bug, stop
    │   └── RemoteProtocolError  the peer did: close that peer, carry on
    └── TrainingError          training itself cannot go on (exit 30)

A node that dies is not an exception but an event, and a lease that is overdue is a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from w5xde.explanations import EXPLANATIONS
from w5xde.sanitize import harmless


class W5xdeError(Exception):
    """An error a person can act on: what happened, why, and what to do about it."""

    exit_code = 70

    def __init__(self, what: str, *, code: str = "W5-700", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.why = why
        self.fix = fix

    def lines(self) -> list[str]:
        """The message as it is shown, one line for each part that there is."""
        parts = [f"error[{self.code}]: {self.what}"]
        if self.why:
            parts.append(f"  why: {self.why}")
        if self.fix:
            parts.append(f"  fix: {self.fix}")
        # A coordinator that is newer than we are may have refused us with a code that is not known here.
        if self.code in EXPLANATIONS:
            parts.append(f"  more: w5xde explain {self.code}")
        return [harmless(part) for part in parts]


class UserError(W5xdeError):
    """Something the user asked for cannot be right; nothing has been started yet."""

    exit_code = 2


class UsageError(UserError):
    """A setting is unknown, malformed or contradicts another."""


class JobError(UserError):
    """The job cannot be trained as it is written."""

    exit_code = 20


class StorageError(UserError):
    """The run folder cannot be used."""

    exit_code = 40


class JoinError(W5xdeError):
    """This machine cannot take part: nobody answers, or the coordinator refused."""

    exit_code = 10


class ProtocolError(W5xdeError):
    """Bytes or messages that break the protocol."""


class LocalProtocolError(ProtocolError):
    """We were about to break the protocol ourselves."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; only its connection suffers."""

    exit_code = 10


class TrainingError(W5xdeError):
    """Training cannot go on, whoever helps."""

    exit_code = 30
    # What the run came to, as in `Result.summary`; nothing if it did not come to an end.
    summary: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def because(cls, reason: str, summary: Mapping[str, Any]) -> TrainingError:
        """The error for a reason that came up while training, with advice where there is any."""
        diverged = any(word in reason for word in ("finite", " nan", " inf"))
        fix = "lower the learning rate, or clip the gradient with --clip-norm 1" if diverged else ""
        if "is not complete" in reason and not diverged:
            fix = (
                "mend the data or the loss and go on with --resume, or leave them out with --skip-bad-batches"
            )
        error = cls(reason, code="W5-311", fix=fix)
        error.summary = summary
        return error
