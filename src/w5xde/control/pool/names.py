"""Node names: which name each node has in a run.

A name belongs to one owner while the coordinator runs: faults and bans go by the name, so they must never
pass to another node. Knows no sockets, tickets or secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import TypeAlias

# The longest name that leaves room for a number of five digits within the 64 characters of a name.
_STEM_CHARACTERS_MAX = 58
_LOCAL = re.compile(r"local-[0-9]+")
# The id of a node that came with a ticket, or the own name of a local node; empty for one that only looks.
Owner: TypeAlias = bytes | str


def local_name(number: int) -> str:
    """The name of a node that the coordinator starts itself."""
    return f"local-{number}"


def is_local_name(name: str) -> bool:
    return _LOCAL.fullmatch(name) is not None


def free_name(wanted: str, is_taken: Callable[[str], bool], *, is_local: bool = False) -> str:
    """Return the wanted name, or that name with the first number that makes it free.

    Names of local nodes are free for local nodes alone: their process ids and restarts are looked up by name.
    """
    name, number = wanted, 1
    while (not is_local and is_local_name(name)) or is_taken(name):
        number += 1
        name = f"{wanted[:_STEM_CHARACTERS_MAX]}-{number}"
    return name


class NodeNames:
    """The names of all nodes that joined since the coordinator started."""

    def __init__(self) -> None:
        self._names: dict[Owner, str] = {}
        self._owners: dict[str, Owner] = {}

    def owner_of(self, name: str) -> Owner | None:
        return self._owners.get(name)

    def assign(self, wanted: str, owner: Owner, present: Container[str]) -> str:
        """Name a node that connects: as before, else as it wants, else with a number.

        `present` holds the names of all connected nodes. A name that the owner itself has is free for it: its
        new connection replaces the old one. Without an owner the name is not kept.
        """

        def is_taken(name: str) -> bool:
            holder = self._owners.get(name)
            return holder != owner if holder is not None else name in present

        name = free_name(self._names.get(owner, wanted), is_taken, is_local=isinstance(owner, str))
        if owner:
            self._names[owner], self._owners[name] = name, owner
        return name
