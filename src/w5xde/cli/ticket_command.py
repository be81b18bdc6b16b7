"""The arguments of `w5xde ticket`. Knows what may be typed; `cli/tickets.py` knows what it does."""

from __future__ import annotations

import time
from typing import Any

from w5xde.cli.help_format import HelpFormat
from w5xde.config import Settings
from w5xde.runs import find_run, read_manifest

ABOUT = "hand out tickets of a run, list them, take them back, or keep a node out"
_EXAMPLES = """examples:
  w5xde ticket new latest                         one more line to join, for 24 hours and 100 nodes
  w5xde ticket new tuesday --lifetime 7d --uses 1 --qr
  w5xde ticket list tuesday                       all tickets, and the nodes that came by them
  w5xde ticket revoke tuesday 3fa9c1d0            no other node joins with it; those that did stay
  w5xde ticket ban tuesday lab-3                  this node goes, and does not come back
  w5xde ticket unban tuesday lab-3                it may come back: by hand, with the same state folder"""
_ACTIONS = {
    "new": "make a ticket; this is the only time it is shown",
    "list": "show all tickets and nodes of a run, without their secrets",
    "revoke": "let nobody else in by a ticket",
    "ban": "evict a node, and let it join no more",
    "unban": "let a node come back that was banned, or turned out for bad updates",
}
_ASKED = ("action", "run", "ticket", "node", "lifetime", "uses", "label", "qr", "turn_out", "reason")


def add_ticket_parser(commands: Any) -> None:
    """Add `ticket` with its actions to the commands."""
    form = {"epilog": _EXAMPLES, "formatter_class": HelpFormat, "allow_abbrev": False}
    parser = commands.add_parser("ticket", help=ABOUT, description=ABOUT, **form)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, about in _ACTIONS.items():
        action = actions.add_parser(name, help=about, description=about, **form)
        action.add_argument("run", metavar="RUN", help="name of a run, its folder, or latest")
        if name == "new":
            action.add_argument("--lifetime", default="24h", help="24h, 90m, 7d or never (default: 24h)")
            text = "how many nodes may come by it, or any (default: 100)"
            action.add_argument("--uses", default="100", metavar="N", help=text)
            action.add_argument("--label", default="", metavar="TEXT", help="to know it again in the list")
            action.add_argument("--qr", action="store_true", help="show it as a QR code too")
        elif name == "revoke":
            action.add_argument("ticket", metavar="TICKET", help="its id in the list, or how that begins")
            action.add_argument(
                "--turn-out", action="store_true", help="also evict the nodes that joined with it"
            )
        elif name in ("ban", "unban"):
            action.add_argument("node", metavar="NODE", help="its id in the list, or its name in the run")
        if name == "ban":
            action.add_argument("--reason", default="", metavar="TEXT", help="what the node is told")
        action.add_argument("--runs", help="folder in which runs are kept (default: runs)")
        action.add_argument("--json", action="store_true", default=None, help="print one JSON object")


def take_asked(given: dict[str, Any]) -> dict[str, Any]:
    """Move the arguments that are no settings into one dictionary, `asked`."""
    asked = {key: given.pop(key) for key in _ASKED if key in given}
    return {**given, "asked": asked}


def run_ticket(settings: Settings, asked: dict[str, Any]) -> dict[str, Any]:
    """Do what was asked and print it; returns what --json prints."""
    from w5xde.cli import tickets

    folder, now = find_run(settings.runs, asked["run"]), time.time()
    match asked["action"]:
        case "new":
            manifest = read_manifest(folder)
            output = tickets.ticket_new(
                folder,
                now,
                lifetime_seconds=tickets.parse_lifetime(asked["lifetime"]),
                uses=tickets.parse_uses(asked["uses"]),
                label=asked["label"],
                qr=asked["qr"],
                job=str(manifest.get("job", "JOB")),
                code_sha256=str(manifest.get("code_sha256") or ""),
            )
        case "list":
            output = tickets.ticket_list(folder, now)
        case "revoke":
            output = tickets.ticket_revoke(folder, asked["ticket"], now, turn_out=asked["turn_out"])
        case "unban":
            output = tickets.ticket_unban(folder, asked["node"])
        case _:
            output = tickets.ticket_ban(folder, asked["node"], now, reason=asked["reason"])
    if not settings.json:
        print("\n".join(output.lines))
    return output.data
