"""The register of a run: which tickets were handed out, and which nodes came by them.

    runs/NAME/tickets.json      sealed, 0600; of every secret its sha256 alone: who reads it cannot join
    runs/NAME/tickets.lock      held while somebody changes it

Several processes use it: the coordinator decides by it, and `w5xde ticket` changes it meanwhile. It is
replaced whole, so reading takes no lock; before each decision it is read again if it is not the file it was.
Changing begins by reading under the lock. A damaged register is an error: begun anew, it would forget whom we
let in and whom we banned.
Knows no clock: callers pass `now`, in Unix seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from w5xde.errors import JoinError, StorageError, UsageError
from w5xde.runtime.admission import private_files as private
from w5xde.runtime.admission.credentials import CREDENTIAL_BYTES, NODE_ID_BYTES, Credential
from w5xde.runtime.admission.register_rows import Book, Entrance, NodeRow, TicketRow, banned, decode, encode
from w5xde.runtime.durable.sealed_json import Damaged
from w5xde.ticket import ID_BYTES, SECRET_BYTES, Secret, Ticket, expired_ago, no_longer_accepted

NAME = "tickets.json"
LOCK = "tickets.lock"
LIFETIME_SECONDS = 24 * 3600.0
USES = 100
# The file is written whole at every join: with all of these it is a few megabytes.
TICKETS_MAX = 1_000
NODES_MAX = 20_000
TEXT_CHARACTERS_MAX = 200
# A ticket by which so many came who had to be banned has got into the wrong hands.
BANNED_MAX = 3
# What an unknown id is compared with, so that it takes as long as a wrong secret; no secret has this hash.
_NOBODY = bytes(32)

RESTORE = (
    f"restore {NAME} from a copy, which says who was let in and who was banned; or start the"
    " coordinator with --new-identity, and everybody has to join anew"
)

Result = TypeVar("Result")
Kind = Literal["unknown", "wrong secret", "expired", "revoked", "used up", "full", "banned"]


class Refused(JoinError):
    """This node is not let in: in words for the node, and by kind for our own log.

    An unknown id and a wrong secret are one to the node, which must not learn which ids there are.
    """

    def __init__(self, kind: Kind, what: str, *, code: str, fix: str = "") -> None:
        super().__init__(what, code=code, fix=fix)
        self.kind = kind


class TicketRegister:
    """The register in one run folder."""

    def __init__(self, folder: Path) -> None:
        """Open a register that is there; `begin` makes one."""
        self._folder = folder
        self._file = folder / NAME
        self._signature: tuple[int, int, int] | None = None
        self._book = Book()
        self.refresh()

    @classmethod
    def begin(
        cls, folder: Path, entrance: Entrance, *, anew: bool = False, is_resumed: bool = False
    ) -> TicketRegister:
        """For the coordinator: open the register and write where nodes come in; a new run gets an empty one.

        `anew`: whatever it holds is forgotten, also who was banned; nobody's ticket or credential is good.
        `is_resumed`: the run had a register before, so a missing one is an error.
        """
        with private.locked(folder / LOCK):
            is_there = (folder / NAME).exists()
            if is_resumed and not is_there and not anew:
                raise StorageError(
                    f"run {folder.name} has lost its register of tickets", code="W5-414", fix=RESTORE
                )
            if anew or not is_there:
                private.replace(folder / NAME, encode(Book()))
        register = cls(folder)
        register._change(lambda book: (msgspec.structs.replace(book, entrance=entrance), None))
        return register

    @property
    def entrance(self) -> Entrance | None:
        return self._book.entrance

    # --- handing out and taking back ----------------------------------------------------------------

    def new(
        self,
        now: float,
        *,
        lifetime_seconds: float | None = LIFETIME_SECONDS,
        uses: int | None = USES,
        label: str = "",
    ) -> Ticket:
        """A new ticket. This is the only moment at which its secret is known; None: without that limit."""
        if (lifetime_seconds is not None and lifetime_seconds < 1) or (uses is not None and uses < 1):
            raise UsageError(
                "a ticket needs a lifetime and at least one use", code="W5-117", fix="ask for more"
            )
        ticket_id, secret = secrets.token_bytes(ID_BYTES), Secret(secrets.token_bytes(SECRET_BYTES))
        row = TicketRow(
            id=ticket_id.hex(),
            sha256=secret.digest().hex(),
            label=_shortened(label),
            made_at=now,
            expires_at=0 if lifetime_seconds is None else int(now + lifetime_seconds),
            uses_max=uses or 0,
        )

        def add(book: Book) -> tuple[Book, Ticket]:
            if book.entrance is None:
                raise self._trouble("does not say where nodes come in", "start its coordinator first")
            tickets = book.tickets
            if len(tickets) >= TICKETS_MAX:
                # Every start of a coordinator makes one; those that let nobody in any more can go.
                tickets = {each: kept for each, kept in tickets.items() if kept.state(now) == "good"}
            if len(tickets) >= TICKETS_MAX:
                raise self._trouble(f"already has {TICKETS_MAX} tickets", "revoke some of them")
            ticket = Ticket(
                addresses=book.entrance.addresses,
                fingerprint=bytes.fromhex(book.entrance.fingerprint),
                id=ticket_id,
                secret=secret,
                expires_at=row.expires_at,
                is_clear=book.entrance.is_clear,
                is_pki=book.entrance.is_pki,
            )
            return msgspec.structs.replace(book, tickets={**tickets, row.id: row}), ticket

        return self._change(add)

    def tickets(self) -> list[TicketRow]:
        """All that were handed out, oldest first."""
        self.refresh()
        return list(self._book.tickets.values())

    def nodes(self) -> list[NodeRow]:
        """All that came by a ticket, in the order in which they first came."""
        self.refresh()
        return list(self._book.nodes.values())

    def revoke(self, ticket: str, now: float, *, turn_out: bool = False) -> tuple[TicketRow, list[NodeRow]]:
        """Nobody else comes by this ticket (its id, or how it begins); `turn_out`: who did must go too."""

        def change(book: Book) -> tuple[Book, tuple[TicketRow, list[NodeRow]]]:
            row = self._find_ticket(book, ticket)
            if row.revoked_at is None:
                row = msgspec.structs.replace(row, revoked_at=now)
            book = msgspec.structs.replace(book, tickets={**book.tickets, row.id: row})
            if not turn_out:
                return book, (row, [])
            came = [node for node in book.nodes.values() if node.ticket == row.id and node.banned is None]
            return banned(book, came, "its ticket was revoked"), (row, came)

        return self._change(change)

    def ban(self, node: str, reason: str) -> list[NodeRow]:
        """Keep out a node by its id, or every node of that name; returns whom it concerns.

        Who still has a valid ticket can come again as somebody new, from elsewhere: revoke that too.
        """

        def change(book: Book) -> tuple[Book, list[NodeRow]]:
            found = self._find_nodes(book, node)
            book = banned(book, found, _shortened(reason) or "banned")
            return book, [book.nodes[row.id] for row in found]

        return self._change(change)

    def unban(self, node: str) -> list[NodeRow]:
        """Let a node come back, by its id or its name; returns whom it concerns, as they were."""

        def change(book: Book) -> tuple[Book, list[NodeRow]]:
            found = [row for row in self._find_nodes(book, node) if row.banned is not None]
            return banned(book, found, None), found

        return self._change(change)

    def turn_out(self, node_id: bytes, reason: str, now: float) -> TicketRow | None:
        """The coordinator bans a node that did wrong. If its ticket brought too many such, that is revoked:
        then returns it."""

        def change(book: Book) -> tuple[Book, TicketRow | None]:
            node = book.nodes.get(node_id.hex())
            if node is None or node.banned is not None:
                return book, None
            book = banned(book, [node], _shortened(reason))
            ticket = book.tickets.get(node.ticket)
            count = sum(row.ticket == node.ticket and row.banned is not None for row in book.nodes.values())
            if ticket is None or ticket.revoked_at is not None or count < BANNED_MAX:
                return book, None
            ticket = msgspec.structs.replace(ticket, revoked_at=now)
            return msgspec.structs.replace(book, tickets={**book.tickets, ticket.id: ticket}), ticket

        return self._change(change)

    def _find_nodes(self, book: Book, node: str) -> list[NodeRow]:
        found = [row for row in book.nodes.values() if node and node in (row.id, row.name)]
        if not found:
            raise self._trouble(f"knows no node {node!r}", "see  w5xde ticket list RUN", "W5-118")
        return found

    def _find_ticket(self, book: Book, begin: str) -> TicketRow:
        found = [row for row in book.tickets.values() if begin and row.id.startswith(begin.lower())]
        if len(found) != 1:
            count = "no ticket" if not found else f"{len(found)} tickets"
            raise self._trouble(f"has {count} {begin!r}", "see  w5xde ticket list RUN", "W5-118")
        return found[0]

    # --- letting in ---------------------------------------------------------------------------------

    def admit_ticket(
        self, ticket_id: bytes, secret: bytes, now: float, *, name: str = "", address: str = ""
    ) -> Credential:
        """Let a new node in by its ticket: its credential, which is known to it alone. Refused otherwise."""
        self.refresh()
        # First without the lock: strangers cannot make us wait for it.
        _check_ticket(self._book, ticket_id, secret, now, address)
        credential = Credential(
            secrets.token_bytes(NODE_ID_BYTES), Secret(secrets.token_bytes(CREDENTIAL_BYTES))
        )

        def add(book: Book) -> tuple[Book, None]:
            row = _check_ticket(book, ticket_id, secret, now, address)
            if len(book.nodes) >= NODES_MAX:
                raise Refused(
                    "full", f"this run has had {NODES_MAX} nodes, and takes no new ones", code="W5-105"
                )
            node = NodeRow(
                id=credential.node_id.hex(),
                sha256=credential.secret.digest().hex(),
                name=_shortened(name),
                ticket=row.id,
                joined_at=now,
                address=_shortened(address),
            )
            used = msgspec.structs.replace(row, uses=row.uses + 1)
            return (
                msgspec.structs.replace(
                    book, tickets={**book.tickets, used.id: used}, nodes={**book.nodes, node.id: node}
                ),
                None,
            )

        self._change(add)
        return credential

    def check_ticket(self, ticket_id: bytes, secret: bytes, now: float, address: str = "") -> TicketRow:
        """The row of a ticket by which a node could come now; it is not used up. Refused otherwise."""
        self.refresh()
        return _check_ticket(self._book, ticket_id, secret, now, address)

    def admit_node(self, node_id: bytes, secret: bytes) -> NodeRow:
        """Let a node come back with its credential. Refused otherwise."""
        self.refresh()
        row = self._book.nodes.get(node_id.hex())
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

    def ban_of(self, node_id: bytes) -> str | None:
        """Why a node may not stay, as far as we have read; after `refresh`, for nodes that are here."""
        row = self._book.nodes.get(node_id.hex())
        return row.banned if row is not None else None

    # --- the file -----------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Read the register again if it is not the file we know; returns whether it was not."""
        try:
            found = self._file.stat()
        except FileNotFoundError:
            raise self._missing() from None
        except OSError as error:
            raise self._trouble(f"cannot be read: {error.strerror}", "mend its folder") from error
        signature = (found.st_mtime_ns, found.st_ino, found.st_size)
        if signature == self._signature:
            return False
        self._read()
        # Of before we read: if it was replaced between the two, we read it once more next time.
        self._signature = signature
        return True

    def _read(self) -> None:
        try:
            self._book = decode(private.read(self._file))
        except FileNotFoundError:
            raise self._missing() from None
        except Damaged as damage:
            raise self._trouble(f"has a damaged register of tickets: {damage}", RESTORE) from None

    def _change(self, change: Callable[[Book], tuple[Book, Result]]) -> Result:
        with private.locked(self._folder / LOCK):
            # Whatever the file's times say: what we write must follow from what is there.
            self._read()
            book, result = change(self._book)
            private.replace(self._file, encode(book))
            self.refresh()
        return result

    def _missing(self) -> StorageError:
        if self._signature is None:
            return self._trouble("has no register of tickets", "start its coordinator first")
        return self._trouble("has lost its register of tickets", f"restore {NAME} from a copy")

    def _trouble(self, what: str, fix: str, code: str = "W5-414") -> StorageError:
        return StorageError(f"run {self._folder.name} {what}", code=code, fix=fix)


def _check_ticket(book: Book, ticket_id: bytes, secret: bytes, now: float, address: str) -> TicketRow:
    row = book.tickets.get(ticket_id.hex())
    # What became of a ticket is told only to who has it.
    if not _is_right(secret, row.sha256 if row else None) or row is None:
        raise Refused(
            "wrong secret" if row else "unknown",
            "the coordinator does not know this ticket",
            code="W5-113",
            fix="get a new one from who runs the coordinator; this one may be of another run",
        )
    state = row.state(now)
    if state == "good":
        _check_address(book, row, address)
        return row
    reason = {
        "expired": expired_ago(row.expires_at, now),
        "revoked": "it was revoked",
        "used up": f"used up after {'1 use' if row.uses == 1 else f'{row.uses} uses'}",
    }[state]
    said = no_longer_accepted(reason)
    raise Refused(state, said.what, code=said.code, fix=said.fix)


def _check_address(book: Book, ticket: TicketRow, address: str) -> None:
    """Who was banned does not come again as somebody new: not by the same ticket from the same place."""
    for node in book.nodes.values() if address else ():
        if node.banned is not None and (node.ticket, node.address) == (ticket.id, address):
            raise Refused(
                "banned",
                f"a node that came from here by this ticket is banned from the run: {node.banned}",
                code="W5-114",
                fix="if you are somebody else, ask who runs the coordinator for another ticket",
            )


def _is_right(secret: bytes, sha256: str | None) -> bool:
    """The same work whether the id is known or not."""
    known = bytes.fromhex(sha256) if sha256 is not None else _NOBODY
    return hmac.compare_digest(hashlib.sha256(secret).digest(), known)


def _shortened(text: str) -> str:
    return text[:TEXT_CHARACTERS_MAX]
