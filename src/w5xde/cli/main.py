"""The command `w5xde`: performs what was typed, prints results and errors, and returns an exit code.

`cli/parser.py` knows what can be typed. Nothing here imports torch before a command needs it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from w5xde.cli.explain import run_explain
from w5xde.cli.parser import ARGUMENTS, build_parser
from w5xde.cli.ticket_command import run_ticket, take_asked
from w5xde.config import Settings
from w5xde.errors import TrainingError, UsageError, W5xdeError
from w5xde.runs import find_run, read_manifest
from w5xde.sanitize import to_json
from w5xde.setting_sources import resolve

INTERRUPTED = 130
# An audit found a violation, or the doctor an error.
NOT_CLEAN = 1


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
    """Whether --log verbose is among the arguments; found before they are parsed, because that may fail."""
    typed = " ".join(arguments).replace("--log=", "--log ")
    return "--log verbose" in typed or os.environ.get("W5XDE_LOG") == "verbose"


def run() -> NoReturn:
    """The entry point of the process."""
    status = main()
    if status == INTERRUPTED:
        # Do not wait for a thread that still computes, or waits for the disk.
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
    besides = {key: given.pop(key) for key in ARGUMENTS & given.keys()}
    if command == "explain":
        # The error that the user asks about may be in w5xde.toml or the environment.
        settings = resolve(command, given)
    else:
        settings = resolve(command, given, environment=os.environ, folder=Path.cwd())
    if settings.log != "verbose":
        # Warnings of libraries help only in debugging, and would break the live view.
        warnings.simplefilter("ignore")
    with results_to(settings.json) as out:
        try:
            summary = _PERFORM[command](settings, **besides)
        except TrainingError as error:
            # A run that broke has a result too: how far it came, and which weights were kept.
            if settings.json and error.summary:
                facts = {"error": error.what, "code": error.code}
                print(to_json({**error.summary, **facts}), file=out, flush=True)
            raise
        if settings.json:
            print(to_json(summary), file=out, flush=True)
    is_clean = summary.get("clean", True) and summary.get("healthy", True)
    return 0 if is_clean else NOT_CLEAN


@contextlib.contextmanager
def results_to(is_json: bool) -> Iterator[IO[str]]:
    """The stream for the result. With --json only the result goes to stdout, all other output to stderr."""
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


def _coordinate(settings: Settings, job: str | None) -> dict[str, Any]:
    job = job or _job_of(settings)
    from w5xde.api import run_coordinator
    from w5xde.cli.view import make_view

    view = make_view(settings)
    result = run_coordinator(job, settings, watcher=view)
    view.show_result(result)
    return result.summary


def _job_of(settings: Settings) -> str:
    """Where to find the job of the run that is resumed."""
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
    from w5xde.api import find_ticket, run_node
    from w5xde.cli.view import make_view

    found = find_ticket(ticket)
    view = make_view(settings)
    report = run_node(found, job, settings, watcher=view)
    view.show_report(report)
    return report.summary()


def _demo(settings: Settings, chaos: bool) -> dict[str, Any]:
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


def _doctor(settings: Settings, target: str | None, job: str | None) -> dict[str, Any]:
    from w5xde.doctor import run_doctor

    return run_doctor(settings, target, job)


_PERFORM: dict[str, Callable[..., dict[str, Any]]] = {
    "train": _coordinate,
    "serve": _coordinate,
    "join": _join,
    "ticket": run_ticket,
    "demo": _demo,
    "audit": _audit,
    "export": _export,
    "explain": run_explain,
    "doctor": _doctor,
}
