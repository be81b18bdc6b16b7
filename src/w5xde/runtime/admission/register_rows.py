"""What the register of a run holds: tickets, the nodes that came by them, and where they come in. Plain data.

Knows no files, no locks and no secrets: of these only hashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from w5xde.runtime.durable.sealed_json import Damaged, seal, unseal

FORMAT = 1

Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
State = Literal["good", "expired", "revoked", "used up"]


class TicketRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ticket that was handed out."""

    id: Id
    sha256: Digest
    label: str
    made_at: float
    # 0: never.
    expires_at: int
    # How many nodes may come by it; 0: any number.
    uses_max: int
    uses: int = 0
    revoked_at: float | None = None

    def state(self, now: float) -> State:
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at and now >= self.expires_at:
            return "expired"
        return "used up" if self.uses_max and self.uses >= self.uses_max else "good"


class NodeRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that came by a ticket, and may come back with the credential it got."""

    id: Id
    sha256: Digest
    name: str
    ticket: Id
    joined_at: float
    # Where it first came from, as the door's limits see it; empty: nobody knows.
    address: str = ""
    # Why it may not come back.
    banned: str | None = None


class Entrance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where nodes come in and how they know that it is us: what every ticket of the run says."""

    addresses: tuple[tuple[str, int], ...]
    # Hexadecimal; empty where nothing is pinned.
    fingerprint: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]
    is_clear: bool = False
    is_pki: bool = False


class Book(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int = FORMAT
    entrance: Entrance | None = None
    tickets: dict[Id, TicketRow] = {}
    nodes: dict[Id, NodeRow] = {}


def encode(book: Book) -> bytes:
    return seal(msgspec.json.encode(book))[0] + b"\n"


def decode(data: bytes) -> Book:
    if not data.endswith(b"\n"):
        raise Damaged("it is cut short")
    content, _ = unseal(data[:-1])
    try:
        book = msgspec.json.decode(content, type=Book)
    except (msgspec.DecodeError, RecursionError):
        raise Damaged("it makes no sense") from None
    if book.format != FORMAT:
        raise Damaged(f"its format is {book.format}; this w5xde reads {FORMAT}")
    return book


def banned(book: Book, rows: Iterable[NodeRow], reason: str | None) -> Book:
    """These may not come back, and why; None: they may again."""
    changed = {row.id: msgspec.structs.replace(row, banned=reason) for row in rows}
    return msgspec.structs.replace(book, nodes={**book.nodes, **changed})
