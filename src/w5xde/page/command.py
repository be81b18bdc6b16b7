"""`w5xde show`: opens the page of a run, or writes it to one file."""

from __future__ import annotations

import contextlib
import time
import webbrowser
from pathlib import Path
from typing import IO, Any

from w5xde.config import Settings
from w5xde.errors import StorageError, UsageError
from w5xde.page.child import has_browser
from w5xde.page.serving import PageOptions, PageServer
from w5xde.runs import LATEST, find_run
from w5xde.sanitize import to_json

# As many curves as can be told apart.
RUNS_MAX = 8


def run_show(settings: Settings, shown: dict[str, Any], out: IO[str]) -> None:
    """Show runs until the user interrupts; `shown` has the arguments of the command.

    With --json one object is printed to `out` as soon as the page can be opened.
    """
    names: list[str] = shown["run"] or [LATEST]
    if len(names) > RUNS_MAX:
        raise UsageError(
            f"{len(names)} runs are too many to compare", code="W5-651", fix=f"name at most {RUNS_MAX}"
        )
    folders = [find_run(settings.runs, name) for name in names]
    if shown["html"] is not None:
        written = _write(folders, Path(shown["html"]))
        text = f"wrote {written['file']} ({written['bytes'] / 1000:.0f} kB): open it in a browser"
        print(to_json(written) if settings.json else text, file=out, flush=True)
        return
    options = PageOptions(shown["page_host"], shown["page_port"], shown["read_only"], shown["parent"])
    server = PageServer(folders, options)
    link = server.new_link()
    facts = {"url": link, "runs": [folder.name for folder in folders], "sha256": server.fingerprint}
    if settings.json:
        print(to_json(facts), file=out, flush=True)
    else:
        _say(f"page  {link}")
        if server.fingerprint:
            _say(f"  certificate sha256 {server.fingerprint}: compare it before you trust it")
        _say("  Ctrl-C ends the page, and never the run")
    opens = shown["open"]
    if opens or (opens is None and not settings.json and has_browser()):
        webbrowser.open(link)

    def logged_in() -> None:
        if not settings.json:
            _say(f"  another browser: {server.new_link()}")

    with contextlib.suppress(KeyboardInterrupt):
        server.run(logged_in)


def _say(text: str) -> None:
    print(text, flush=True)


def _write(folders: list[Path], file: Path) -> dict[str, Any]:
    from w5xde.page.report import report

    data = report(folders, time.time())
    try:
        file.write_bytes(data)
    except OSError as error:
        raise StorageError(
            f"{file} cannot be written: {error.strerror}", code="W5-652", fix="choose another file"
        ) from error
    return {"file": str(file), "bytes": len(data), "runs": [folder.name for folder in folders]}
