"""Consent: whether this machine runs the code that a coordinator sent. Nothing of it runs before.

    --accept-code SHA256     this code and no other
    remembered               the user agreed to this code of this coordinator before
    asked                    the user reads the code, if there is a terminal, and says y
    otherwise                no

The code that was agreed to runs with all rights of the user: there is no sandbox. Knows no terminal: the
caller says how to ask.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from w5xde.errors import JobError, JoinError
from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.learn.job.job import load_job
from w5xde.learn.job.named_job import NamedJob
from w5xde.runtime.admission.accepted_code import AcceptedCode, store
from w5xde.runtime.admission.credentials import pool_of
from w5xde.runtime.net.sockets import is_here
from w5xde.runtime.node.code_request import ReceivedCode
from w5xde.ticket import Ticket

NOT_ACCEPTED = "W5-285"
MISSING = "W5-288"
# Shows the code to the user and returns whether to run it.
Ask = Callable[[ReceivedCode, Ticket], bool]


def load_if_accepted(
    received: ReceivedCode,
    ticket: Ticket,
    accept_code: str | None,
    ask: Ask | None,
    note: Callable[[str, str], None] = lambda kind, text: None,
) -> NamedJob:
    """Load the job of a coordinator's code. JoinError if its user has not agreed to run exactly this code."""
    bundle = received.bundle
    accepted = AcceptedCode(pool_of(ticket))
    _require_consent(received, ticket, accept_code, bundle.sha256 in accepted, ask)
    accepted.remember(bundle.sha256)
    note("code", f"running the coordinator's {bundle.job}, sha256 {bundle.sha256[:16]}…, which was accepted")
    for line in received.missing_lines:
        note("code", line)
    folder = store(bundle)
    _forget_modules(folder.parent)
    _require_unused_names(bundle)
    file, _, name = bundle.job.partition(":")
    with _without_compiled_files():
        try:
            # With the colon in any case: the folder may have one too.
            job = load_job(f"{folder}/{file}:{name}")
        except JobError as error:
            raise _explained(error, received) from error.__cause__
    return NamedJob(job, bundle.job, bundle)


def _require_consent(
    received: ReceivedCode, ticket: Ticket, accept_code: str | None, is_remembered: bool, ask: Ask | None
) -> None:
    sha256 = received.bundle.sha256
    if accept_code is not None:
        if accept_code.lower() != sha256:
            raise JoinError(
                f"the coordinator's code has sha256 {sha256}, and --accept-code names another",
                code=NOT_ACCEPTED,
                why="the job was changed since, or this is not the coordinator that you mean",
                fix=f"look at it without --accept-code in a terminal; to run it:  {line_to_accept(sha256)}",
            )
        return
    if is_remembered:
        return
    if ticket.is_clear and not all(is_here(host) for host, _ in ticket.addresses):
        raise JoinError(
            f"the coordinator's code, sha256 {sha256}, came in clear text",
            code=NOT_ACCEPTED,
            why="anybody on the way can have changed it",
            fix=f"compare that with what the coordinator prints; if it is equal:  {line_to_accept(sha256)}",
        )
    if ask is None:
        raise JoinError(
            f"nobody agreed to run the coordinator's code: {received.bundle.job}, sha256 {sha256}",
            code=NOT_ACCEPTED,
            why="there is no terminal to ask in, and code that comes with a run may do all that you may do",
            fix=f"run  w5xde join TICKET  in a terminal; or, to run this code:  {line_to_accept(sha256)}",
        )
    if not ask(received, ticket):
        raise JoinError(
            "the coordinator's code was not accepted, and nothing of it ran",
            code=NOT_ACCEPTED,
            fix="join with a copy of the job that you trust:  w5xde join TICKET JOB",
        )


def line_to_accept(sha256: str) -> str:
    """The command that runs this code without a question."""
    return f"w5xde join TICKET --accept-code {sha256}"


def _forget_modules(folder: Path) -> None:
    """Forget modules of code that this process ran before: imports must find those that were shown now."""
    # With and without links on the way there.
    inside = (f"{folder}{os.sep}", f"{folder.resolve()}{os.sep}")
    sys.path[:] = [path for path in sys.path if not path.startswith(inside)]
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(inside):
            del sys.modules[name]


def _require_unused_names(bundle: CodeBundle) -> None:
    """Refuse a module whose name this process uses already: that one would run instead of what was shown."""
    job_file = bundle.job.partition(":")[0]
    for name in bundle.files:
        module = name.partition("/")[0].removesuffix(".py")
        if name != job_file and module in sys.modules:
            raise JobError(
                f"the coordinator sent {name}, and a module {module} is in use here already",
                code=MISSING,
                fix="give that file another name at the coordinator",
            )


@contextlib.contextmanager
def _without_compiled_files() -> Iterator[None]:
    """Let Python write no compiled files beside the code: its folder has only what was shown."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _explained(error: JobError, received: ReceivedCode) -> JobError:
    """The error for code that imports something that is not here; any other error as it is."""
    cause = error.__cause__
    if not isinstance(cause, ModuleNotFoundError) or not cause.name:
        return error
    module = cause.name.partition(".")[0]
    package = received.package_of(module)
    if package:
        what = f"{received.bundle.job} imports {module}, which is not installed here"
        fix = f"w5xde installs nothing: install {package} yourself, as the coordinator has it, and join again"
    elif module in received.offer.imports:
        what = f"{received.bundle.job} imports {module}, which the coordinator has and did not send"
        fix = f"start the coordinator with  --ship {module}.py  (or its folder: --ship {module})"
    else:
        what = f"{received.bundle.job} cannot be loaded here: there is no module {cause.name}"
        fix = "install what is missing, in the version that the coordinator has"
    return JobError(what, code=MISSING, fix=fix)
