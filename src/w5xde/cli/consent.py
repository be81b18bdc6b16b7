"""Asks the user whether to run the code that a coordinator sent, and shows it.

What is shown is all of the code: each line has its number, so that no line of a file can pass for one of
ours, and characters that a terminal obeys or hides are written out. Runs nothing.
"""

from __future__ import annotations

import pydoc
import re
import shutil
from typing import TYPE_CHECKING, TextIO

from w5xde.cli.units import bytes_text, number_text
from w5xde.sanitize import visible
from w5xde.ticket import Ticket, shown

if TYPE_CHECKING:
    from w5xde.learn.job.code.bundle import CodeBundle
    from w5xde.runtime.node.code_request import ReceivedCode
    from w5xde.runtime.node.consent import Ask

PROMPT = "run it here? [y/N/show] "
# A terminal may be narrower than anything that could be read there.
COLUMNS_MIN = 40
_LINE_END = re.compile(r"\r\n|\r|\n")


def ask_in(stdin: TextIO, out: TextIO) -> Ask | None:
    """A question to the user of a terminal; None if there is no terminal."""
    if not (stdin.isatty() and out.isatty()):
        return None

    def ask(received: ReceivedCode, ticket: Ticket) -> bool:
        print("\n".join(description(received, ticket)), file=out)
        while True:
            print(PROMPT, end="", file=out, flush=True)
            answer = stdin.readline().strip().lower()
            if answer not in ("s", "show"):
                return answer in ("y", "yes")
            columns = max(COLUMNS_MIN, shutil.get_terminal_size().columns - 1)
            pydoc.pager("\n".join(listing(received.bundle, columns)) + "\n")

    return ask


def description(received: ReceivedCode, ticket: Ticket) -> list[str]:
    """What the code is, where it comes from, and what it needs."""
    bundle, offer = received.bundle, received.offer
    host, port = ticket.addresses[0]
    known_by = f", fingerprint {shown(ticket.fingerprint)}" if ticket.fingerprint else ""
    lines = [f"the coordinator at {host}:{port}{known_by} sends the code of its job:"]
    width = max(map(len, bundle.files))
    lines += [f"  {name:<{width}}  {bytes_text(size)}" for name, size in bundle.sizes.items()]
    lines.append(f"  job {bundle.job}, sha256 {bundle.sha256}")
    if offer.versions:
        lines.append(
            f"  runs there with {', '.join(f'{name} {each}' for name, each in offer.versions.items())}"
        )
    lines += [f"  {line}" for line in received.missing_lines]
    if offer.reads_data:
        lines.append("  data() of the job runs here too and reads a copy of the data on this machine")
    return [*lines, "it would run as you, and could do all that you can do on this machine"]


def listing(bundle: CodeBundle, columns: int) -> list[str]:
    """All files with numbered lines, in lines of at most so many characters."""
    lines = []
    for name, content in bundle.files.items():
        rows = _LINE_END.split(content.decode("utf-8"))
        # The end of the last line is not another line.
        rows = rows if rows[-1] else rows[:-1]
        size = f"{bytes_text(len(content))}, {number_text(len(rows), 'line')}"
        lines += ["", f"=== {name} ({size}) " + "=" * 20]
        for number, row in enumerate(rows, 1):
            lines += _numbered(number, visible(row), columns)
    return lines


def _numbered(number: int, text: str, columns: int) -> list[str]:
    """A line with its number; its rest follows on lines with a mark, so that nothing lies beyond an edge."""
    room = columns - 9
    pieces = [text[at : at + room] for at in range(0, len(text), room)] or [""]
    return [f"{number:>6} | {pieces[0]}".rstrip(), *(f"     … | {piece}" for piece in pieces[1:])]
