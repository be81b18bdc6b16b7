"""Tickets that are made before their run exists, so that they can be handed out first.

    DIR/identity.pem             the identity that they pin; `serve --identity DIR` uses it
    DIR/offline-tickets.json     how many nodes each may admit; the hashes of their secrets, never the secrets

`serve --ticket @FILE` enters such a ticket in the register of its run. Its secret, its addresses and its end
are in the ticket itself; without its row in DIR it may admit any number of nodes. DIR is only read then.
Knows no sockets and no clock.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from pathlib import Path

from w5xde.errors import StorageError, UsageError
from w5xde.runtime.admission import private_files
from w5xde.runtime.admission.register_rows import Entrance, RegisterRows, TicketRow
from w5xde.runtime.admission.ticket_source import read_file
from w5xde.runtime.durable.sealed_json import Damaged
from w5xde.runtime.net.sockets import is_here
from w5xde.ticket import ID_BYTES, SECRET_BYTES, Secret, Ticket, expired_ago, parse, shown

NAME = "offline-tickets.json"
IDENTITY_NAME = "identity.pem"
LABEL = "made before the run"
LIFETIME_SECONDS = 24 * 3600.0
USES = 100
# The address does not fit what is served.
MISFIT = "W5-126"


def issue(
    entrance: Entrance, now: float, lifetime_seconds: float | None, uses: int | None, label: str
) -> tuple[TicketRow, Ticket]:
    """Make a ticket, and the row that says which nodes it admits; None means without that limit."""
    if (lifetime_seconds is not None and lifetime_seconds < 1) or (uses is not None and uses < 1):
        raise UsageError("a ticket needs a lifetime and at least one use", code="W5-117", fix="ask for more")
    secret = Secret(secrets.token_bytes(SECRET_BYTES))
    ticket = Ticket(
        addresses=entrance.addresses,
        fingerprint=bytes.fromhex(entrance.fingerprint),
        id=secrets.token_bytes(ID_BYTES),
        secret=secret,
        expires_at=0 if lifetime_seconds is None else int(now + lifetime_seconds),
        is_clear=entrance.is_clear,
        is_pki=entrance.is_pki,
    )
    return _row(ticket, label, now, uses), ticket


def _row(ticket: Ticket, label: str, now: float, uses: int | None) -> TicketRow:
    return TicketRow(
        id=ticket.id.hex(),
        sha256=ticket.secret.digest().hex(),
        label=label,
        made_at=now,
        expires_at=ticket.expires_at,
        uses_max=uses or 0,
    )


def make_offline(
    folder: Path,
    fingerprint: bytes,
    addresses: Sequence[tuple[str, int]],
    now: float,
    *,
    lifetime_seconds: float | None = LIFETIME_SECONDS,
    uses: int | None = USES,
    label: str = LABEL,
) -> Ticket:
    """Make a ticket for the identity in a folder, and keep its row beside that."""
    entrance = Entrance(tuple(addresses), fingerprint.hex())
    row, ticket = issue(entrance, now, lifetime_seconds, uses, label)
    with private_files.locked(folder / IDENTITY_NAME):
        rows = _rows(folder)
        private_files.replace(folder / NAME, rows.with_ticket(row).encode())
    return ticket


def _rows(folder: Path) -> RegisterRows:
    file = folder / NAME
    try:
        return RegisterRows.decode(private_files.read_given(file))
    except FileNotFoundError:
        return RegisterRows()
    except Damaged as damage:
        # Without it a ticket for one node would admit any number.
        raise StorageError(
            f"{file} is damaged: {damage}",
            code="W5-413",
            fix="restore it from a copy; or remove it, and its tickets admit any number of nodes",
        ) from None


class KnownTicket:
    """A ticket that a coordinator is given when it starts, and admits from then on."""

    def __init__(self, place: str, identity: Path) -> None:
        """`place` is the `@FILE` with the ticket, `identity` the folder of the coordinator's identity."""
        self.place = place
        self._identity = identity
        self.ticket = parse(read_file(place.removeprefix("@")))

    @property
    def port(self) -> int:
        return self.ticket.addresses[0][1]

    def require_identity(self, fingerprint: bytes) -> None:
        """Refuse a ticket that leads its nodes to another coordinator."""
        expected = self.ticket.fingerprint
        if not hmac.compare_digest(expected, fingerprint):
            raise UsageError(
                f"the ticket in {self.place} is not for the identity in {self._identity}",
                code="W5-124",
                why=f"the ticket pins {shown(expected)}, and the identity is {shown(fingerprint)}: its nodes"
                " would not come",
                fix="name the folder for which the ticket was made, or make another:  w5xde ticket new"
                f" --offline --identity {self._identity} --advertise HOST",
            )

    def row(self, now: float) -> TicketRow:
        """What the register of the run must know of it."""
        kept = _rows(self._identity).tickets.get(self.ticket.id.hex())
        if kept is None:
            return _row(self.ticket, LABEL, now, None)
        if not hmac.compare_digest(kept.sha256, self.ticket.secret.digest().hex()):
            raise UsageError(
                f"the ticket in {self.place} has not the secret with which it was made",
                code="W5-124",
                fix="use the file that  w5xde ticket new --offline --out FILE  wrote",
            )
        return kept

    def expired(self, now: float) -> str:
        """A sentence if no other node can join with it; empty as long as it is valid."""
        if not self.ticket.expired(now):
            return ""
        return f"the ticket in {self.place} has {expired_ago(self.ticket.expires_at, now)}"

    def misfit(self, port: int, *, is_local: bool) -> str:
        """Why nodes may not get to this port by the addresses of the ticket; empty if they do.

        `is_local`: the coordinator listens for this machine alone. Raises UsageError if they cannot.
        """
        hosts = [host for host, _ in self.ticket.addresses]
        if is_local and not any(is_here(host) for host in hosts):
            raise UsageError(
                f"the ticket in {self.place} names {', '.join(hosts)}, and this run listens for its own"
                " machine alone",
                code=MISFIT,
                fix="add  --host 0.0.0.0 , or make a ticket with  --advertise 127.0.0.1",
            )
        if port == self.port:
            return ""
        return (
            f"{MISFIT}: the ticket in {self.place} names port {self.port}, and this run listens on {port}:"
            " its nodes come only if something forwards that port"
        )
