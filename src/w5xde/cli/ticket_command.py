"""The arguments of `w5xde ticket`. Knows what may be typed; `cli/tickets.py` knows what it does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w5xde.cli.help_format import HelpFormat
from w5xde.config import Settings
from w5xde.errors import UsageError
from w5xde.runs import find_run, read_manifest

if TYPE_CHECKING:
    from w5xde.cli.tickets import Output

ABOUT = "hand out tickets of a run, list them, take them back, or keep a node out"
_EXAMPLES = """examples:
  w5xde ticket new latest                         one more line to join, for 24 hours and 100 nodes
  w5xde ticket new tuesday --lifetime 7d --uses 1 --qr
  w5xde ticket new --offline --identity keys --advertise box --out ticket
  w5xde serve JOB --host 0.0.0.0 --identity keys --ticket @ticket
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
# Only with --offline: a run that exists knows these.
_OFFLINE = ("identity", "advertise", "port")
_ASKED = (
    "action", "run", "ticket", "node", "lifetime", "uses", "label", "qr", "out", "turn_out", "reason",
    "offline", *_OFFLINE,
)  # fmt: skip
# As that of `serve`.
PORT = 5555


def add_ticket_parser(commands: Any) -> None:
    """Add `ticket` with its actions to the commands."""
    form = {"epilog": _EXAMPLES, "formatter_class": HelpFormat, "allow_abbrev": False}
    parser = commands.add_parser("ticket", help=ABOUT, description=ABOUT, **form)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, about in _ACTIONS.items():
        action = actions.add_parser(name, help=about, description=about, **form)
        run: dict[str, Any] = {"metavar": "RUN", "help": "name of a run, its folder, or latest"}
        if name == "new":
            run |= {"nargs": "?", "help": f"{run['help']}; none with --offline"}
        action.add_argument("run", **run)
        if name == "new":
            action.add_argument("--lifetime", default="24h", help="24h, 90m, 7d or never (default: 24h)")
            text = "how many nodes may come by it, or any (default: 100)"
            action.add_argument("--uses", default="100", metavar="N", help=text)
            action.add_argument("--label", default="", metavar="TEXT", help="to know it again in the list")
            action.add_argument("--qr", action="store_true", help="show it as a QR code too")
            text = "write it into this file, which only its owner can read, and do not show it"
            action.add_argument("--out", metavar="FILE", help=text)
            _add_offline(action.add_argument_group("before there is a run"))
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


def _add_offline(group: Any) -> None:
    text = "make it for a run that will be started with --identity DIR --ticket @FILE"
    group.add_argument("--offline", action="store_true", help=text)
    text = "folder with the key of the coordinator; the key is made if there is none"
    group.add_argument("--identity", metavar="DIR", help=text)
    text = "hosts at which nodes will find the coordinator, with commas"
    group.add_argument("--advertise", metavar="HOSTS", help=text)
    group.add_argument("--port", type=int, metavar="N", help=f"its port (default: {PORT})")


def take_asked(given: dict[str, Any]) -> dict[str, Any]:
    """Move the arguments that are no settings into one dictionary, `asked`."""
    asked = {key: given.pop(key) for key in _ASKED if key in given}
    return {**given, "asked": asked}


def run_ticket(settings: Settings, asked: dict[str, Any]) -> dict[str, Any]:
    """Do what was asked and print it; returns what --json prints."""
    output = _new(settings, asked) if asked["action"] == "new" else _changed(settings, asked)
    if not settings.json:
        print("\n".join(output.lines))
    return output.data


def _changed(settings: Settings, asked: dict[str, Any]) -> Output:
    from w5xde.cli import tickets

    folder, now = find_run(settings.runs, asked["run"]), time.time()
    match asked["action"]:
        case "list":
            return tickets.ticket_list(folder, now)
        case "revoke":
            return tickets.ticket_revoke(folder, asked["ticket"], now, turn_out=asked["turn_out"])
        case "unban":
            return tickets.ticket_unban(folder, asked["node"])
        case _:
            return tickets.ticket_ban(folder, asked["node"], now, reason=asked["reason"])


def _new(settings: Settings, asked: dict[str, Any]) -> Output:
    from w5xde.cli import tickets

    now = time.time()
    wanted = tickets.Wanted(
        tickets.parse_lifetime(asked["lifetime"]),
        tickets.parse_uses(asked["uses"]),
        label=asked["label"],
        qr=asked["qr"],
        out=asked["out"],
    )
    if asked["offline"]:
        _require(asked["run"] is None, "--offline makes a ticket before there is a run", "leave out RUN")
        _require(asked["identity"], "--offline makes a ticket for an identity", "add  --identity DIR")
        fix = "add  --advertise HOST : the name or address by which nodes will reach that machine"
        _require(asked["advertise"], "at which machine will the coordinator be?", fix)
        hosts = [host.strip() for host in asked["advertise"].split(",")]
        port = PORT if asked["port"] is None else asked["port"]
        return tickets.ticket_offline(Path(asked["identity"]), [(host, port) for host in hosts], now, wanted)
    for name in _OFFLINE:
        _require(asked[name] is None, f"--{name} is for tickets without a run", "add  --offline")
    _require(asked["run"], "for which run?", "name it, or latest; before there is one, use --offline")
    folder = find_run(settings.runs, asked["run"])
    manifest = read_manifest(folder)
    job, code = str(manifest.get("job", "JOB")), str(manifest.get("code_sha256") or "")
    return tickets.ticket_new(folder, now, wanted, job=job, code_sha256=code)


def _require(is_so: object, what: str, fix: str) -> None:
    if not is_so:
        raise UsageError(what, code="W5-210", fix=fix)
