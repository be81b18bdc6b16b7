"""What a check found, and how checks are run: one after the other, each with a limit, none able to hang."""

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
    """One line of the report. A warning costs speed or comfort; an error keeps something from working."""

    check: str
    state: State
    what: str
    fix: str = ""
    # The error that training or joining would end with.
    code: str = ""
    # Numbers for programs, with their units in their names.
    measured: dict[str, Any] = field(default_factory=dict)


class Check(NamedTuple):
    """Something to look at. It may find several things, and tells each as soon as it is known."""

    name: str
    seconds_max: float
    look: Callable[[], Iterator[Finding]]


def examine(checks: list[Check]) -> Iterator[Finding]:
    """What the checks find. One that takes too long is left alone, one that fails is a finding."""
    for check in checks:
        yield from _run(check)


def _run(check: Check) -> Iterator[Finding]:
    told: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for finding in check.look():
                told.put(finding)
        except W5xdeError as error:
            told.put(Finding(check.name, "error", error.what, error.fix, error.code))
        except Exception as error:
            told.put(
                Finding(check.name, "error", f"cannot be checked: {describe(error)}", "please report this")
            )
        told.put(None)

    # A daemon, so that a disk or a driver that never answers does not keep the command from ending.
    threading.Thread(target=work, name=f"w5xde-{check.name}", daemon=True).start()
    while True:
        try:
            finding = told.get(timeout=check.seconds_max)
        except queue.Empty:
            what = f"no answer within {check.seconds_max:.0f} s"
            yield Finding(
                check.name, "error", what, "look at what it hangs on: a disk, a driver, the network"
            )
            return
        if finding is None:
            return
        yield finding
