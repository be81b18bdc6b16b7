"""Findings of checks, and how checks run: one after another, each with a time limit.

Knows nothing of what is checked.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from w5xde.errors import W5xdeError
from w5xde.learn.job.job import describe

State = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A warning costs speed or comfort; with an error something does not work."""

    check: str
    state: State
    what: str
    fix: str = ""
    # Of the error that training or joining would end with.
    code: str = ""
    # Numbers for programs, with their units in their names.
    measured: dict[str, Any] = field(default_factory=dict)


class Check(NamedTuple):
    """A check, which may yield several findings, each as soon as it is known."""

    name: str
    seconds_max: float
    look: Callable[[], Iterator[Finding]]


def examine(checks: list[Check]) -> Iterator[Finding]:
    """Run the checks and yield their findings. A check that fails or takes too long is a finding itself."""
    for check in checks:
        yield from _run(check)


def _run(check: Check) -> Iterator[Finding]:
    findings: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for finding in check.look():
                findings.put(finding)
        except W5xdeError as error:
            findings.put(Finding(check.name, "error", error.what, error.fix, error.code))
        except Exception as error:
            findings.put(
                Finding(check.name, "error", f"cannot be checked: {describe(error)}", "please report this")
            )
        findings.put(None)

    # A daemon thread: a disk or a driver that never answers must not keep the command from ending.
    threading.Thread(target=work, name=f"w5xde-{check.name}", daemon=True).start()
    while True:
        try:
            finding = findings.get(timeout=check.seconds_max)
        except queue.Empty:
            what = f"no answer within {check.seconds_max:.0f} s"
            yield Finding(
                check.name, "error", what, "look at what it hangs on: a disk, a driver, the network"
            )
            return
        if finding is None:
            return
        yield finding
