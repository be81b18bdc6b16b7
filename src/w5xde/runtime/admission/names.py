"""The guest book: what nodes are called, and who may not stay or come back.

A name belongs to one node while this coordinator lives: what it did wrong falls on nobody else, and is not
forgotten because it comes by another name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable
from typing import Any

from w5xde.errors import StorageError
from w5xde.runtime.admission.gatekeeper import Entry
from w5xde.runtime.admission.register import BANNED_MAX
from w5xde.runtime.admission.register_rows import TicketRow
from w5xde.runtime.coordinator.peer import Peer

# Longer than any id of the register, so that no local node has the id of another.
_LOCAL = b"local node "


def local_id(name: str) -> bytes:
    """The id of the local node that was started under this name: it stays the same when the node restarts."""
    return _LOCAL + name.encode()


class Guests:
    """Everybody who was here. `note` hears what a user should know, `trouble` of a register out of order."""

    def __init__(
        self,
        entry: Entry,
        present: Callable[[], Iterable[Peer]],
        turn_out: Callable[[Peer, str], None],
        note: Callable[[str, str], None],
        trouble: Callable[[StorageError], None],
    ) -> None:
        self._entry = entry
        self._present = present
        self._turn_out = turn_out
        self._note = note
        self._trouble = trouble
        # At most as many as the register lets in.
        self._names: dict[bytes, str] = {}
        self._owners: dict[str, bytes] = {}
        # Why local nodes are banned, by id: the register does not have them.
        self._local_bans: dict[bytes, str] = {}

    def name_for(self, wanted: str, node_id: bytes, taken: Container[str]) -> str:
        """What this node is called: as it was before, or else as it wants, if nobody else is."""
        name, number = self._names.get(node_id, wanted), 1
        while name in taken or self._owner(name, node_id) != node_id:
            number += 1
            name = f"{wanted[:58]}-{number}"
        if node_id:
            self._names[node_id], self._owners[name] = name, node_id
        return name

    def _owner(self, name: str, default: bytes) -> bytes:
        """Whose name it is. `local-N` is reserved, even while that local node is not here."""
        is_reserved = name.startswith("local-") and name[len("local-") :].isdecimal()
        return self._owners.get(name, local_id(name) if is_reserved else default)

    def local_ban(self, node_id: bytes) -> str:
        """Why a local node may not come back; nothing if it may."""
        return self._local_bans.get(node_id, "")

    def ban(self, name: str, reason: str) -> None:
        """Whoever has this name may not come back, and must go if it is here."""
        node_id = self._owners.get(name, b"")
        if node_id.startswith(_LOCAL):
            self._local_bans[node_id] = reason
        elif node_id:
            self._entry.turn_out(node_id, reason).add_done_callback(self._banned)

    def refresh(self, now: float) -> None:
        """See to it that nobody stays whom `w5xde ticket` has banned meanwhile."""
        refreshing = self._entry.refresh(now)
        if refreshing is not None:
            refreshing.add_done_callback(self._refreshed)

    def _banned(self, done: asyncio.Future[TicketRow | None]) -> None:
        if not self._has_worked(done):
            return
        ticket = done.result()
        if ticket is not None:
            what = f"ticket {ticket.id[:8]} is revoked: {BANNED_MAX} nodes that came by it were banned"
            self._note("revoked", what)
        self._part_with_banned()

    def _refreshed(self, done: asyncio.Future[bool]) -> None:
        if self._has_worked(done) and done.result():
            self._part_with_banned()

    def _has_worked(self, done: asyncio.Future[Any]) -> bool:
        if done.cancelled():
            return False
        error = done.exception()
        if isinstance(error, StorageError):
            self._trouble(error)
        return error is None

    def _part_with_banned(self) -> None:
        for peer in self._present():
            reason = self._entry.ban_of(peer.node_id) if peer.node_id else None
            if reason is not None:
                self._turn_out(peer, f"this node is banned from the run: {reason}")
