"""Where a node's ticket comes from: it is given once, or it is looked for again at every dial.

    a ticket                     always the same
    @FILE                        read again: a coordinator that was restarted elsewhere has rewritten it
    a function of the user's     called again

While nothing new can be found, the ticket that was found last is used. Looking has its own thread, because a
file on a network or a user's function may take long or never return. Knows no connections.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TextIO

from w5xde.errors import JoinError, UsageError, W5xdeError
from w5xde.learn.job.job import describe
from w5xde.runtime.system.interrupts import run_interruptibly
from w5xde.ticket import TEXT_CHARACTERS_MAX, VARIABLE, Ticket, parse, parse_address

# How long one look may take before the ticket of before is used: as long as one dial.
LOOK_SECONDS = 5.0
# How long a pipe, as in  join @<(command) , may take to say its ticket.
PIPE_SECONDS = 2.0
# Between two looks, as long as nothing was ever found.
RETRY_SECONDS = 0.25
# What `locate` did wrong, or that it knows nothing yet.
LOCATE_FAILED = "W5-128"

# The user's function: the text of a ticket, a ticket, or None while it knows none.
Locate = Callable[[], "str | Ticket | None"]
# A ticket, or the error that says why there is none yet. What it raises is an error that lasts.
Find = Callable[[], "Ticket | W5xdeError"]


class TicketSource:
    """A ticket that never changes; `ticket` may be read once `look` has returned."""

    may_change = False

    def __init__(self, ticket: Ticket | None = None) -> None:
        self._ticket = ticket
        # Tells the user something: its kind, and a sentence.
        self.note: Callable[[str, str], None] = lambda kind, text: None

    @property
    def ticket(self) -> Ticket:
        """The ticket that was found last."""
        if self._ticket is None:
            raise RuntimeError("no ticket was found yet")
        return self._ticket

    async def look(self) -> Ticket:
        """Return the newest ticket. Raises NotFoundYet if none was ever found, or an error that lasts."""
        return self.ticket


class NotFoundYet(Exception):
    """There is no ticket yet; `error` says why, for a user who will not wait."""

    def __init__(self, error: W5xdeError) -> None:
        super().__init__(error.what)
        self.error = error


class SoughtTicket(TicketSource):
    """A ticket that is looked for again each time."""

    may_change = True

    def __init__(self, find: Find) -> None:
        super().__init__()
        self._find = find
        self._looking: Future[Ticket | W5xdeError] | None = None
        self._told = ""

    async def look(self) -> Ticket:
        """Look again. Several callers at a time share one look."""
        looking = self._looking = self._looking or _started(self._find)
        await asyncio.wait([asyncio.wrap_future(looking)], timeout=LOOK_SECONDS)
        found: Ticket | W5xdeError
        if looking.done():
            if self._looking is looking:
                self._looking = None
            found = looking.result()
        else:
            what = f"looking for the ticket has taken {LOOK_SECONDS:.0f} s so far"
            found = JoinError(what, code="W5-104", fix="look whether its file's disk, or locate(), hangs")
        if isinstance(found, W5xdeError):
            if self._ticket is None:
                self._tell_once(f"waiting for a ticket: {found.what}")
                raise NotFoundYet(found)
            self._tell_once(f"{found.what}; trying the ticket of before")
            return self._ticket
        if self._ticket is not None and found.addresses != self._ticket.addresses:
            host, port = found.addresses[0]
            self.note("ticket", f"the coordinator is now at {f'[{host}]' if ':' in host else host}:{port}")
        self._ticket, self._told = found, ""
        return found

    def _tell_once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self.note("ticket", text)


class _FirstLook:
    """Waits until a source has a ticket."""

    def __init__(self, source: TicketSource, wait_seconds: float, meanwhile: Callable[[], None]) -> None:
        self._source = source
        self._wait_seconds = wait_seconds
        self._meanwhile = meanwhile
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Return once there is a ticket; raises the error that says why there is none."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        while True:
            try:
                await self._source.look()
                return
            except NotFoundYet as not_yet:
                if loop.time() >= deadline:
                    raise not_yet.error from None
            self._meanwhile()
            await asyncio.sleep(RETRY_SECONDS)

    def stop(self, reason: str, *, hurries: bool) -> None:
        """Give up, as Ctrl-C does."""
        if self._task is not None:
            self._task.cancel()


def first_found(
    source: Ticket | TicketSource,
    wait_seconds: float,
    note: Callable[[str, str], None],
    meanwhile: Callable[[], None] = lambda: None,
) -> TicketSource:
    """Wait until a source has a ticket, and return it; a ticket alone is a source of itself.

    While there is none, `meanwhile` is called again and again: what takes long can be done there, once.
    """
    if isinstance(source, Ticket):
        return TicketSource(source)
    source.note = note
    look = _FirstLook(source, wait_seconds, meanwhile)
    run_interruptibly(look.run(), look.stop)
    return source


def _started(find: Find) -> Future[Ticket | W5xdeError]:
    """Begin to look, on a thread that keeps no process from ending."""
    looking: Future[Ticket | W5xdeError] = Future()
    # From now on nothing cancels it.
    looking.set_running_or_notify_cancel()

    def look() -> None:
        try:
            found = find()
        except BaseException as error:
            looking.set_exception(error)
        else:
            looking.set_result(found)

    threading.Thread(target=look, name="w5xde-ticket", daemon=True).start()
    return looking


# --- what users name ------------------------------------------------------------------------------


def read_ticket(argument: str | None, environ: Mapping[str, str], stdin: TextIO) -> Ticket:
    """Return the ticket of an argument: the text itself, `@file`, `-` for standard input, or W5XDE_TICKET."""
    if argument is None:
        if not environ.get(VARIABLE, "").strip():
            raise UsageError(
                "no ticket was given",
                code="W5-116",
                fix=f"w5xde join TICKET, @file, - for standard input, or set {VARIABLE}",
            )
        return parse(environ[VARIABLE])
    if argument == "-":
        return _read_lines(stdin)
    if argument.startswith("@"):
        return parse(read_file(argument[1:]))
    return parse(argument)


def _read_lines(stdin: TextIO) -> Ticket:
    """Read lines until they make a whole ticket, so that a pasted one needs no end of file."""
    text = ""
    while len(text) < TEXT_CHARACTERS_MAX and (line := stdin.readline(TEXT_CHARACTERS_MAX)):
        text += line
        try:
            return parse(text)
        except JoinError:
            continue
    if not text.strip():
        raise UsageError(
            "standard input holds no ticket", code="W5-116", fix="pipe the ticket's line into it"
        )
    return parse(text)


def read_file(name: str) -> str:
    """Return the text of a ticket's file. Returns soon whatever it is: a pipe may have no writer."""
    fix = "write the ticket's line into that file, and name it after the @"
    try:
        handle, data = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), b""
        try:
            is_file = stat.S_ISREG(os.fstat(handle).st_mode)
            while len(data) < TEXT_CHARACTERS_MAX:
                is_ready = is_file or select.select([handle], [], [], PIPE_SECONDS)[0]
                piece = os.read(handle, TEXT_CHARACTERS_MAX) if is_ready else b""
                if not piece:
                    break
                data += piece
        finally:
            os.close(handle)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(
            f"the ticket's file {name or '(no name)'} cannot be read: {error.strerror}",
            code="W5-116",
            fix=fix,
        ) from error
    except ValueError:  # also a name with a zero byte
        raise UsageError(f"{name} is not a text file", code="W5-116", fix=fix) from None
    if not text.strip():
        raise UsageError(f"the ticket's file {name} is empty", code="W5-116", fix=fix)
    return text


def find_ticket(said: str | None) -> Ticket:
    """The ticket that the user gave, or the one in the environment; an address is refused with advice."""
    try:
        return read_ticket(said, os.environ, sys.stdin)
    except JoinError as damaged:
        try:
            parse_address(said or "")
        except UsageError:
            raise damaged from None
        raise UsageError(
            f"{said} is an address, and joining needs a ticket",
            code="W5-111",
            why="the ticket says where to go, whom to trust there, and that you may come",
            fix="copy the line that w5xde serve prints, or make one there:  w5xde ticket new latest",
        ) from None


def find_source(said: str | None) -> TicketSource:
    """The source that the user named: `@FILE` is read at every dial, anything else now and once."""
    if said is not None and said.startswith("@"):
        return in_file(said[1:])
    return TicketSource(find_ticket(said))


def source_of(ticket: str | Ticket | None, locate: Locate | None) -> Ticket | TicketSource:
    """The source that a program gives: a ticket, what names one, or a function."""
    if locate is None:
        return ticket if isinstance(ticket, Ticket) else find_source(ticket)
    if ticket is not None or not callable(locate):
        raise UsageError(
            "locate is a function that is called instead of a ticket",
            code="W5-210",
            fix="give a ticket, or a function as locate",
        )
    return located(locate)


def in_file(name: str) -> SoughtTicket:
    """The ticket in a file, which may not be there yet, or be half written."""

    def find() -> Ticket | W5xdeError:
        try:
            return parse(read_file(name))
        except W5xdeError as error:
            if Path(name).is_dir():
                raise
            return error

    return SoughtTicket(find)


def located(locate: Locate) -> SoughtTicket:
    """The ticket that a function of the user's returns."""

    def find() -> Ticket | W5xdeError:
        try:
            said = locate()
        except (Exception, SystemExit) as error:
            fix = "let it return None while it does not know where the coordinator is"
            return JoinError(f"locate() failed: {describe(error)}", code=LOCATE_FAILED, fix=fix)
        if said is None:
            fix = "check what it waits for, or wait longer: wait='1h'"
            return JoinError("locate() knows no ticket yet", code=LOCATE_FAILED, fix=fix)
        if isinstance(said, Ticket):
            return said
        if not isinstance(said, str):
            raise UsageError(
                f"locate() returned an object of type {type(said).__name__}",
                code=LOCATE_FAILED,
                fix="return a ticket, its text, or None while there is none",
            )
        try:
            return parse(said)
        except JoinError as error:
            return error

    return SoughtTicket(find)
