"""The command `w5xde`: train, serve, join, ticket, demo, audit, export, explain, doctor and bench.

Flags are made from the settings' schema. Nothing here imports torch before a command needs it, so that
help and mistakes are told at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NoReturn, get_args, get_origin

from msgspec import Meta

import w5xde
from w5xde.cli.ticket_command import add_ticket_parser, run_ticket, take_asked
from w5xde.config import COMMAND_DEFAULTS, COMMAND_SETTINGS, Settings, field_types
from w5xde.errors import UsageError, W5xdeError
from w5xde.runs import find_run, read_manifest
from w5xde.sanitize import to_json
from w5xde.setting_sources import resolve

INTERRUPTED = 130
# An audit found that the promise did not hold, or the doctor that something does not work.
NOT_CLEAN = 1
# What a command is given besides settings.
_PLACES = ("ticket", "job", "run", "to", "out", "chaos", "error", "target", "asked")

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

BENCH_ABOUT = "measure: the first system's benchmark, codecs, exchange, links, peers, costs, scale"

_JOB_HELP = "train.py, train.py:name or package.module:name"

_COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "train on this machine; nodes are processes, and others may join",
        """examples:
  w5xde train train.py --nodes 4
  w5xde train train.py:small --steps 1000 --batch-size 64 --batches-per-step 16
  w5xde train train.py --mode async --seconds 60 --json > result.json
  w5xde train --resume latest --epochs 20         go on with the last run, for longer
  w5xde train train.py --durability step          no step is ever redone, whatever is killed""",
    ),
    "serve": (
        "own the model and the data, and wait for nodes",
        """examples:
  w5xde serve train.py                            only this machine can join
  w5xde serve train.py --host 0.0.0.0             every machine that reaches this one and has a ticket
  w5xde serve train.py --ticket-file ticket       the ticket in a file (0600) as well
  w5xde serve train.py --nodes 2 --name tuesday   with two nodes of its own
  w5xde serve train.py --resume tuesday           go on with it; nodes come back by themselves""",
    ),
    "join": (
        "work for a coordinator",
        """examples:
  w5xde join w57h…2k train.py                     TICKET JOB: the line that w5xde serve prints
  w5xde join @ticket train.py --name big-box      the ticket is in a file, where nobody else sees it
  w5xde join - train.py < ticket                  or on standard input
  W5XDE_TICKET=w57h…2k w5xde join train.py        or in the environment""",
    ),
    "demo": (
        "train on handwritten digits with three nodes, and compare with one process",
        """examples:
  w5xde demo
  w5xde demo --nodes 5 --json
  w5xde demo --chaos                              the same while nodes and the coordinator are killed""",
    ),
    "audit": (
        "recompute from a run's ledger that every batch was applied exactly once",
        """examples:
  w5xde audit latest
  w5xde audit tuesday --json
exit code 0 only if the promise held""",
    ),
    "export": (
        "write a run's newest weights to a file that others read",
        """examples:
  w5xde export latest --to safetensors
  w5xde export tuesday --to pt --out model.pt     read it with torch.load(..., weights_only=True)""",
    ),
    "explain": (
        "say more about an error: why it happens, what to do, an example",
        """examples:
  w5xde explain W5-103
  w5xde explain 103 --json
  w5xde explain                                   list all of them""",
    ),
    "doctor": (
        "look at this machine, and at the way to a coordinator: what works, what does not, how fast",
        """examples:
  w5xde doctor
  w5xde doctor @ticket                            and whether that coordinator lets this machine in
  w5xde doctor 192.168.1.20:5555                  or only whether it can be reached
  w5xde doctor --runs /data/runs --json
exit code 1 if there is an error; a warning alone costs speed or comfort""",
    ),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are our errors."""

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
    plain = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="w5xde", description=_ABOUT, epilog=_OVERVIEW, formatter_class=plain, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"w5xde {w5xde.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    types = field_types()
    for name, (about, examples) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=about, description=about, epilog=examples, formatter_class=plain, allow_abbrev=False
        )
        if name == "join":
            text = "the ticket, @FILE that holds it, or - for standard input (default: W5XDE_TICKET)"
            command.add_argument("ticket", metavar="TICKET", nargs="?", help=text)
        if name in ("audit", "export"):
            command.add_argument("run", metavar="RUN", help="name of a run, its folder, or latest")
        elif name == "join":
            command.add_argument("job", metavar="JOB", help=_JOB_HELP)
        elif name == "explain":
            command.add_argument(
                "error", metavar="CODE", nargs="?", help="the code of an error: W5-103 or 103"
            )
        elif name == "doctor":
            text = "a coordinator to look for: a ticket, @FILE or HOST:PORT"
            command.add_argument("target", metavar="TICKET", nargs="?", help=text)
        elif name != "demo":
            text = f"{_JOB_HELP}; with --resume the run's own if left out"
            command.add_argument("job", metavar="JOB", nargs="?", help=text)
        if name == "demo":
            text = "kill and freeze nodes and the coordinator meanwhile, and audit the run"
            command.add_argument("--chaos", action="store_true", help=text)
        if name == "export":
            command.add_argument("--to", choices=["safetensors", "pt"], default="safetensors", help="format")
            command.add_argument(
                "--out", metavar="FILE", help="where to (default: RUN.safetensors or RUN.pt)"
            )
        for setting in COMMAND_SETTINGS[name]:
            _add_flag(command, name, setting, types[setting])
    add_ticket_parser(commands)
    commands.add_parser("bench", help=BENCH_ABOUT, add_help=False)
    return parser


def _add_flag(parser: argparse.ArgumentParser, command: str, setting: str, annotated: Any) -> None:
    """One flag for one setting; its value is checked by the schema, with all others."""
    base, *extras = get_args(annotated) if get_origin(annotated) is Annotated else (annotated,)
    text = next((extra.description for extra in extras if isinstance(extra, Meta) and extra.description), "")
    default = COMMAND_DEFAULTS[command].get(setting, getattr(_DEFAULTS, setting))
    if default not in (None, False, True):
        text += f" (default: {default})"
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


_DEFAULTS = Settings()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_verbose = _is_verbose(arguments)
    try:
        return _run(arguments)
    except W5xdeError as error:
        _show_error(error, is_verbose)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return 0
    except Exception as error:
        from w5xde.learn.job.job import describe

        fix = "please report this, with what  --log verbose  adds"
        _show_error(W5xdeError(f"internal error: {describe(error)}", fix=fix), is_verbose)
        return W5xdeError.exit_code


def _is_verbose(arguments: list[str]) -> bool:
    """Looked up before anything is parsed, because what fails may be the parsing."""
    said = " ".join(arguments).replace("--log=", "--log ")
    return "--log verbose" in said or os.environ.get("W5XDE_LOG") == "verbose"


def run() -> NoReturn:
    """The command itself."""
    status = main()
    if status == INTERRUPTED:
        # Now means now: a thread that still computes a batch is not waited for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _show_error(error: W5xdeError, is_verbose: bool) -> None:
    if is_verbose:
        traceback.print_exc()
    print("\n".join(error.lines()), file=sys.stderr)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        from w5xde.bench.command import run_bench

        return run_bench(arguments[1:])
    if not arguments:
        arguments = ["--help"]
    given = vars(build_parser().parse_args(arguments))
    command = given.pop("command")
    if command == "ticket":
        given = take_asked(given)
    places = {key: given.pop(key) for key in _PLACES if key in given}
    if command == "explain":
        # Whoever asks what an error means may have it in w5xde.toml or the environment.
        settings = resolve(command, given)
    else:
        settings = resolve(command, given, environment=os.environ, folder=Path.cwd())
    with results_to(settings.json) as out:
        summary = _PERFORM[command](settings, **places)
        if settings.json:
            print(to_json(summary), file=out, flush=True)
    is_well = summary.get("clean", True) and summary.get("healthy", True)
    return 0 if is_well else NOT_CLEAN


@contextlib.contextmanager
def results_to(is_json: bool) -> Iterator[IO[str]]:
    """With --json stdout is for the one object alone: whatever else anybody prints goes to stderr."""
    if not is_json:
        yield sys.stdout
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            yield out
        finally:
            sys.stdout.flush()
            out.flush()
            os.dup2(out.fileno(), 1)


def _quiet(settings: Settings) -> None:
    """Warnings of libraries are for those who debug: they would tear the view apart."""
    if settings.log != "verbose":
        warnings.simplefilter("ignore")


def _coordinate(settings: Settings, job: str | None) -> dict[str, Any]:
    _quiet(settings)
    job = job or _job_of(settings)
    from w5xde.api import run_coordinator
    from w5xde.cli.view import make_view

    view = make_view(settings)
    result = run_coordinator(job, settings, watcher=view)
    view.show_result(result)
    return result.summary


def _job_of(settings: Settings) -> str:
    """The job of the run that is resumed."""
    if settings.resume is None:
        raise UsageError("which job?", code="W5-210", fix="name its file:  w5xde train train.py")
    folder = Path(settings.runs) / (settings.name or "")
    job = str(read_manifest(folder).get("job_place", ""))
    if not job or job == "JOB":
        raise UsageError(
            f"run {folder.name} was started from Python, so its job has no file",
            code="W5-210",
            fix="resume it from there with resume=…, or name the job's file",
        )
    return job


def _join(settings: Settings, ticket: str | None, job: str) -> dict[str, Any]:
    _quiet(settings)
    from w5xde.api import find_ticket, run_node
    from w5xde.cli.view import make_view

    found = find_ticket(ticket)
    view = make_view(settings)
    report = run_node(found, job, settings, watcher=view)
    view.show_report(report)
    return report.summary()


def _demo(settings: Settings, chaos: bool) -> dict[str, Any]:
    _quiet(settings)
    if chaos:
        from w5xde.chaos import run_chaos_demo

        return run_chaos_demo(settings)
    from w5xde.demo import run_demo

    return run_demo(settings)


def _audit(settings: Settings, run: str) -> dict[str, Any]:
    from w5xde.cli.view import make_view
    from w5xde.runtime.durable.audit import audit_run

    report = audit_run(find_run(settings.runs, run))
    if not settings.json:
        make_view(settings).show_audit(report)
    return report.summary()


def _export(settings: Settings, run: str, to: str, out: str | None) -> dict[str, Any]:
    from w5xde.cli.view import make_view
    from w5xde.runtime.durable.export import export_run

    folder = find_run(settings.runs, run)
    written = export_run(folder, to, Path(out or f"{folder.name}.{to}"))
    make_view(settings).show_export(written)
    return written


def _explain(settings: Settings, error: str | None) -> dict[str, Any]:
    from w5xde.cli.explain import run_explain

    return run_explain(settings, error)


def _doctor(settings: Settings, target: str | None) -> dict[str, Any]:
    _quiet(settings)
    from w5xde.doctor import run_doctor

    return run_doctor(settings, target)


_PERFORM: dict[str, Callable[..., dict[str, Any]]] = {
    "train": _coordinate,
    "serve": _coordinate,
    "join": _join,
    "ticket": run_ticket,
    "demo": _demo,
    "audit": _audit,
    "export": _export,
    "explain": _explain,
    "doctor": _doctor,
}
