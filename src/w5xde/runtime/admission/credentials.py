"""A node's credentials: what it was given when it first came, and comes back with.

    STATE/nodes/POOL/00.json, 01.json …     one for each node of this machine in that pool

So a ticket that has expired meanwhile does not keep a node out, and one node can be turned out alone.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import msgspec

from w5xde.errors import StorageError
from w5xde.runtime.admission import private_files as private
from w5xde.runtime.durable.sealed_json import Damaged, seal, unseal
from w5xde.ticket import Secret, Ticket

NODE_ID_BYTES = 8
CREDENTIAL_BYTES = 32
# Nodes of one machine in one pool.
PLACES_MAX = 256


@dataclass(frozen=True, slots=True)
class Credential:
    """What lets one node in, ticket or not."""

    node_id: bytes
    secret: Secret


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node_id: str
    secret: str


def pool_of(ticket: Ticket) -> str:
    """Where a node keeps what this ticket brought it: by the run's certificate, if the ticket pins one."""
    return ticket.fingerprint.hex() or f"ticket-{ticket.id.hex()}"


class NodeCredentials:
    """One node's place among those that this machine has in a pool; nobody else has it until it is closed.

    Several nodes of one machine, or of machines that share a home folder, must not come with one credential:
    each takes the first place that is free.
    """

    def __init__(self, pool: str, state: Path | None = None) -> None:
        folder = private.make_folder(state or private.state_folder(), "nodes", pool)
        self._handle, place = _take_place(folder)
        self._file = folder / f"{place:02}.json"
        # A process forked from us would keep our place, and longer than we live.
        ours = weakref.ref(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _let_go(ours()))

    def load(self) -> Credential | None:
        """What this node was given before, if it was here."""
        try:
            data = private.read(self._file)
        except FileNotFoundError:
            return None
        try:
            kept = msgspec.json.decode(unseal(data)[0], type=_Kept)
            node_id, secret = bytes.fromhex(kept.node_id), bytes.fromhex(kept.secret)
            if (len(node_id), len(secret)) != (NODE_ID_BYTES, CREDENTIAL_BYTES):
                raise Damaged("its lengths are not right")
        except (Damaged, msgspec.DecodeError, ValueError):
            raise StorageError(
                f"{self._file} is damaged",
                code="W5-413",
                fix="remove it, and join with a ticket that is valid",
            ) from None
        return Credential(node_id, Secret(secret))

    def save(self, credential: Credential) -> None:
        kept = _Kept(credential.node_id.hex(), credential.secret.reveal().hex())
        private.replace(self._file, seal(msgspec.json.encode(kept))[0])

    def forget(self) -> None:
        """The coordinator does not know it, or this machine wants to be another."""
        private.remove(self._file)

    def close(self) -> None:
        """Free the place; what was saved stays for the next who takes it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _take_place(folder: Path) -> tuple[int, int]:
    for place in range(PLACES_MAX):
        handle = private.hold(folder / f"{place:02}.lock")
        if handle is not None:
            return handle, place
    raise StorageError(
        f"this machine already has {PLACES_MAX} nodes in that run", code="W5-412", fix="end some of them"
    )


def _let_go(credentials: NodeCredentials | None) -> None:
    if credentials is not None:
        credentials.close()
