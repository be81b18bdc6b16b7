"""This computer: how its nodes know that they share it, and where others find it."""

from __future__ import annotations

import hashlib
import platform
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


def own_addresses() -> list[str]:
    """The addresses by which other machines may reach this one; its own if there is none."""
    found = [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        # Bridges of containers are reachable from this machine only.
        if address.family == socket.AF_INET and not name.startswith(("lo", "docker", "br-", "veth"))
    ]
    return found or ["127.0.0.1"]
