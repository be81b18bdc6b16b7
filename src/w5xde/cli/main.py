"""The command `w5xde`: performs what was typed, prints results and errors, and returns an exit code.

`cli/parser.py` knows what can be typed. Nothing here imports torch before a command needs it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from w5xde.cli.explain import run_explain
from w5xde.cli.parser import ARGUMENTS, HELP_ALL, build_parser
from w5xde.cli.ticket_command import run_ticket, take_asked
from w5xde.config import Settings
from w5xde.errors import NOT_OVER, TrainingError, UsageError, W5xdeError
from w5xde.runs import find_run, read_manifest
from w5xde.runtime.durable.again import FinishedRun, RunClaim, claim_run
from w5xde.runtime.system.parent import ending_with_parent
from w5xde.runtime.system.termination import RUNNING, Termination, is_running
from w5xde.sanitize import to_json
from w5xde.setting_sources import SettingSources
from w5xde.specs.engine_settings import LOCAL
from w5xde.ticket import is_meant_as_job

INTERRUPTED = 130
# An audit found a violation, or the doctor an error.
NOT_CLEAN = 1


class _Exit(NamedTuple):
    """The exit code of a command; `now`: without waiting for threads that still compute, or for the disk."""

    status: int
    now: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    return _main(list(sys.argv[1:] if argv is None else argv)).status


def _main(arguments: list[str], termination: Termination | None = None) -> _Exit:
    is_verbose = _is_verbose(arguments)

    def is_terminated() -> bool:
        return termination is not None and termination.is_asked

    try:
        status = _run(arguments, termination)
        # A batch or an evaluation that nobody waits for may still be computed.
        return _Exit(status, now=is_terminated())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return _Exit(NOT_OVER if is_running(arguments) else INTERRUPTED, now=True)
    except BrokenPipeError:
        # The other end of a pipe is gone. A run that ends for that is not over: engines must not believe so.
        return _Exit(NOT_OVER if is_running(arguments) else 0)
    except Exception as error:
        if is_terminated():
            # A library that was interrupted may raise anything.
            print(f"stopped ({type(error).__name__}: {error})", file=sys.stderr)
            return _Exit(NOT_OVER, now=True)
        if isinstance(error, W5xdeError):
            _show_error(error, is_verbose)
            return _Exit(error.exit_code)
        from w5xde.learn.job.job import describe

        fix = "please report this, with what  --log verbose  adds"
        _show_error(W5xdeError(f"internal error: {describe(error)}", fix=fix), is_verbose)
        return _Exit(W5xdeError.exit_code)


def _is_verbose(arguments: list[str]) -> bool:
    """Whether --log verbose is among the arguments; found before they are parsed, because that may fail."""
    typed = " ".join(arguments).replace("--log=", "--log ")
    return "--log verbose" in typed or os.environ.get("W5XDE_LOG") == "verbose"


def run(termination: Termination | None = None) -> NoReturn:
    """Run the command that was typed, and end the process. `termination` hears SIGTERM."""
    if termination is None and is_running(sys.argv[1:]):
        termination = Termination()
    status, now = _main(sys.argv[1:], termination)
    if termination is not None:
        termination.is_ending = True
    if now:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _show_error(error: W5xdeError, is_verbose: bool) -> None:
    if is_verbose:
        # What the notes say follows in the lines of the error.
        error.__notes__.clear()
        traceback.print_exc()
    print("\n".join(error.lines()), file=sys.stderr)


def _run(arguments: list[str], termination: Termination | None) -> int:
    if arguments[:1] == ["bench"]:
        from w5xde.bench.command import run_bench

        return run_bench(arguments[1:])
    if arguments[:1] == ["deploy"]:
        from w5xde.deploy.command import run_deploy

        return run_deploy(arguments[1:])
    if not arguments:
        arguments = ["--help"]
    if helps_all := HELP_ALL in arguments:
        arguments = ["--help" if each == HELP_ALL else each for each in arguments]
    given = vars(build_parser(helps_all=helps_all).parse_args(arguments))
    command = given.pop("command")
    given.pop("help_all", None)
    if command == "ticket":
        given = take_asked(given)
    besides = {key: given.pop(key) for key in ARGUMENTS & given.keys()}
    if command == "explain":
        # The error that the user asks about may be in w5xde.toml or the environment.
        sources = SettingSources(command, given)
    else:
        sources = SettingSources(command, given, os.environ, Path.cwd())
    settings = sources.resolve()
    if settings.log != "verbose":
        # Warnings of libraries help only in debugging, and would break the live view.
        warnings.simplefilter("ignore")
    parent = termination.parent if termination is not None else None
    with ending_with_parent(settings.with_parent, parent), results_to(settings.json) as out:
        try:
            if command == "show":
                return _show(settings, out, **besides)
            if command in COORDINATE:
                summary = _coordinate(sources, **besides)
            else:
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
    if not is_clean:
        return NOT_CLEAN
    # Settings that are only printed are no run.
    return 0 if command not in RUNNING or summary.get("over", True) else NOT_OVER


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


def _coordinate(sources: SettingSources, job: str | None, print_config: bool) -> dict[str, Any]:
    job = job or _job_of(sources.resolve())
    if print_config:
        from w5xde.learn.job.named_job import settle

        _, sources = settle(sources, job)
        return _show_config(sources.resolve(), sources.origins())
    if sources.resolve().engine != LOCAL:
        return _train_on_engine(sources, job)
    with claim_run(sources, lambda text: _say(text, sources.resolve())) as claim:
        if claim.finished is not None:
            return _show_finished(claim.finished, sources.resolve())
        return _train(sources, job, claim)


def _say(text: str, settings: Settings) -> None:
    if settings.log != "silent":
        print(text, file=sys.stderr, flush=True)


def _show_finished(finished: FinishedRun, settings: Settings) -> dict[str, Any]:
    """Show the result of a run that was complete before this command began."""
    _say(f"run {finished.folder.name} is complete: nothing is left to do", settings)
    if not settings.json:
        from w5xde.cli.view import make_view

        make_view(settings).show_result(finished)
    return finished.summary


def _train(sources: SettingSources, job: str, claim: RunClaim) -> dict[str, Any]:
    from w5xde.api import run_coordinator
    from w5xde.cli.view import make_view
    from w5xde.learn.job.named_job import settle

    named, sources = settle(sources, job)
    settings = sources.resolve()
    view = make_view(settings)
    result = run_coordinator(named.job, settings, watcher=view, name=job, claim=claim)
    view.show_result(result)
    return result.summary


def _train_on_engine(sources: SettingSources, job: str) -> dict[str, Any]:
    from w5xde.cli.view import make_view
    from w5xde.engines.start import train_on_engine

    return train_on_engine(job, sources, make_view(sources.resolve())).summary


def _show_config(settings: Settings, origins: dict[str, str]) -> dict[str, Any]:
    """Print each setting with its value and the source of that value."""
    from w5xde.specs.setting_help import default_in_words

    # Defaults that other settings decide.
    decided = {"batches_per_step": settings.step_batches, "epochs": settings.epoch_limit}
    values = {name: decided.get(name, getattr(settings, name)) for name in origins}
    found = {name: {"value": values[name], "from": source} for name, source in origins.items()}
    if not settings.json:
        for name, each in found.items():
            value = default_in_words(name) if each["value"] is None else str(each["value"]).lower()
            print(f"{name.replace('_', '-'):<18} {value:<24}  {each['from']}".rstrip())
    return {"settings": found}


def _job_of(settings: Settings) -> str:
    """Where to find the job of the run that is resumed."""
    if not settings.goes_on:
        raise UsageError("which job?", code="W5-210", fix="name its file:  w5xde train train.py")
    from w5xde.learn.job.named_job import FROM_PYTHON

    folder = Path(settings.runs) / (settings.name or "")
    job = str(read_manifest(folder).get("job_place", ""))
    if not job or job == FROM_PYTHON:
        raise UsageError(
            f"run {folder.name} was started from Python, so its job has no file",
            code="W5-210",
            fix="resume it from there with resume=…, or name the job's file",
        )
    return job


def _join(settings: Settings, ticket: str | None, job: str | None) -> dict[str, Any]:
    from w5xde.api import run_crew
    from w5xde.cli.consent import ask_in
    from w5xde.cli.view import make_view
    from w5xde.runtime.admission.ticket_source import find_source

    if job is None and ticket is not None and is_meant_as_job(ticket, os.environ):
        ticket, job = None, ticket
    found = find_source(ticket)
    view = make_view(settings)
    try:
        report = run_crew(found, job, settings, watcher=view, ask=ask_in(sys.stdin, sys.stderr))
    except W5xdeError as error:
        # The line to type as it was typed; a ticket itself is a secret, and no error shows it.
        if ticket is not None and ticket.startswith("@"):
            error.fix = error.fix.replace("w5xde join TICKET", f"w5xde join {shlex.quote(ticket)}")
        raise
    view.show_report(report)
    return report.summary()


def _demo(settings: Settings, chaos: bool) -> dict[str, Any]:
    if chaos:
        from w5xde.chaos import run_chaos_demo

        return run_chaos_demo(settings)
    from w5xde.demo import run_demo

    return run_demo(settings)


def _audit(settings: Settings, run: str) -> dict[str, Any]:
    from w5xde.cli.audit_view import show_audit
    from w5xde.cli.view import make_view
    from w5xde.runtime.durable.audit import audit_run

    report = audit_run(find_run(settings.runs, run))
    if not settings.json:
        show_audit(make_view(settings), report)
    return report.summary()


def _show(settings: Settings, out: IO[str], **shown: Any) -> int:
    from w5xde.page.command import run_show

    run_show(settings, shown, out)
    return 0


def _export(settings: Settings, run: str, to: str, out: str | None, best: bool) -> dict[str, Any]:
    from w5xde.cli.view import make_view
    from w5xde.runtime.evaluation.export import export_best, export_run

    folder = find_run(settings.runs, run)
    export = export_best if best else export_run
    written = export(folder, to, Path(out or f"{folder.name}.{to}"))
    make_view(settings).show_export(written)
    return written


def _doctor(settings: Settings, target: str | None, job: str | None) -> dict[str, Any]:
    from w5xde.doctor import run_doctor

    return run_doctor(settings, target, job)


# These load a job, whose settings come in with the others.
COORDINATE = ("train", "serve")
_PERFORM: dict[str, Callable[..., dict[str, Any]]] = {
    "join": _join,
    "ticket": run_ticket,
    "demo": _demo,
    "audit": _audit,
    "export": _export,
    "explain": run_explain,
    "doctor": _doctor,
}
