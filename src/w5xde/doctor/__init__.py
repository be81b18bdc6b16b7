"""`w5xde doctor`: looks at this machine and at the way to a coordinator, and says what to do about it.

    here.py      Python, memory, clock, disk, open files, port, addresses, torch, device, speed
    there.py     the route to a coordinator, the link, who answers, and whether TLS is spoken

Changes nothing, and a coordinator that it greets by a ticket sees a node called doctor come and go.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.markup import escape

from w5xde.cli.view import View, make_view
from w5xde.config import Settings
from w5xde.doctor.finding import Finding, examine
from w5xde.doctor.local_checks import checks_here
from w5xde.doctor.remote_checks import checks_there, target_of
from w5xde.explanations import EXPLANATIONS

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def run_doctor(settings: Settings, target: str | None) -> dict[str, Any]:
    """Run all checks and show each finding when it is known; returns what --json prints."""
    # What is neither a ticket nor an address is told before anything else is done.
    sought = target_of(target) if target is not None else None
    view = make_view(settings)
    found = []
    for finding in examine([*checks_here(settings), *(checks_there(sought) if sought else [])]):
        _show(view, finding)
        found.append(finding)
    errors = sum(each.state == "error" for each in found)
    warnings = sum(each.state == "warning" for each in found)
    view.say(f"errors: {errors}, warnings: {warnings}" if errors or warnings else "nothing is wrong")
    checks = [dataclasses.asdict(each) for each in found]
    # Not what was typed: that may be a ticket.
    where = [f"{host}:{port}" for host, port in sought.addresses] if sought else None
    return {"healthy": not errors, "target": where, "errors": errors, "warnings": warnings, "checks": checks}


def _show(view: View, finding: Finding) -> None:
    style = _STYLES[finding.state]
    state = f"[{style}]{finding.state:<8}[/]"
    view.say(f"{state} {finding.check:<12} {escape(finding.what)}", markup=True)
    if finding.fix:
        view.say(f"  fix: {finding.fix}")
    # A coordinator may refuse with any word for a code, and this is a line to be copied.
    if finding.code in EXPLANATIONS:
        view.say(f"  more: w5xde explain {finding.code}")
