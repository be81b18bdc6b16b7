"""This computer: how its nodes know that they share it, and where others find it."""

from __future__ import annotations

import hashlib
import platform
import re
import socket
import uuid
from pathlib import Path

import psutil

# Linux draws it anew at every start; containers of one computer see the same.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_name() -> str:
    """The same for all processes here, other elsewhere, and telling nobody more than that."""
    try:
        known = _BOOT_ID.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        known = f"{platform.node()} {uuid.getnode()}"
    return hashlib.blake2b(known.encode(), digest_size=8, person=b"w5xde").hexdigest()


def host_name() -> str:
    """This machine's name, as far as it may be shown."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node().split(".")[0])[:50].lstrip("._-")
    return name or "node"


def own_addresses(version: int = 4) -> list[str]:
    """The addresses by which other machines may reach this one; its own if there is none."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    found = [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        # Bridges of containers are reachable from this machine only; an address with a zone means nothing
        # elsewhere.
        if address.family == family
        and "%" not in address.address
        and not name.startswith(("lo", "docker", "br-", "veth"))
    ]
    return found or ["127.0.0.1" if version == 4 else "::1"]
