"""What `w5xde ticket` does, as data and as lines of text; the coordinator may run meanwhile, and need not.

    w5xde ticket new RUN [--lifetime 24h|90m|7d|never] [--uses 100|any] [--label TEXT] [--qr] [--json]
    w5xde ticket list RUN [--json]
    w5xde ticket revoke RUN TICKET [--turn-out] [--json]
    w5xde ticket ban RUN NODE [--reason TEXT] [--json]
    w5xde ticket unban RUN NODE [--json]

RUN is what `runs.find_run` understands; TICKET is an id from the list, or how it begins; NODE is an id from
the list, or a name. `--turn-out` also turns out the nodes that came by the ticket. Only `new` ever shows a
ticket: afterwards nobody knows its secret but who was given it, so there is no `ticket show`.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w5xde.errors import UsageError
from w5xde.runtime.admission.qr import qr_lines
from w5xde.runtime.admission.register import LIFETIME_SECONDS, USES, TicketRegister
from w5xde.runtime.admission.register_rows import NodeRow, TicketRow
from w5xde.ticket import join_line, shown

_LIFETIME = re.compile(r"(\d{1,9})\s*([smhd]?)")
_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
# Enough to tell tickets apart and to name them.
_ID_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Told:
    """The outcome of a command: for `--json`, and for people."""

    data: dict[str, Any]
    lines: list[str]


def parse_lifetime(text: str) -> float | None:
    """Seconds from `24h`, `90m`, `7d` or `30` (seconds); None from `never`."""
    if text.strip().lower() == "never":
        return None
    match = _LIFETIME.fullmatch(text.strip().lower())
    if match is None or not int(match[1]):
        raise UsageError(
            f"{text!r} is not a lifetime", code="W5-117", fix="--lifetime 24h, 90m, 7d, or never"
        )
    return float(int(match[1]) * _UNIT_SECONDS[match[2]])


def parse_uses(text: str) -> int | None:
    """How many nodes may come by a ticket; None from `any`."""
    if text.strip().lower() == "any":
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or not int(text):
        raise UsageError(f"{text!r} is not a number of uses", code="W5-117", fix="--uses 1, 100, or any")
    return int(text)


def ticket_new(
    folder: Path,
    now: float,
    *,
    lifetime_seconds: float | None = LIFETIME_SECONDS,
    uses: int | None = USES,
    label: str = "",
    qr: bool = False,
    job: str = "JOB",
) -> Told:
    """Hand out a ticket. What is told holds its secret. `job` is what nodes are to train."""
    ticket = TicketRegister(folder).new(now, lifetime_seconds=lifetime_seconds, uses=uses, label=label)
    text = ticket.to_text()
    data = {
        "run": folder.name,
        "ticket": text,
        "id": ticket.id.hex(),
        "expires_at": ticket.expires_at or None,
        "uses_max": uses,
        "addresses": [
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in ticket.addresses
        ],
        "is_clear": ticket.is_clear,
    }
    until = f"until {_time(ticket.expires_at)}" if ticket.expires_at else "for ever"
    count = "any number of nodes" if uses is None else "one node" if uses == 1 else f"{uses} nodes"
    lines = [join_line(ticket, job), "", f"ticket {_short(ticket.id.hex())}: {count}, {until}"]
    if ticket.is_clear:
        lines.append("this run is in clear text: anybody on the way can read it, this ticket included")
    if qr:
        code = qr_lines(text)
        lines += ["", *(code or ['for a QR code:  pip install "w5xde[qr]"'])]
    return Told(data, lines)


def ticket_list(folder: Path, now: float) -> Told:
    """All tickets and nodes of a run."""
    register = TicketRegister(folder)
    tickets, nodes = register.tickets(), register.nodes()
    fingerprint = register.entrance.fingerprint if register.entrance is not None else ""
    data = {
        "run": folder.name,
        "fingerprint": fingerprint or None,
        "tickets": [_ticket_data(row, now) for row in tickets],
        "nodes": [_node_data(row) for row in nodes],
    }
    lines = [f"run {folder.name}, fingerprint {shown(bytes.fromhex(fingerprint))}", ""]
    lines += _table(
        ("ticket", "state", "used", "expires", "label"),
        [
            (
                _short(row.id),
                row.state(now),
                f"{row.uses} of {row.uses_max}" if row.uses_max else f"{row.uses}",
                _time(row.expires_at) if row.expires_at else "never",
                row.label,
            )
            for row in tickets
        ],
    )
    if nodes:
        lines += [
            "",
            *_table(("node", "name", "ticket", "joined", "banned"), [_node_cells(row) for row in nodes]),
        ]
    return Told(data, lines)


def ticket_revoke(folder: Path, ticket: str, now: float, *, turn_out: bool = False) -> Told:
    """Nobody else comes by this ticket."""
    row, turned_out = TicketRegister(folder).revoke(ticket, now, turn_out=turn_out)
    data = {
        "run": folder.name,
        "ticket": _ticket_data(row, now),
        "turned_out": [node.id for node in turned_out],
    }
    lines = [f"ticket {_short(row.id)} is revoked: nobody else comes by it"]
    if turn_out:
        names = ", ".join(f"{_plain(node.name)} ({node.id})" for node in turned_out)
        lines.append(f"turned out: {names or 'nobody'}")
    elif row.uses:
        count = "1 node that came by it stays" if row.uses == 1 else f"{row.uses} nodes that came by it stay"
        lines.append(f"{count}; --turn-out turns out these too")
    return Told(data, lines)


def ticket_ban(folder: Path, node: str, now: float, *, reason: str = "") -> Told:
    """Keep a node out."""
    register = TicketRegister(folder)
    banned = register.ban(node, reason)
    by_id = {row.id: row for row in register.tickets()}
    # Without a word about it, a ban would promise more than it keeps.
    open_tickets = sorted(
        {row.ticket for row in banned if row.ticket in by_id and by_id[row.ticket].state(now) == "good"}
    )
    data = {
        "run": folder.name,
        "banned": [_node_data(row) for row in banned],
        "tickets_still_good": open_tickets,
    }
    lines = [f"banned {_plain(row.name)} ({row.id}): {_plain(row.banned or '')}" for row in banned]
    lines += [
        f"with ticket {_short(ticket)} it could come again from another address; to prevent that:  "
        f"w5xde ticket revoke {folder.name} {_short(ticket)}"
        for ticket in open_tickets
    ]
    return Told(data, lines)


def ticket_unban(folder: Path, node: str) -> Told:
    """Let a node come back that was banned or turned out."""
    register = TicketRegister(folder)
    found = register.unban(node)
    data = {"run": folder.name, "unbanned": [_node_data(row) for row in found]}
    lines = [
        f"{_plain(row.name)} ({row.id}) may come back; it was banned: {_plain(row.banned or '')}"
        for row in found
    ]
    return Told(data, lines or [f"{_plain(node)} was not banned"])


def _ticket_data(row: TicketRow, now: float) -> dict[str, Any]:
    return {
        "id": row.id,
        "label": row.label,
        "state": row.state(now),
        "made_at": row.made_at,
        "expires_at": row.expires_at or None,
        "uses": row.uses,
        "uses_max": row.uses_max or None,
        "revoked_at": row.revoked_at,
    }


def _node_data(row: NodeRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "ticket": row.ticket,
        "joined_at": row.joined_at,
        "address": row.address or None,
        "banned": row.banned,
    }


def _node_cells(row: NodeRow) -> tuple[str, ...]:
    return row.id, row.name, _short(row.ticket), _time(row.joined_at), row.banned or ""


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [headings, *(tuple(_plain(cell) for cell in row) for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(headings))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _plain(text: str) -> str:
    """Names come from strangers: nothing in them may speak to the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _short(ticket_id: str) -> str:
    return ticket_id[:_ID_SHOWN]


def _time(seconds: float) -> str:
    moment = dt.datetime.fromtimestamp(seconds, tz=dt.UTC)
    return f"{moment:%Y-%m-%d %H:%M} UTC"
