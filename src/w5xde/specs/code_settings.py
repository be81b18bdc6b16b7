"""Settings of code that travels: what a coordinator sends, and what a node agrees to run. Plain values."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from w5xde.specs.setting_error import SettingError

_SHA256 = re.compile("[0-9a-fA-F]{64}")

Ship = Annotated[
    str | None,
    Meta(
        description="files or folders of Python modules beside the job file, with commas, that are sent with"
        " it to nodes that join without a JOB (default: the job file alone); off: send no code"
    ),
]
AcceptCode = Annotated[
    str | None,
    Meta(
        description="without a JOB: run the coordinator's code if it has this sha256, all 64 digits, and do"
        " not ask"
    ),
]


def require_accept_code(text: str | None) -> None:
    """Refuse the beginning of a hash: other code that begins alike can be found."""
    if text is not None and not _SHA256.fullmatch(text):
        raise SettingError(
            f"accept-code {text!r} must be all 64 digits of the sha256 that was shown",
            fix="copy the whole sha256 that  w5xde join TICKET  shows",
        )
