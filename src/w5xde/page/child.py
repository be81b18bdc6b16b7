"""Starts the page as a process beside a run, for `--page`. It ends when the process that started it does.

Imports nothing of the page itself, so that a coordinator loads no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

# The page that this process has started last: a program that trains again and again has one at a time.
_started: list[subprocess.Popen[bytes]] = []


def start_page(folder: Path, told: Callable[[str], None], *, opens: bool | None = None) -> None:
    """Start the page of a run; a thread calls `told` with its address, or with nothing if it has failed.

    `opens` says whether a browser is opened; None: if there is a terminal on a desktop.
    """
    close_page()
    words = ["show", str(folder), "--json", "--parent", str(os.getpid()), "--no-open"]
    child = subprocess.Popen(
        [sys.executable, "-m", "w5xde", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is for the run, which may go on for a while; the page shows that.
        start_new_session=True,
    )
    _started.append(child)
    opens = has_browser() if opens is None else opens

    def listen() -> None:
        if child.stdout is None:
            raise RuntimeError("the page was started without a pipe")
        with child.stdout as answer:
            line = answer.readline()
        address = str(json.loads(line)["url"]) if line else ""
        if address and opens:
            import webbrowser

            webbrowser.open(address)
        told(address)

    threading.Thread(target=listen, name="page", daemon=True).start()


def start_page_of_loop(folder: Path, told: Callable[[str], None]) -> None:
    """Start the page of a run whose event loop runs here; the loop calls `told`, as `start_page` does."""
    loop = asyncio.get_running_loop()

    def tell(address: str) -> None:
        with contextlib.suppress(RuntimeError):  # a short run is over before its page is there
            loop.call_soon_threadsafe(told, address)

    start_page(folder, tell)


def close_page() -> None:
    """End the page that this process has started, if there is one."""
    while _started:
        child = _started.pop()
        child.terminate()
        child.wait()


def has_browser() -> bool:
    """Whether a window can be opened from this terminal; never a browser inside of it."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or any(os.environ.get(key) for key in ("DISPLAY", "WAYLAND_DISPLAY"))
