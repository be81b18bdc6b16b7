"""The register of a run: the tickets that it issued, and the nodes that came with them.

    runs/NAME/tickets.json      sealed, mode 0600; holds the sha256 of each secret, never the secret
    runs/NAME/tickets.lock      held while a process changes the register

Several processes use it: the coordinator admits nodes by it, and `w5xde ticket` changes it meanwhile. A
change reads the file under the lock and replaces it whole, so reading needs no lock; before each decision the
file is read again if it is another one. A damaged register is an error: an empty one would forget all nodes
and bans. Knows no sockets and no clock: callers pass `now`, in Unix seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from w5xde.control.pool.names import free_name
from w5xde.errors import JoinError, StorageError
from w5xde.runtime.admission import private_files
from w5xde.runtime.admission.credentials import CREDENTIAL_BYTES, NODE_ID_BYTES, Credential
from w5xde.runtime.admission.offline_tickets import LIFETIME_SECONDS, USES, issue
from w5xde.runtime.admission.register_rows import Entrance, RegisteredNode, RegisterRows, TicketRow
from w5xde.runtime.durable.sealed_json import Damaged
from w5xde.ticket import Secret, Ticket, expired_ago, no_longer_accepted

NAME = "tickets.json"
LOCK = "tickets.lock"
# The file is written whole at every join: with all of these it is a few megabytes.
TICKETS_MAX = 1_000
NODES_MAX = 20_000
TEXT_CHARACTERS_MAX = 200
# A ticket is revoked when this many nodes that joined with it are banned: it is in the wrong hands.
BANNED_MAX = 3
# Compared with the secret for an unknown id, so that it takes as long as a wrong secret; nothing has this
# hash.
_NOBODY = bytes(32)

RESTORE = (
    f"restore {NAME} from a copy, which says who was let in and who was banned; or start the"
    " coordinator with --new-identity, and everybody has to join anew"
)

Result = TypeVar("Result")
Kind = Literal["unknown", "wrong secret", "expired", "revoked", "used up", "full", "banned"]


class Refused(JoinError):
    """The register does not admit this node: why, for the node; and of which kind, for the coordinator.

    The node is told the same for an unknown id and a wrong secret: it must not learn which ids exist.
    """

    def __init__(self, kind: Kind, what: str, *, code: str, fix: str = "") -> None:
        super().__init__(what, code=code, fix=fix)
        self.kind = kind


class TicketRegister:
    """The register in one run folder."""

    def __init__(self, folder: Path) -> None:
        """Open the register of a run that has one; `begin` makes it."""
        self._folder = folder
        self._file = folder / NAME
        self._signature: tuple[int, int, int] | None = None
        self._rows = RegisterRows()
        self.refresh()

    @classmethod
    def begin(
        cls, folder: Path, entrance: Entrance, *, anew: bool = False, is_resumed: bool = False
    ) -> TicketRegister:
        """Open the register for the coordinator, and set the run's addresses; a new run gets an empty one.

        `anew`: forget all that it holds, bans too; no ticket or credential from before is valid.
        `is_resumed`: the run had a register before, so a missing one is an error.
        """
        with private_files.locked(folder / LOCK):
            is_there = (folder / NAME).exists()
            if is_resumed and not is_there and not anew:
                raise StorageError(
                    f"run {folder.name} has lost its register of tickets", code="W5-414", fix=RESTORE
                )
            if anew or not is_there:
                private_files.replace(folder / NAME, RegisterRows().encode())
        register = cls(folder)
        register._change(lambda rows: (msgspec.structs.replace(rows, entrance=entrance), None))
        return register

    @property
    def entrance(self) -> Entrance | None:
        return self._rows.entrance

    # --- tickets --------------------------------------------------------------------------------------

    def new(
        self,
        now: float,
        *,
        lifetime_seconds: float | None = LIFETIME_SECONDS,
        uses: int | None = USES,
        label: str = "",
    ) -> Ticket:
        """Issue a ticket; None means without that limit. Its secret is known now and never again."""

        def add(rows: RegisterRows) -> tuple[RegisterRows, Ticket]:
            entrance = rows.entrance
            if entrance is None:
                raise self._error("does not say where nodes come in", "start its coordinator first")
            if len(rows.tickets) >= TICKETS_MAX:
                # Every start of a coordinator issues a ticket; those that are no longer valid can go.
                valid = {key: kept for key, kept in rows.tickets.items() if kept.state(now) == "good"}
                rows = msgspec.structs.replace(rows, tickets=valid)
            if len(rows.tickets) >= TICKETS_MAX:
                raise self._error(f"already has {TICKETS_MAX} tickets", "revoke some of them")
            row, ticket = issue(entrance, now, lifetime_seconds, uses, _shortened(label))
            return rows.with_ticket(row), ticket

        return self._change(add)

    def know(self, row: TicketRow) -> tuple[TicketRow, bool]:
        """Admit nodes by a ticket that was made before the run.

        Returns what is known of it, and whether it was known before: that is kept, uses and all.
        """

        def add(rows: RegisterRows) -> tuple[RegisterRows, tuple[TicketRow, bool]]:
            known = rows.tickets.get(row.id)
            if known is not None and known.sha256 == row.sha256:
                return rows, (known, True)
            return rows.with_ticket(row), (row, False)

        return self._change(add)

    def tickets(self) -> list[TicketRow]:
        """Return all tickets, oldest first."""
        self.refresh()
        return list(self._rows.tickets.values())

    def revoke(
        self, ticket: str, now: float, *, turn_out: bool = False
    ) -> tuple[TicketRow, list[RegisteredNode]]:
        """Admit no other node with a ticket, given by its id or the beginning of that.

        `turn_out`: also ban the nodes that came with it; returns these too.
        """

        def change(rows: RegisterRows) -> tuple[RegisterRows, tuple[TicketRow, list[RegisteredNode]]]:
            row = self._find_ticket(rows, ticket)
            if row.revoked_at is None:
                row = msgspec.structs.replace(row, revoked_at=now)
            came = [node for node in rows.nodes.values() if node.ticket == row.id and node.banned is None]
            gone = came if turn_out else []
            return rows.with_ticket(row).with_ban(gone, "its ticket was revoked"), (row, gone)

        return self._change(change)

    def _find_ticket(self, rows: RegisterRows, begin: str) -> TicketRow:
        found = [row for row in rows.tickets.values() if begin and row.id.startswith(begin.lower())]
        if len(found) != 1:
            count = "no ticket" if not found else f"{len(found)} tickets"
            raise self._error(f"has {count} {begin!r}", "see  w5xde ticket list RUN", "W5-118")
        return found[0]

    # --- nodes ----------------------------------------------------------------------------------------

    def nodes(self) -> list[RegisteredNode]:
        """Return all nodes that came with a ticket, in the order in which they first came."""
        self.refresh()
        return list(self._rows.nodes.values())

    def ban(self, node: str, reason: str) -> RegisteredNode:
        """Ban one node, given by its id or its name in the run.

        With a ticket that is still valid it can join as a new node from another address: revoke that too.
        """

        def change(rows: RegisterRows) -> tuple[RegisterRows, RegisteredNode]:
            found = self._find_node(rows, node)
            rows = rows.with_ban([found], _shortened(reason) or "banned")
            return rows, rows.nodes[found.id]

        return self._change(change)

    def unban(self, node: str) -> RegisteredNode:
        """Lift the ban of one node, given by its id or its name; returns its row from before."""

        def change(rows: RegisterRows) -> tuple[RegisterRows, RegisteredNode]:
            found = self._find_node(rows, node)
            return rows.with_ban([found], None), found

        return self._change(change)

    def ban_node(self, node_id: bytes, reason: str, now: float) -> TicketRow | None:
        """Ban a node for the coordinator; if its ticket brought too many such, revoke and return that."""

        def change(rows: RegisterRows) -> tuple[RegisterRows, TicketRow | None]:
            node = rows.nodes.get(node_id.hex())
            if node is None or node.banned is not None:
                return rows, None
            rows = rows.with_ban([node], _shortened(reason))
            ticket = rows.tickets.get(node.ticket)
            count = sum(row.ticket == node.ticket and row.banned is not None for row in rows.nodes.values())
            if ticket is None or ticket.revoked_at is not None or count < BANNED_MAX:
                return rows, None
            ticket = msgspec.structs.replace(ticket, revoked_at=now)
            return rows.with_ticket(ticket), ticket

        return self._change(change)

    def rename(self, node_id: bytes, name: str) -> None:
        """Write down the name that a node has in the run."""

        def change(rows: RegisterRows) -> tuple[RegisterRows, None]:
            node = rows.nodes.get(node_id.hex())
            return rows.with_nodes([msgspec.structs.replace(node, name=name)] if node else []), None

        self._change(change)

    def _find_node(self, rows: RegisterRows, node: str) -> RegisteredNode:
        # An id first: a node could have taken another's id for its name.
        found = [rows.nodes[node]] if node in rows.nodes else []
        found = found or [row for row in rows.nodes.values() if node and node == row.name]
        if len(found) > 1:
            ids = ", ".join(row.id for row in found)
            raise self._error(f"has {len(found)} nodes {node!r}: {ids}", "name one by its id", "W5-118")
        if not found:
            raise self._error(f"knows no node {node!r}", "see  w5xde ticket list RUN", "W5-118")
        return found[0]

    # --- admitting ------------------------------------------------------------------------------------

    def admit_ticket(
        self, ticket_id: bytes, secret: bytes, now: float, *, name: str = "", address: str = ""
    ) -> Credential:
        """Admit a new node by its ticket, under this name or one like it; raises Refused otherwise.

        Returns its credential, which only the node keeps.
        """
        self.refresh()
        # First without the lock: strangers must not make others wait for it.
        _check_ticket(self._rows, ticket_id, secret, now, address)
        credential = Credential(
            secrets.token_bytes(NODE_ID_BYTES), Secret(secrets.token_bytes(CREDENTIAL_BYTES))
        )

        def add(rows: RegisterRows) -> tuple[RegisterRows, None]:
            row = _check_ticket(rows, ticket_id, secret, now, address)
            if len(rows.nodes) >= NODES_MAX:
                raise Refused(
                    "full", f"this run has had {NODES_MAX} nodes, and takes no new ones", code="W5-105"
                )
            names = {node.name for node in rows.nodes.values()}
            node = RegisteredNode(
                id=credential.node_id.hex(),
                sha256=credential.secret.digest().hex(),
                name=free_name(_shortened(name), names.__contains__),
                ticket=row.id,
                joined_at=now,
                address=_shortened(address),
            )
            return rows.with_ticket(msgspec.structs.replace(row, uses=row.uses + 1)).with_nodes([node]), None

        self._change(add)
        return credential

    def check_ticket(self, ticket_id: bytes, secret: bytes, now: float, address: str = "") -> TicketRow:
        """Return a ticket that would admit a node now, without using it. Raises Refused otherwise."""
        self.refresh()
        return _check_ticket(self._rows, ticket_id, secret, now, address)

    def admit_node(self, node_id: bytes, secret: bytes) -> RegisteredNode:
        """Admit a node that rejoins with its credential. Raises Refused otherwise."""
        self.refresh()
        row = self._rows.nodes.get(node_id.hex())
        if not _is_right(secret, row.sha256 if row else None) or row is None:
            raise Refused(
                "wrong secret" if row else "unknown",
                "the coordinator does not know this node",
                code="W5-113",
                fix="join with a ticket",
            )
        if row.banned is not None:
            raise Refused("banned", f"this node is banned from the run: {row.banned}", code="W5-114")
        return row

    def name_of(self, node_id: bytes) -> str:
        """Return the name of an admitted node."""
        return self._rows.nodes[node_id.hex()].name

    def ban_of(self, node_id: bytes) -> str | None:
        """Return why a node is banned, as the register was last read."""
        row = self._rows.nodes.get(node_id.hex())
        return row.banned if row is not None else None

    # --- the file -----------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Read the file again if it was replaced; returns whether it was."""
        try:
            found = self._file.stat()
        except FileNotFoundError:
            raise self._missing() from None
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}", "mend its folder") from error
        signature = (found.st_mtime_ns, found.st_ino, found.st_size)
        if signature == self._signature:
            return False
        self._read()
        # The signature from before reading: if the file was replaced in between, the next refresh reads it
        # again.
        self._signature = signature
        return True

    def _read(self) -> None:
        try:
            self._rows = RegisterRows.decode(private_files.read(self._file))
        except FileNotFoundError:
            raise self._missing() from None
        except Damaged as damage:
            raise self._error(f"has a damaged register of tickets: {damage}", RESTORE) from None

    def _change(self, change: Callable[[RegisterRows], tuple[RegisterRows, Result]]) -> Result:
        with private_files.locked(self._folder / LOCK):
            # Whatever the signature says: the change must follow from what the file holds now.
            self._read()
            rows, result = change(self._rows)
            private_files.replace(self._file, rows.encode())
            self.refresh()
        return result

    def _missing(self) -> StorageError:
        if self._signature is None:
            return self._error("has no register of tickets", "start its coordinator first")
        return self._error("has lost its register of tickets", f"restore {NAME} from a copy")

    def _error(self, what: str, fix: str, code: str = "W5-414") -> StorageError:
        return StorageError(f"run {self._folder.name} {what}", code=code, fix=fix)


def pinned_before(folder: Path) -> str:
    """The fingerprint that the tickets of an earlier life of a run pin; empty if there is none."""
    try:
        entrance = TicketRegister(folder).entrance
    except StorageError:
        return ""  # told by `begin`
    return entrance.fingerprint if entrance is not None else ""


def _check_ticket(rows: RegisterRows, ticket_id: bytes, secret: bytes, now: float, address: str) -> TicketRow:
    row = rows.tickets.get(ticket_id.hex())
    # Only a node that has the secret learns what became of the ticket.
    if not _is_right(secret, row.sha256 if row else None) or row is None:
        raise Refused(
            "wrong secret" if row else "unknown",
            "the coordinator does not know this ticket",
            code="W5-113",
            fix="get a new one from who runs the coordinator; this one may be of another run",
        )
    state = row.state(now)
    if state == "good":
        _check_address(rows, row, address)
        return row
    reason = {
        "expired": expired_ago(row.expires_at, now),
        "revoked": "it was revoked",
        "used up": f"used up after {'1 use' if row.uses == 1 else f'{row.uses} uses'}",
    }[state]
    said = no_longer_accepted(reason)
    raise Refused(state, said.what, code=said.code, fix=said.fix)


def _check_address(rows: RegisterRows, ticket: TicketRow, address: str) -> None:
    """Refuse a new node that has the ticket and the address of a banned one: it is the same node."""
    for node in rows.nodes.values() if address else ():
        if node.banned is not None and (node.ticket, node.address) == (ticket.id, address):
            raise Refused(
                "banned",
                f"a node that came from here by this ticket is banned from the run: {node.banned}",
                code="W5-114",
                fix="if you are somebody else, ask who runs the coordinator for another ticket",
            )


def _is_right(secret: bytes, sha256: str | None) -> bool:
    """Compare in the same time whether the id is known or not."""
    known = bytes.fromhex(sha256) if sha256 is not None else _NOBODY
    return hmac.compare_digest(hashlib.sha256(secret).digest(), known)


def _shortened(text: str) -> str:
    return text[:TEXT_CHARACTERS_MAX]
