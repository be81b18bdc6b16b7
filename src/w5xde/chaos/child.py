"""One process of a pool: the command that starts it, its log, and its restarts. Knows no other process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from w5xde.runs import CACHE_VARIABLE, STATE_VARIABLE
from w5xde.setting_sources import ENVIRONMENT_PREFIX


class Process(Protocol):
    """What a pool needs of a process; Popen has it all."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int | None: ...
    def kill(self) -> None: ...
    def send_signal(self, number: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the words after `w5xde`, its log, its folder and its environment."""

    words: list[str]
    log: Path
    # Not the working folder of the user: a w5xde.toml there must not change the run.
    folder: Path
    environment: dict[str, str]


def spawn(command: Command) -> Process:
    """Start a command as a user would."""
    with command.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "w5xde", *command.words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=command.folder,
            env=command.environment,
        )


@dataclass(slots=True, eq=False)
class Child:
    """One process of the pool, over all its restarts."""

    name: str
    log: Path
    # The text in its log that says that it is ready.
    ready_words: str
    process: Process | None = None
    lives: int = 0
    kills: int = 0
    freezes: int = 0
    is_ready: bool = False
    # The length of the log before the last start.
    log_bytes_before: int = 0
    starts_at: float | None = None
    thaws_at: float | None = None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def is_working(self) -> bool:
        """Whether it is ready, and not frozen by us."""
        return self.is_alive and self.is_ready and self.thaws_at is None

    def end(self) -> None:
        """Kill it, if it still runs, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process, self.is_ready, self.thaws_at = None, False, None

    def becomes_ready(self) -> bool:
        """Whether it has become ready since the last call."""
        if self.is_ready or not self.is_alive or self.ready_words not in self.words():
            return False
        self.is_ready = True
        return True

    def words(self) -> str:
        """Its log since the last start."""
        with self.log.open("rb") as log:
            log.seek(self.log_bytes_before)
            return log.read().decode(errors="replace")


def environment() -> dict[str, str]:
    """Our environment without settings for other runs, and with the path of this very package."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(ENVIRONMENT_PREFIX) or key in (STATE_VARIABLE, CACHE_VARIABLE)
    }
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    # Unbuffered: the log must be complete when its writer is killed.
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
