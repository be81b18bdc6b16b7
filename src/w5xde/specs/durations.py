"""Durations as users write them: `90`, `30s`, `1.5h`, `7d`, and how long a node waits. Knows no clock."""

from __future__ import annotations

import math
import re
from typing import Annotated

from msgspec import Meta

from w5xde.specs.setting_error import SettingError

# A plain number is in seconds. Nine digits of days are longer than any machine will run.
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhd]?)", re.ASCII)
_UNIT_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
FOREVER = "forever"

Wait = Annotated[
    float | str,
    Meta(
        description="how long to look for the coordinator, and for the file of @FILE, before the first"
        " connection: seconds, or 30s, 10m, 1h, forever. After a lost connection nodes look for ten minutes,"
        " or this long if it is longer"
    ),
]


def parse_duration(text: str) -> float:
    """The seconds of `30s`, `5m`, `1.5h`, `7d` or `90`. Raises ValueError for anything else."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a duration")
    return float(found[1]) * _UNIT_SECONDS[found[2]]


def parse_wait(value: float | str) -> float:
    """The seconds of a `wait`, infinite for `forever`."""
    if isinstance(value, str) and value.strip().lower() == FOREVER:
        return math.inf
    try:
        seconds = parse_duration(value) if isinstance(value, str) else value
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        said = value if isinstance(value, str) else f"{value:g}"
        raise SettingError(
            f"wait {said} must be seconds (0 or more), or like 30s, 10m, 1h or {FOREVER}",
            fix=f"write it like  --wait 10m  or  --wait {FOREVER}",
        )
    return seconds
