"""The actions of `w5xde ticket`: each changes or reads the register of a run and returns what to print.

    w5xde ticket new RUN [--lifetime 24h|90m|7d|never] [--uses 100|any] [--label TEXT] [--out FILE] [--qr]
    w5xde ticket new --offline --identity DIR --advertise HOSTS [--port 5555] [as above]
    w5xde ticket list RUN [--json]
    w5xde ticket revoke RUN TICKET [--turn-out] [--json]
    w5xde ticket ban RUN NODE [--reason TEXT] [--json]
    w5xde ticket unban RUN NODE [--json]

RUN is a name, a folder or `latest`; TICKET an id from the list, or its beginning; NODE an id from the list,
or the name that the node has in the run. The coordinator may be running or not. Only `new` shows a ticket:
nothing keeps its secret, so there is no `ticket show`. Knows no arguments and no terminal.
"""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w5xde.cli.qr import qr_lines
from w5xde.errors import UsageError
from w5xde.runtime.admission import private_files
from w5xde.runtime.admission.offline_tickets import LABEL as OFFLINE_LABEL
from w5xde.runtime.admission.offline_tickets import LIFETIME_SECONDS, USES, make_offline
from w5xde.runtime.admission.register import TicketRegister
from w5xde.runtime.admission.register_rows import RegisteredNode, TicketRow
from w5xde.runtime.net.sockets import is_here
from w5xde.specs import run_settings
from w5xde.specs.setting_error import SettingError
from w5xde.ticket import Ticket, join_line, shown

# Enough to tell tickets apart and to name them.
_ID_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Output:
    """What an action prints: with `--json`, and without."""

    data: dict[str, Any]
    lines: list[str]


def parse_lifetime(text: str) -> float | None:
    """Return the seconds of `24h`, `90m`, `7d` or `30` (seconds); None for `never`."""
    try:
        return run_settings.parse_lifetime(text)
    except SettingError as error:
        raise UsageError(str(error), code="W5-117", fix="--lifetime 24h, 90m, 7d, or never") from error


def parse_uses(text: str) -> int | None:
    """Return how many nodes may join with a ticket; None for `any`."""
    try:
        return run_settings.parse_uses(text)
    except SettingError as error:
        raise UsageError(str(error), code="W5-117", fix="--uses 1, 100, or any") from error


@dataclass(frozen=True, slots=True)
class Wanted:
    """A ticket as its user wants it; None means without that limit."""

    lifetime_seconds: float | None = LIFETIME_SECONDS
    uses: int | None = USES
    label: str = ""
    qr: bool = False
    # The file that the ticket goes to, and is not shown then.
    out: str | None = None


def ticket_new(
    folder: Path, now: float, wanted: Wanted | None = None, *, job: str = "JOB", code_sha256: str = ""
) -> Output:
    """Issue a ticket for nodes that train this job. The output holds its secret.

    `code_sha256`: the coordinator sends code with this hash, so that nodes need no copy of the job.
    """
    wanted = wanted or Wanted()
    ticket = TicketRegister(folder).new(
        now, lifetime_seconds=wanted.lifetime_seconds, uses=wanted.uses, label=wanted.label
    )
    facts = {"run": folder.name, "is_clear": ticket.is_clear, "code_sha256": code_sha256 or None}
    lines = []
    if code_sha256:
        lines.append(f"the code of the job comes with it: sha256 {code_sha256}")
    if ticket.is_clear and all(is_here(host) for host, _ in ticket.addresses):
        lines.append("only this machine can join: the run listens for no other")
    elif ticket.is_clear:
        lines.append("this run is in clear text: anybody on the way can read it, this ticket included")
    return _handed_out(ticket, wanted, facts, lines, "" if code_sha256 else job)


def ticket_offline(
    folder: Path, addresses: Sequence[tuple[str, int]], now: float, wanted: Wanted | None = None
) -> Output:
    """Make a ticket for a run that does not exist yet. The output holds its secret."""
    from w5xde.runtime.admission.identity import RunIdentity

    wanted = wanted or Wanted()
    identity = RunIdentity.load_given(folder)
    ticket = make_offline(
        folder,
        identity.fingerprint,
        addresses,
        now,
        lifetime_seconds=wanted.lifetime_seconds,
        uses=wanted.uses,
        label=wanted.label or OFFLINE_LABEL,
    )
    fingerprint = identity.fingerprint.hex()
    facts = {"identity": str(folder), "fingerprint": fingerprint, "identity_is_new": identity.is_new}
    port, file = ticket.addresses[0][1], shlex.quote(f"@{wanted.out}") if wanted.out else "@FILE"
    serve = f"w5xde serve JOB --host 0.0.0.0 --port {port} --identity {shlex.quote(str(folder))}"
    lines = [
        f"identity {shown(identity.fingerprint)} in {folder}{' (new)' if identity.is_new else ''}",
        f"to serve it:  {serve} --ticket {file}",
    ]
    return _handed_out(ticket, wanted, facts, lines)


def _handed_out(
    ticket: Ticket, wanted: Wanted, facts: dict[str, Any], more: list[str], job: str = ""
) -> Output:
    """What is told of a new ticket: it goes to a file, or it is shown this once."""
    text = ticket.to_text()
    if wanted.out is not None:
        private_files.replace(Path(wanted.out), text.encode() + b"\n")
    data = {
        "ticket": text if wanted.out is None else None,
        "file": wanted.out,
        "id": ticket.id.hex(),
        "expires_at": ticket.expires_at or None,
        "uses_max": wanted.uses,
        "addresses": [
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in ticket.addresses
        ],
        **facts,
    }
    until = f"until {_time(ticket.expires_at)}" if ticket.expires_at else "for ever"
    uses = wanted.uses
    count = "any number of nodes" if uses is None else "one node" if uses == 1 else f"{uses} nodes"
    shown_as = text if wanted.out is None else f"@{wanted.out}"
    lines = [join_line(shown_as, job), "", f"ticket {_short(ticket.id.hex())}: {count}, {until}", *more]
    if wanted.qr:
        lines += ["", *(qr_lines(text) or ['for a QR code:  pip install "w5xde[qr]"'])]
    return Output(data, lines)


def ticket_list(folder: Path, now: float) -> Output:
    """List all tickets and nodes of a run."""
    register = TicketRegister(folder)
    tickets, nodes = register.tickets(), register.nodes()
    fingerprint = register.entrance.fingerprint if register.entrance is not None else ""
    data = {
        "run": folder.name,
        "fingerprint": fingerprint or None,
        "tickets": [_ticket_data(row, now) for row in tickets],
        "nodes": [_node_data(row) for row in nodes],
    }
    ticket_cells = [
        (
            _short(row.id),
            row.state(now),
            f"{row.uses} of {row.uses_max}" if row.uses_max else f"{row.uses}",
            _time(row.expires_at) if row.expires_at else "never",
            row.label,
        )
        for row in tickets
    ]
    node_cells = [
        (row.id, row.name, _short(row.ticket), _time(row.joined_at), row.banned or "") for row in nodes
    ]
    lines = [f"run {folder.name}, fingerprint {shown(bytes.fromhex(fingerprint))}", ""]
    lines += _table(("ticket", "state", "used", "expires", "label"), ticket_cells)
    if nodes:
        lines += ["", *_table(("node", "name", "ticket", "joined", "banned"), node_cells)]
    return Output(data, lines)


def ticket_revoke(folder: Path, ticket: str, now: float, *, turn_out: bool = False) -> Output:
    """Admit no other node with this ticket; `turn_out`: ban those that came with it."""
    row, banned = TicketRegister(folder).revoke(ticket, now, turn_out=turn_out)
    data = {
        "run": folder.name,
        "ticket": _ticket_data(row, now),
        "turned_out": [node.id for node in banned],
    }
    lines = [f"ticket {_short(row.id)} is revoked: nobody else comes by it"]
    if turn_out:
        lines.append(f"turned out: {', '.join(map(_called, banned)) or 'nobody'}")
    elif row.uses:
        count = "1 node that came by it stays" if row.uses == 1 else f"{row.uses} nodes that came by it stay"
        lines.append(f"{count}; --turn-out turns out these too")
    return Output(data, lines)


def ticket_ban(folder: Path, node: str, now: float, *, reason: str = "") -> Output:
    """Ban a node."""
    register = TicketRegister(folder)
    banned = register.ban(node, reason)
    # A ban without this hint would promise more than it keeps.
    open_tickets = [
        row.id for row in register.tickets() if row.id == banned.ticket and row.state(now) == "good"
    ]
    data = {"run": folder.name, "banned": [_node_data(banned)], "tickets_still_good": open_tickets}
    lines = [f"banned {_called(banned)}: {_plain(banned.banned or '')}"]
    lines += [
        f"with ticket {_short(ticket)} it could come again from another address; to prevent that:  "
        f"w5xde ticket revoke {folder.name} {_short(ticket)}"
        for ticket in open_tickets
    ]
    return Output(data, lines)


def ticket_unban(folder: Path, node: str) -> Output:
    """Let a banned node come back."""
    found = TicketRegister(folder).unban(node)
    if found.banned is None:
        return Output({"run": folder.name, "unbanned": []}, [f"{_plain(node)} was not banned"])
    line = f"{_called(found)} may come back; it was banned: {_plain(found.banned)}"
    return Output({"run": folder.name, "unbanned": [_node_data(found)]}, [line])


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


def _node_data(row: RegisteredNode) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "ticket": row.ticket,
        "joined_at": row.joined_at,
        "address": row.address or None,
        "banned": row.banned,
    }


def _called(row: RegisteredNode) -> str:
    return f"{_plain(row.name)} ({row.id})"


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    cells = [headings, *(tuple(_plain(cell) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _plain(text: str) -> str:
    """Replace what could control the terminal: strangers chose these names."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _short(ticket_id: str) -> str:
    return ticket_id[:_ID_CHARACTERS]


def _time(seconds: float) -> str:
    return f"{dt.datetime.fromtimestamp(seconds, tz=dt.UTC):%Y-%m-%d %H:%M} UTC"
