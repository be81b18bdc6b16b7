"""This computer: how its nodes know that they share it."""

from __future__ import annotations

import hashlib
import platform
import uuid
from pathlib import Path

# Linux draws it anew at every start; containers of one computer see the same.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_name() -> str:
    """The same for all processes here, other elsewhere, and telling nobody more than that."""
    try:
        known = _BOOT_ID.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        known = f"{platform.node()} {uuid.getnode()}"
    return hashlib.blake2b(known.encode(), digest_size=8, person=b"w5xde").hexdigest()
