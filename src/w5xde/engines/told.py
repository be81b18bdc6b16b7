"""What a command told its user: the error that it printed on another host, raised again at the driver.

An error is read from the lines in which `W5xdeError.lines` writes it. Knows no engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from w5xde.engines.minded import Ended
from w5xde.errors import JobError, JoinError, StorageError, TrainingError, UsageError, W5xdeError

_ERROR = re.compile(r"error\[(W5-\d{3})\]: (.*)")
_PART = re.compile(r"  (why|fix): (.*)")
_KINDS: list[type[W5xdeError]] = [UsageError, JobError, StorageError, JoinError, TrainingError]


def code_of_error(lines: Sequence[str]) -> str:
    """The code of the error that a command printed last; empty if it printed none."""
    found = _last_error(lines)
    return found[1] if found is not None else ""


def error_of(ended: Ended, what: str, summary: Mapping[str, Any] | None = None) -> W5xdeError:
    """The error of a command that failed, with its exit code. `what`: which command, if it printed none."""
    kind = next((kind for kind in _KINDS if kind.exit_code == ended.status), W5xdeError)
    found = _last_error(ended.lines)
    if found is None:
        last = " | ".join(ended.lines[-3:])
        error = kind(f"{what} {_ending_text(ended.status)}", code="W5-608", why=last)
    else:
        at = [line for line in ended.lines if _ERROR.match(line)][-1]
        after = ended.lines[len(ended.lines) - 1 - ended.lines[::-1].index(at) :]
        parts = {part[1]: part[2] for line in after if (part := _PART.match(line))}
        error = kind(found[2], code=found[1], why=parts.get("why", ""), fix=parts.get("fix", ""))
    if isinstance(error, TrainingError) and summary is not None:
        error.summary = summary
    return error


def _last_error(lines: Sequence[str]) -> re.Match[str] | None:
    found = [each for line in lines if (each := _ERROR.match(line))]
    return found[-1] if found else None


def _ending_text(status: int) -> str:
    return f"was killed by signal {-status}, again and again" if status < 0 else f"ended with code {status}"
