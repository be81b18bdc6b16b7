"""`w5xde doctor`: checks this machine and the connection to a coordinator, and says how to fix what is wrong.

    local_checks.py      Python, memory, clock, disk, open files, port, addresses, torch, device, speed
    remote_checks.py     addresses of a coordinator, round trip, its version and run, encryption
    link_use.py          how much of this machine a run would use: from step_time.py and link_probe.py

Changes nothing. A coordinator that it greets with a ticket sees a node named doctor come and go.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.markup import escape

from w5xde.cli.view import View, make_view
from w5xde.config import Settings
from w5xde.doctor.finding import Finding, examine
from w5xde.doctor.local_checks import machine_checks
from w5xde.doctor.remote_checks import Prospect, Target, coordinator_checks, target_of
from w5xde.errors import UsageError
from w5xde.explanations import EXPLANATIONS
from w5xde.learn.job.job import load_job

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def run_doctor(settings: Settings, target: str | None, job: str | None = None) -> dict[str, Any]:
    """Run all checks and print each finding as soon as it is known; returns what --json prints."""
    # Raises at once for a target that is neither a ticket nor an address, and for a job that is none.
    sought = target_of(target) if target is not None else None
    prospect = _prospect(settings, sought, job) if job is not None else None
    view = make_view(settings)
    found = []
    remote = coordinator_checks(sought, prospect) if sought else []
    for finding in examine([*machine_checks(settings), *remote]):
        _show(view, finding)
        found.append(finding)
    errors = sum(each.state == "error" for each in found)
    warnings = sum(each.state == "warning" for each in found)
    view.say(f"errors: {errors}, warnings: {warnings}" if errors or warnings else "nothing is wrong")
    checks = [dataclasses.asdict(each) for each in found]
    # Not the argument itself: it may be a ticket.
    where = [f"{host}:{port}" for host, port in sought.addresses] if sought else None
    return {"healthy": not errors, "target": where, "errors": errors, "warnings": warnings, "checks": checks}


def _prospect(settings: Settings, target: Target | None, job: str) -> Prospect:
    if target is None or target.ticket is None:
        raise UsageError(
            f"what a run of {job} would use of this machine is only predicted with a ticket",
            code="W5-210",
            why="a coordinator answers nothing without one, and the speed of the link must be measured",
            fix=f"w5xde doctor @ticket {job}",
        )
    return Prospect(load_job(job), settings.batch_size, settings.devices)


def _show(view: View, finding: Finding) -> None:
    style = _STYLES[finding.state]
    state = f"[{style}]{finding.state:<8}[/]"
    view.say(f"{state} {finding.check:<12} {escape(finding.what)}", markup=True)
    if finding.fix:
        view.say(f"  fix: {finding.fix}")
    # Users copy this line, and a coordinator can refuse with any text as its code.
    if finding.code in EXPLANATIONS:
        view.say(f"  more: w5xde explain {finding.code}")
