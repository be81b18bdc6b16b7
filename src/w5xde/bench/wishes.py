"""Settings of a measured run. Nothing of the user's environment or files counts here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from w5xde.bench import jobs
from w5xde.config import Settings
from w5xde.errors import UsageError


def known(setting: str) -> bool:
    """Whether this version of w5xde has the setting."""
    return setting in Settings.__struct_fields__


def settings_for(runs: str, wishes: Mapping[str, Any], **given: Any) -> tuple[Settings, list[str]]:
    """Settings of a run, and those of the wishes that this version does not know."""
    base: dict[str, Any] = {
        "batch_size": jobs.BATCH_SIZE,
        "seed": jobs.SEED,
        "threads": 1,
        "device": "cpu",
        "runs": str(Path(runs).absolute()),
        "log": "silent",
    }
    granted = {key: value for key, value in wishes.items() if known(key)}
    try:
        settings = Settings(**{**base, **given, **granted})
    except ValueError as error:
        raise UsageError(str(error), code="W5-210", fix="w5xde train --help lists every setting") from None
    return settings, [key for key in wishes if not known(key)]
