"""A minded command: one `w5xde` command as a child of this process, its lines, its end, a way to end it.

The child ends when this process does, however that ends. Knows no engine, and not what the command is for.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The last lines of a command, in which its error is looked for: an error has five.
LINES_KEPT = 40
# A line of a view or an error is far shorter; a job that prints a tensor is cut.
LINE_CHARACTERS_MAX = 2000
# What makes a process end with the one that started it.
WITH_PARENT = "W5XDE_WITH_PARENT"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its exit code (negative: the signal that killed it) and its last lines."""

    status: int
    lines: tuple[str, ...] = ()
    seconds: float = 0.0


class MindedCommand:
    """Runs `w5xde WORDS`, again and again if asked; each line that it prints is given to `hear`."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        variables: Mapping[str, str],
        hear: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._words = [sys.executable, "-m", "w5xde", *words]
        self._folder = folder
        self._variables = {**os.environ, "PYTHONUNBUFFERED": "1", **variables, WITH_PARENT: "true"}
        self._hear = hear
        self._clock = clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._left = threading.Event()

    def run(self) -> Ended:
        """Run the command to its end; at once over if it was told to leave."""
        began = self._clock()
        with self._lock:
            if self._left.is_set():
                return Ended(-15)
            self._process = process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd=self._folder,
                env=self._variables,
            )
        last: deque[str] = deque(maxlen=LINES_KEPT)
        if process.stderr is not None:
            with process.stderr:
                for line in process.stderr:
                    said = line.rstrip("\n")[:LINE_CHARACTERS_MAX]
                    last.append(said)
                    self._hear(said)
        return Ended(process.wait(), tuple(last), self._clock() - began)

    @property
    def is_leaving(self) -> bool:
        return self._left.is_set()

    def pause(self, seconds: float) -> None:
        """Wait before the next start, at most until the command is told to leave."""
        self._left.wait(seconds)

    def leave(self) -> None:
        """Let the command end in order, as Ctrl-C would; it is not run again."""
        with self._lock:
            self._left.set()
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
