"""`w5xde explain`: prints what an error code means. Loads no torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from w5xde.config import Settings
from w5xde.errors import UsageError
from w5xde.explanations import EXPLANATIONS, code_of, listed, near, told


def run_explain(settings: Settings, error: str | None) -> dict[str, Any]:
    """Print one explanation, or the titles of all; returns what --json prints."""
    if error is None:
        if not settings.json:
            print("\n".join(listed()))
        return {"errors": [dataclasses.asdict(each) for each in EXPLANATIONS.values()]}
    code = code_of(error)
    found = EXPLANATIONS.get(code)
    if found is None:
        alike = "; ".join(f"{each.code} ({each.title})" for each in near(code))
        fix = f"near are {alike}" if alike else "w5xde explain  lists all codes"
        raise UsageError(f"there is no error {code}", code="W5-210", fix=fix)
    if not settings.json:
        print("\n".join(told(found)))
    return dataclasses.asdict(found)
