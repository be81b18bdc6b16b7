"""This machine: an id that its processes share, its name, and the addresses at which others reach it."""

from __future__ import annotations

import hashlib
import platform
import re
import socket
import uuid
from pathlib import Path

import psutil

from w5xde.learn.model import cgroup

# Linux draws it at every boot; containers of one machine see the same.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_name() -> str:
    """An id that all processes which share the cores of this machine have, and that tells nothing else."""
    try:
        known = _BOOT_ID.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        known = f"{platform.node()} {uuid.getnode()}"
    if cgroup.cpu_quota() is not None:
        # Containers with cores of their own take no turns with each other.
        known += cgroup.namespace()
    return hashlib.blake2b(known.encode(), digest_size=8, person=b"w5xde").hexdigest()


def host_name() -> str:
    """This machine's host name, reduced to the characters that a node's name may have."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node().split(".")[0])[:50].lstrip("._-")
    return name or "node"


def own_addresses(version: int = 4) -> list[str]:
    """The addresses at which other machines may reach this one; the loopback if there is none."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    found = [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        # Other machines cannot reach the bridges of containers, nor use an address with a zone.
        if address.family == family
        and "%" not in address.address
        and not name.startswith(("lo", "docker", "br-", "veth"))
    ]
    return found or ["127.0.0.1" if version == 4 else "::1"]
