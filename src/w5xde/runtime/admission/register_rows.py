"""The rows of a run's register: its tickets, the nodes that came with them, and the addresses of the run.

Plain data. Knows no files and no locks, and of secrets only their hashes.
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
    """A ticket that was issued."""

    id: Id
    sha256: Digest
    label: str
    made_at: float
    # 0: never.
    expires_at: int
    # How many nodes may join with it; 0: any number.
    uses_max: int
    uses: int = 0
    revoked_at: float | None = None

    def state(self, now: float) -> State:
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at and now >= self.expires_at:
            return "expired"
        return "used up" if self.uses_max and self.uses >= self.uses_max else "good"


class RegisteredNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that joined with a ticket, and may rejoin with the credential that it got."""

    id: Id
    sha256: Digest
    # Its name in the run, which users see. Registers of earlier versions have the name that it asked for.
    name: str
    ticket: Id
    joined_at: float
    # Where it first came from, as `control/pool/connection_limits.py` groups addresses; empty: unknown.
    address: str = ""
    # Why it is banned; None if it is not.
    banned: str | None = None


class Entrance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every ticket of the run says: its addresses, and how nodes recognise the coordinator."""

    addresses: tuple[tuple[str, int], ...]
    # Hexadecimal; empty where nothing is pinned.
    fingerprint: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]
    is_clear: bool = False
    is_pki: bool = False


class RegisterRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the register holds."""

    format: int = FORMAT
    entrance: Entrance | None = None
    tickets: dict[Id, TicketRow] = {}
    nodes: dict[Id, RegisteredNode] = {}

    def with_ticket(self, ticket: TicketRow) -> RegisterRows:
        return msgspec.structs.replace(self, tickets={**self.tickets, ticket.id: ticket})

    def with_nodes(self, nodes: Iterable[RegisteredNode]) -> RegisterRows:
        return msgspec.structs.replace(self, nodes={**self.nodes, **{node.id: node for node in nodes}})

    def with_ban(self, nodes: Iterable[RegisteredNode], reason: str | None) -> RegisterRows:
        """The rows with a ban of these nodes for this reason; None lifts their bans."""
        return self.with_nodes(msgspec.structs.replace(node, banned=reason) for node in nodes)

    def encode(self) -> bytes:
        return seal(msgspec.json.encode(self))[0] + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> RegisterRows:
        """Read what `encode` wrote; raises Damaged if it is anything else."""
        if not data.endswith(b"\n"):
            raise Damaged("it is cut short")
        content, _ = unseal(data[:-1])
        try:
            rows = msgspec.json.decode(content, type=cls)
        except (msgspec.DecodeError, RecursionError):
            raise Damaged("it makes no sense") from None
        if rows.format != FORMAT:
            raise Damaged(f"its format is {rows.format}; this w5xde reads {FORMAT}")
        return rows
