"""What can be typed: the commands of `w5xde`, their arguments and flags, and the help with its examples.

Flags are made from the schema of the settings, which also checks their values. Performs nothing, and imports
no torch, so that help and mistakes are shown at once.
"""

from __future__ import annotations

import argparse
import difflib
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args, get_origin

import w5xde
from w5xde.cli.help_format import HelpFormat
from w5xde.cli.ticket_command import add_ticket_parser
from w5xde.errors import UsageError
from w5xde.specs.command_settings import COMMAND_SETTINGS, FEW_SETTINGS
from w5xde.specs.setting_help import default_of, description, grouped, is_shown, setting_type

_ABOUT = """Train one PyTorch model on every machine you have."""

_OVERVIEW = """examples:
  w5xde demo                                      see it train on handwritten digits, here and now
  w5xde train train.py --nodes 4 --epochs 5       all on this machine, nodes are processes
  w5xde serve train.py --host 0.0.0.0             own model and data; prints the line for others to join
  w5xde join TICKET                               help a run from another machine, by the ticket it printed
  w5xde train --resume latest                     go on with a run that was stopped or killed
  w5xde show latest                               see a run in a browser
  w5xde audit latest                              count again: did every sample count exactly once?
  w5xde explain W5-103                            more about an error
  w5xde doctor                                    what works on this machine, and how fast
  w5xde deploy k8s train.py --image IMAGE         files that let a cluster run it, restarts included

settings: flag, then W5XDE_* (W5XDE_BATCH_SIZE=64), then w5xde.toml (batch-size = 64), then the job's own,
  then default.
  w5xde COMMAND --help lists those that most people use, --help-all lists every one."""

BENCH_ABOUT = (
    "measure: time to a loss, the first system's benchmark and stages, codecs, exchange, links, peers,"
    " engines, costs, scale"
)

DEPLOY_ABOUT = "print the files with which an engine runs a job: Slurm, Kubernetes (k8s) or systemd"

_JOB = "train.py, train.py:name or package.module:name"
_JOB_OR_RESUME = {
    "metavar": "JOB",
    "nargs": "?",
    "help": f"{_JOB}; with --resume the default is the job of the run",
}
_PRINT_CONFIG = {
    "action": "store_true",
    "help": "print every setting, its value and where it comes from, and do not train",
}
_RUN = {"metavar": "RUN", "help": "name of a run, its folder, or latest"}


@dataclass(frozen=True, slots=True)
class _Command:
    """One command's help, and what it is given besides settings, as `add_argument` takes it."""

    about: str
    examples: str
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)


_COMMANDS = {
    "train": _Command(
        "train on all cores of this machine; nodes are processes, and others may join",
        """examples:
  w5xde train train.py                            as many nodes as fit this machine
  w5xde train train.py --nodes 4                  or four
  w5xde train train.py:small --steps 1000 --batch-size 64 --batches-per-step 16
  w5xde train train.py --mode async --seconds 60 --json > result.json
  w5xde train --resume latest --epochs 20         go on with the last run, for longer
  w5xde train train.py --name a --resume auto     begin run a or go on with it, always by this line
  w5xde train train.py --durability step          no step is ever redone, whatever is killed
  w5xde train train.py --page                     and see it in a browser
  w5xde train train.py --print-config             which settings would be used, and who says so""",
        {"job": _JOB_OR_RESUME, "--print-config": _PRINT_CONFIG},
    ),
    "serve": _Command(
        "own the model and the data, and wait for nodes",
        """examples:
  w5xde serve train.py                            only this machine can join
  w5xde serve train.py --host 0.0.0.0             every machine that reaches this one and has a ticket
  w5xde serve train.py --ship helper.py,layers    modules beside the job go with it to nodes without a copy
  w5xde serve train.py --ticket-file ticket       also write the ticket to a file (mode 0600)
  w5xde serve train.py --identity keys --ticket @ticket    both made before the run (w5xde ticket new)
  w5xde serve train.py --nodes 2 --name tuesday   with two nodes of its own
  w5xde serve train.py --resume tuesday           go on with it; nodes come back by themselves
  w5xde serve train.py --name a --resume auto     begin run a or go on with it, always by this line""",
        {"job": _JOB_OR_RESUME, "--print-config": _PRINT_CONFIG},
    ),
    "join": _Command(
        "work for a coordinator, with all cores of this machine",
        """examples:
  w5xde join w57h…2k                              the line that w5xde serve prints; shows the job and asks
  w5xde join w57h…2k train.py                     with a copy of the job that lies here
  w5xde join w57h…2k --nodes 2                    with two nodes, not as many as fit
  w5xde join @ticket --name big-box               read the ticket from a file, so that ps does not show it
  w5xde join @shared/ticket --wait forever        start before the coordinator, and follow it
  w5xde join @ticket --accept-code 9b1c…e4        in a script: run this code and no other
  w5xde join - train.py < ticket                  or from standard input
  W5XDE_TICKET=w57h…2k w5xde join                 or from the environment""",
        {
            "ticket": {
                "metavar": "TICKET",
                "nargs": "?",
                "help": "the ticket, @FILE that holds it (read again before each connection), or - for"
                " standard input (default: W5XDE_TICKET)",
            },
            "job": {
                "metavar": "JOB",
                "nargs": "?",
                "help": f"{_JOB} (default: the coordinator's own, which is shown before it runs)",
            },
        },
    ),
    "demo": _Command(
        "train on handwritten digits with three nodes, and compare with one process",
        """examples:
  w5xde demo
  w5xde demo --nodes 5 --json
  w5xde demo --page                               and see it in a browser
  w5xde demo --chaos                              the same while nodes and the coordinator are killed""",
        {
            "--chaos": {
                "action": "store_true",
                "help": "kill and freeze nodes and the coordinator meanwhile, and audit the run",
            }
        },
    ),
    "audit": _Command(
        "recompute from a run's ledger that every batch was applied exactly once",
        """examples:
  w5xde audit latest
  w5xde audit tuesday --json
exit code 0 only if the promise held""",
        {"run": _RUN},
    ),
    "show": _Command(
        "show a run in a browser, while it trains or afterwards; several to compare them",
        """examples:
  w5xde show                                      the newest run
  w5xde show tuesday                              a run by its name
  w5xde show tuesday wednesday                    compare up to eight
  w5xde show tuesday --html tuesday.html          one file that opens from disk, to keep or to send
  w5xde show --host 0.0.0.0 --read-only           for other machines, with TLS""",
        {
            "run": {
                "metavar": "RUN",
                "nargs": "*",
                "help": "names of runs, or their folders (default: latest)",
            },
            "--html": {"metavar": "FILE", "help": "write the page to this file instead"},
            "--host": {
                "metavar": "HOST",
                "dest": "page_host",
                "default": "127.0.0.1",
                "help": "address to listen on; with another one than this machine's own, the page uses TLS"
                " (default: 127.0.0.1)",
            },
            "--port": {
                "metavar": "N",
                "dest": "page_port",
                "type": int,
                "help": "port to listen on (default: 8050, or any free one)",
            },
            "--open": {
                "action": argparse.BooleanOptionalAction,
                "help": "open a browser (default: if this is a terminal on a desktop)",
            },
            "--read-only": {"action": "store_true", "help": "whoever has the link may only look"},
            "--parent": {"type": int, "help": argparse.SUPPRESS},
        },
    ),
    "export": _Command(
        "write the weights of a run's newest checkpoint to a file that other programs read",
        """examples:
  w5xde export latest --to safetensors
  w5xde export tuesday --to pt --out model.pt     read it with torch.load(..., weights_only=True)
  w5xde export tuesday --best                     the weights of the best evaluation""",
        {
            "run": _RUN,
            "--to": {"choices": ["safetensors", "pt"], "default": "safetensors", "help": "format"},
            "--out": {"metavar": "FILE", "help": "where to (default: RUN.safetensors or RUN.pt)"},
            "--best": {"action": "store_true", "help": "the weights that SaveBest kept, and not the newest"},
        },
    ),
    "explain": _Command(
        "say more about an error: why it happens, what to do, an example",
        """examples:
  w5xde explain W5-103
  w5xde explain 103 --json
  w5xde explain                                   list all of them""",
        {"error": {"metavar": "CODE", "nargs": "?", "help": "the code of an error: W5-103 or 103"}},
    ),
    "doctor": _Command(
        "check this machine, and the way to a coordinator: what works, what does not, how fast",
        """examples:
  w5xde doctor
  w5xde doctor @ticket                            and whether that coordinator lets this machine in
  w5xde doctor @ticket train.py                   and how much of this machine a run over this link would use
  w5xde doctor 192.168.1.20:5555                  or only whether it can be reached
  w5xde doctor --runs /data/runs --json
exit code 1 if there is an error; a warning alone costs speed or comfort""",
        {
            "target": {
                "metavar": "TICKET",
                "nargs": "?",
                "help": "a coordinator to look for: a ticket, @FILE or HOST:PORT",
            },
            "job": {
                "metavar": "JOB",
                "nargs": "?",
                "help": f"with a ticket: time a step of this job ({_JOB}), measure the link, and predict"
                " how much of this machine --mode sync and --mode rounds would use",
            },
        },
    ),
}
# What the functions that perform commands are given besides settings.
ARGUMENTS = {
    str(options.get("dest", name.removeprefix("--").replace("-", "_")))
    for each in _COMMANDS.values()
    for name, options in each.arguments.items()
} | {"asked"}
HELP_ALL = "--help-all"
# Settings with another flag: help shows the first.
_FLAGS = {
    "node_name": ["--name", "--node-name"],
    "devices": ["--devices", "--device"],
    "known_ticket": ["--ticket", "--known-ticket"],
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, and suggests the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, code="W5-210", fix=f"{self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments; of those that the command does not know, say what was meant."""
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            commands, chosen = _commands_of(self), [vars(given)[group.dest] for group in _groups_of(self)]
            self._refuse(unknown[0], commands.pop(chosen[0]) if chosen else self, commands)
        return given

    @staticmethod
    def _refuse(unknown: str, parser: argparse.ArgumentParser, others: dict[str, Any]) -> NoReturn:
        """Refuse a word that `parser`, that of the command, does not know."""
        flag = unknown.split("=", maxsplit=1)[0]
        if not flag.startswith("-"):
            parser.error(f"{unknown} is one word too many")
        having = [name for name, other in others.items() if flag in _flags_of(other)]
        if having:
            have = "has it" if len(having) == 1 else "have it"
            parser.error(f"{parser.prog} has no flag {flag}; {' and '.join(having)} {have}")
        near = difflib.get_close_matches(flag, _flags_of(parser), n=1, cutoff=0.5)
        parser.error(f"unknown flag {unknown}" + (f". Did you mean {near[0]}?" if near else ""))


def _groups_of(parser: Any) -> list[Any]:
    """The groups of commands that a parser has: one, or none."""
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


def _commands_of(parser: Any) -> dict[str, Any]:
    """The parser of each command that a parser has."""
    return {name: command for group in _groups_of(parser) for name, command in group.choices.items()}


def _flags_of(parser: Any) -> list[str]:
    """The flags of a parser, and of its commands."""
    own = [flag for action in parser._actions for flag in action.option_strings]
    return own + [flag for command in _commands_of(parser).values() for flag in _flags_of(command)]


def build_parser(*, helps_all: bool = False) -> Parser:
    """The parser of all commands; its help shows the settings that most people use, or all of them."""
    parser = Parser(
        prog="w5xde", description=_ABOUT, epilog=_OVERVIEW, formatter_class=HelpFormat, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"w5xde {w5xde.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, each in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=each.about,
            description=each.about,
            epilog=each.examples,
            formatter_class=HelpFormat,
            allow_abbrev=False,
            usage=_usage(name, each),
        )
        if len(COMMAND_SETTINGS[name]) > FEW_SETTINGS:
            # `cli/main.py` looks for it before it parses.
            command.add_argument(HELP_ALL, action="store_true", help="show every setting and exit")
        for argument, options in each.arguments.items():
            command.add_argument(argument, **options)
        for title, group in grouped(name).items():
            place = command.add_argument_group(title)
            for setting in group:
                _add_flag(place, name, setting, is_shown=is_shown(name, setting, all_of_them=helps_all))
    add_ticket_parser(commands)
    commands.add_parser("bench", help=BENCH_ABOUT, add_help=False)
    commands.add_parser("deploy", help=DEPLOY_ABOUT, add_help=False)
    return parser


def _usage(name: str, command: _Command) -> str:
    """The first line of help. Without the flags, which argparse would list a second time."""
    forms = {"?": "[{}]", "*": "[{} ...]"}
    given = [
        forms.get(options.get("nargs", ""), "{}").format(options["metavar"])
        for argument, options in command.arguments.items()
        if not argument.startswith("-")
    ]
    return " ".join(["w5xde", name, *given, "[options]"])


def _add_flag(parser: argparse._ActionsContainer, command: str, setting: str, *, is_shown: bool) -> None:
    """Add the flag of one setting; the schema checks its value later, with all others."""
    kind, text, default = setting_type(setting), description(setting), default_of(command, setting)
    if default not in (None, False):
        text += f" (default: {'on' if default is True else default})"
    flag, *others = _FLAGS.get(setting, [f"--{setting.replace('_', '-')}"])
    text = text.replace("%", "%%") if is_shown else argparse.SUPPRESS
    options: dict[str, Any] = {"dest": setting, "help": text}
    if kind == bool | None or (kind is bool and default is True):
        options["action"] = argparse.BooleanOptionalAction
    elif kind is bool:
        options |= {"action": "store_true", "default": None}
    else:
        options["metavar"] = _metavar(command, setting, kind)
    parser.add_argument(flag, **options)
    for other in others:
        parser.add_argument(other, **options | {"help": argparse.SUPPRESS})


def _metavar(command: str, setting: str, kind: Any) -> str:
    if setting == "nodes":
        return "N|MIN..MAX|auto" if "engine" in COMMAND_SETTINGS[command] else "N|auto"
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if "int" in str(kind):
        return "N"
    return "X" if "float" in str(kind) else setting.upper().split("_")[-1]
