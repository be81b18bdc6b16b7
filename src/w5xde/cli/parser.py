"""What can be typed: the commands of `w5xde`, their arguments and flags, and the help with its examples.

Flags are made from the schema of the settings, which also checks their values. Performs nothing, and imports
no torch, so that help and mistakes are shown at once.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from msgspec import Meta

import w5xde
from w5xde.cli.ticket_command import add_ticket_parser
from w5xde.config import Settings, field_types
from w5xde.errors import UsageError
from w5xde.specs.command_settings import COMMAND_DEFAULTS, COMMAND_SETTINGS

_ABOUT = """Train one PyTorch model on every machine you have."""

_OVERVIEW = """examples:
  w5xde demo                                      see it train on handwritten digits, here and now
  w5xde train train.py --nodes 4 --epochs 5       all on this machine, nodes are processes
  w5xde serve train.py --host 0.0.0.0             own model and data; prints the line for others to join
  w5xde join TICKET train.py                      help a run from another machine, by the ticket it printed
  w5xde train --resume latest                     go on with a run that was stopped or killed
  w5xde audit latest                              count again: did every sample count exactly once?
  w5xde explain W5-103                            more about an error
  w5xde doctor                                    what works on this machine, and how fast

settings: flag, then W5XDE_* (W5XDE_BATCH_SIZE=64), then w5xde.toml (batch-size = 64), then default.
  w5xde COMMAND --help lists them."""

BENCH_ABOUT = (
    "measure: time to a loss, the first system's benchmark and stages, codecs, exchange, links, peers, costs,"
    " scale"
)

_JOB = "train.py, train.py:name or package.module:name"
_JOB_OR_RESUME = {
    "metavar": "JOB",
    "nargs": "?",
    "help": f"{_JOB}; with --resume the default is the job of the run",
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
        "train on this machine; nodes are processes, and others may join",
        """examples:
  w5xde train train.py --nodes 4
  w5xde train train.py:small --steps 1000 --batch-size 64 --batches-per-step 16
  w5xde train train.py --mode async --seconds 60 --json > result.json
  w5xde train --resume latest --epochs 20         go on with the last run, for longer
  w5xde train train.py --durability step          no step is ever redone, whatever is killed""",
        {"job": _JOB_OR_RESUME},
    ),
    "serve": _Command(
        "own the model and the data, and wait for nodes",
        """examples:
  w5xde serve train.py                            only this machine can join
  w5xde serve train.py --host 0.0.0.0             every machine that reaches this one and has a ticket
  w5xde serve train.py --ticket-file ticket       also write the ticket to a file (mode 0600)
  w5xde serve train.py --nodes 2 --name tuesday   with two nodes of its own
  w5xde serve train.py --resume tuesday           go on with it; nodes come back by themselves""",
        {"job": _JOB_OR_RESUME},
    ),
    "join": _Command(
        "work for a coordinator",
        """examples:
  w5xde join w57h…2k train.py                     TICKET JOB: the line that w5xde serve prints
  w5xde join @ticket train.py --name big-box      read the ticket from a file, so that ps does not show it
  w5xde join - train.py < ticket                  or from standard input
  W5XDE_TICKET=w57h…2k w5xde join train.py        or from the environment""",
        {
            "ticket": {
                "metavar": "TICKET",
                "nargs": "?",
                "help": "the ticket, @FILE that holds it, or - for standard input (default: W5XDE_TICKET)",
            },
            "job": {"metavar": "JOB", "help": _JOB},
        },
    ),
    "demo": _Command(
        "train on handwritten digits with three nodes, and compare with one process",
        """examples:
  w5xde demo
  w5xde demo --nodes 5 --json
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
    "export": _Command(
        "write the weights of a run's newest checkpoint to a file that other programs read",
        """examples:
  w5xde export latest --to safetensors
  w5xde export tuesday --to pt --out model.pt     read it with torch.load(..., weights_only=True)""",
        {
            "run": _RUN,
            "--to": {"choices": ["safetensors", "pt"], "default": "safetensors", "help": "format"},
            "--out": {"metavar": "FILE", "help": "where to (default: RUN.safetensors or RUN.pt)"},
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
ARGUMENTS = {name.removeprefix("--") for each in _COMMANDS.values() for name in each.arguments} | {"asked"}
_DEFAULTS = Settings()


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, and suggests the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        fix = f"{self.prog} --help"
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        if unknown != message.split(" ", maxsplit=1)[0] and unknown.startswith("-"):
            known = [flag for action in self._all_actions() for flag in action.option_strings]
            near = difflib.get_close_matches(unknown.split("=")[0], known, n=1, cutoff=0.5)
            message = f"unknown flag {unknown}" + (f". Did you mean {near[0]}?" if near else "")
        raise UsageError(message, code="W5-210", fix=fix)

    def _all_actions(self) -> Iterator[argparse.Action]:
        yield from self._actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._actions


def build_parser() -> Parser:
    """The parser of all commands."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="w5xde", description=_ABOUT, epilog=_OVERVIEW, formatter_class=plain, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"w5xde {w5xde.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    types = field_types()
    for name, each in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=each.about,
            description=each.about,
            epilog=each.examples,
            formatter_class=plain,
            allow_abbrev=False,
        )
        for argument, options in each.arguments.items():
            command.add_argument(argument, **options)
        for setting in COMMAND_SETTINGS[name]:
            _add_flag(command, name, setting, types[setting])
    add_ticket_parser(commands)
    commands.add_parser("bench", help=BENCH_ABOUT, add_help=False)
    return parser


def _add_flag(parser: argparse.ArgumentParser, command: str, setting: str, annotated: Any) -> None:
    """Add the flag of one setting; the schema checks its value later, with all others."""
    base, *extras = get_args(annotated) if get_origin(annotated) is Annotated else (annotated,)
    text = next((extra.description for extra in extras if isinstance(extra, Meta) and extra.description), "")
    default = COMMAND_DEFAULTS.get(command, {}).get(setting, getattr(_DEFAULTS, setting))
    if default not in (None, False):
        text += f" (default: {'on' if default is True else default})"
    flag = f"--{setting.replace('_', '-')}"
    flags = ["--name", flag] if setting == "node_name" else [flag]
    text = text.replace("%", "%%")
    if base is bool and default is True:
        parser.add_argument(*flags, dest=setting, help=text, action=argparse.BooleanOptionalAction)
    elif base is bool:
        parser.add_argument(*flags, dest=setting, help=text, action="store_true", default=None)
    elif get_origin(base) is Literal:
        parser.add_argument(*flags, dest=setting, help=text, metavar="|".join(get_args(base)))
    else:
        metavar = (
            "N" if "int" in str(base) else "X" if "float" in str(base) else setting.upper().split("_")[-1]
        )
        parser.add_argument(*flags, dest=setting, help=text, metavar=metavar)
