"""A node's credentials: a node gets one when it first joins, and rejoins with it.

    STATE/nodes/POOL/00.json, 01.json …     one for each node of this machine in that pool

So a node can rejoin after its ticket has expired, and the coordinator can ban a single node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from w5xde.errors import StorageError
from w5xde.runtime.admission import private_files
from w5xde.runtime.durable.sealed_json import Damaged, seal, unseal
from w5xde.runtime.system.file_lock import call_in_children
from w5xde.ticket import Secret, Ticket

NODE_ID_BYTES = 8
CREDENTIAL_BYTES = 32
# Nodes of one machine in one pool; far more than its cores could use.
PLACES_MAX = 256


@dataclass(frozen=True, slots=True)
class Credential:
    """An id and a secret that admit one node without a ticket."""

    node_id: bytes
    secret: Secret


class _StoredCredential(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node_id: str
    secret: str


def pool_of(ticket: Ticket) -> str:
    """Return the folder of this ticket's credentials, named by the run's certificate if that is pinned."""
    return ticket.fingerprint.hex() or f"ticket-{ticket.id.hex()}"


class NodeCredentials:
    """The stored credential of one node. No other process has the same one until this is closed.

    Several nodes of one machine, or of machines that share a home folder, must not use one credential: each
    takes the first that is free.
    """

    def __init__(self, pool: str, state: Path | None = None) -> None:
        folder = private_files.make_folder(state or private_files.state_folder(), "nodes", pool)
        self._handle, place = _take_place(folder)
        self._file = folder / f"{place:02}.json"
        call_in_children(self.close)

    def load(self) -> Credential | None:
        """Return the credential that a node got here before, if there is one."""
        try:
            data = private_files.read(self._file)
        except FileNotFoundError:
            return None
        try:
            stored = msgspec.json.decode(unseal(data)[0], type=_StoredCredential)
            node_id, secret = bytes.fromhex(stored.node_id), bytes.fromhex(stored.secret)
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
        stored = _StoredCredential(credential.node_id.hex(), credential.secret.reveal().hex())
        private_files.replace(self._file, seal(msgspec.json.encode(stored))[0])

    def forget(self) -> None:
        """Remove the credential, which the coordinator does not know."""
        private_files.remove(self._file)

    def close(self) -> None:
        """Free the place; its credential stays for the next node that takes it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _take_place(folder: Path) -> tuple[int, int]:
    for place in range(PLACES_MAX):
        handle = private_files.hold(folder / f"{place:02}.lock")
        if handle is not None:
            return handle, place
    raise StorageError(
        f"this machine already has {PLACES_MAX} nodes in that run", code="W5-412", fix="end some of them"
    )
