"""Bans: keeps out nodes that the coordinator or its user banned, by the names that nodes have in the run.

The register keeps the bans of nodes that came with a ticket. Local nodes are in no register, so their bans
end with the coordinator. Decides nothing: the coordinator's core and the user ban, and
`control/pool/names.py` chooses names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable
from typing import Any

from w5xde.control.pool.names import NodeNames
from w5xde.errors import StorageError
from w5xde.messages import Hello
from w5xde.runtime.admission.gatekeeper import Admission, Gatekeeper
from w5xde.runtime.admission.register import BANNED_MAX
from w5xde.runtime.admission.register_rows import TicketRow


class Bans:
    """All bans of a run. `connected` gives the ids of connected nodes, and `evict` closes one by its id.

    Calls `note` with news for the user, and `on_error` if the register fails.
    """

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        connected: Callable[[], Iterable[bytes]],
        evict: Callable[[bytes, str], None],
        note: Callable[[str, str], None],
        on_error: Callable[[StorageError], None],
    ) -> None:
        self._gatekeeper = gatekeeper
        self._connected = connected
        self._evict = evict
        self._note = note
        self._on_error = on_error
        self._names = NodeNames()
        # The own name of a local node -> the reason.
        self._local: dict[str, str] = {}

    def assign_name(self, hello: Hello, admission: Admission, present: Container[str]) -> str:
        """Return the name of a node that connects, and make the register use the same name."""
        owner = (admission.name or hello.name) if admission.is_local else admission.node_id
        name = self._names.assign(admission.name or hello.name, owner, present)
        if admission.node_id and name != admission.name:
            self._gatekeeper.rename(admission.node_id, name).add_done_callback(self._succeeded)
        return name

    def of_local_node(self, own_name: str) -> str:
        """Return why this local node is banned, or an empty text."""
        return self._local.get(own_name, "")

    def ban(self, name: str, reason: str) -> None:
        """Ban the node of this name, connected or not. One that came with a ticket is evicted."""
        owner = self._names.owner_of(name)
        if isinstance(owner, str):
            self._local[owner] = reason
        elif owner is not None:
            self._gatekeeper.ban(owner, reason).add_done_callback(self._banned)

    def refresh(self, now: float) -> None:
        """Evict nodes that `w5xde ticket` has banned since the last look."""
        refreshing = self._gatekeeper.refresh(now)
        if refreshing is not None:
            refreshing.add_done_callback(self._refreshed)

    def _banned(self, done: asyncio.Future[TicketRow | None]) -> None:
        if not self._succeeded(done):
            return
        ticket = done.result()
        if ticket is not None:
            what = f"ticket {ticket.id[:8]} is revoked: {BANNED_MAX} nodes that came by it were banned"
            self._note("revoked", what)
        self._evict_banned()

    def _refreshed(self, done: asyncio.Future[bool]) -> None:
        if self._succeeded(done) and done.result():
            self._evict_banned()

    def _succeeded(self, done: asyncio.Future[Any]) -> bool:
        if done.cancelled():
            return False
        error = done.exception()
        if isinstance(error, StorageError):
            self._on_error(error)
        return error is None

    def _evict_banned(self) -> None:
        for node_id in self._connected():
            reason = self._gatekeeper.ban_of(node_id)
            if reason is not None:
                self._evict(node_id, f"this node is banned from the run: {reason}")
