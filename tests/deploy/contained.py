"""A command as an engine starts it: with the variables of its file alone, and only some folders to write to.

What is real: the command line, its environment, its exit code, signals, and all processes that it starts.
What stands in for the engine's own: paths of volumes are replaced by folders of the test (`Mounts`), names of
machines are looked up in a table, and the read-only file system is kept by Python's audit hook
(`image/sitecustomize.py`). User, network and limits are those of the test.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.processes import LOOK_SECONDS, Process, wait_until

IMAGE = Path(__file__).parent / "image"
# For a whole training with several restarts, on a machine with other work.
PATIENCE_SECONDS = 240.0
# In the environment of every process of a container, also of those whose parent has died.
MARK = "TEST_CONTAINER"


@dataclass(frozen=True)
class Mounts:
    """Which folder of the test stands for which path in a container."""

    folders: Mapping[str, Path]
    # Those that may be written.
    writable: Sequence[str]
    # What /tmp is there.
    scratch: Path

    def inside(self, text: str) -> str:
        """A word or a value in which the paths of mounts are replaced."""
        # All at once, the longest first: a folder of the test may lie under the path of another mount.
        paths = "|".join(re.escape(path) for path in sorted(self.folders, key=len, reverse=True))
        return re.sub(rf"(?<![\w./-])({paths})(?![\w.-])", lambda found: str(self.folders[found[1]]), text)


@dataclass(frozen=True)
class Start:
    """What is started."""

    words: Sequence[str]
    variables: Mapping[str, str]
    mounts: Mounts
    folder: str = "/"
    # Names of machines that are this one.
    hosts: Sequence[str] = ()
    # How many cores the command may use; all, if none are named.
    cores: int | None = None


@dataclass
class Container:
    """A started command, and all processes that it has started."""

    process: Process
    mark: str
    output: Path
    is_asked_to_end: bool = field(default=False)

    @classmethod
    def start(cls, start: Start, output: Path) -> Container:
        mark, mounts = uuid.uuid4().hex, start.mounts
        places = [mounts.scratch, *(mounts.folders[path] for path in mounts.writable)]
        writable = [f"{place.resolve()}/" for place in places]
        variables = {
            "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
            **{name: mounts.inside(value) for name, value in start.variables.items()},
            "TMPDIR": str(mounts.scratch),
            "PYTHONPATH": str(IMAGE),
            "TEST_HOSTS": ",".join(f"{host}=127.0.0.1" for host in start.hosts),
            "TEST_WRITABLE": ":".join(writable),
            MARK: mark,
        }
        words = [mounts.inside(word) for word in start.words]
        folder = mounts.inside(start.folder)
        with output.open("ab") as file:
            child = subprocess.Popen(
                [*_limited_to(start.cores), *words],
                env=variables,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        return cls(Process(child.pid, child.poll, output), mark, output)

    def ask_to_end(self) -> None:
        """SIGTERM to the command alone, as an engine sends it."""
        self.is_asked_to_end = True
        self.process.send_signal(signal.SIGTERM)

    def members(self) -> list[psutil.Process]:
        """All processes of the container that have not ended."""
        return [each for each in psutil.process_iter() if each.pid != os.getpid() and self._is_member(each)]

    def _is_member(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return bool(process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark)
        return False

    def wait_for_members(self) -> None:
        """Wait until what an orderly end leaves for a moment has gone too."""
        wait_until(lambda: not self.members(), lambda: f"left behind: {self.members()}\n{self.process.text}")

    def kill_members(self) -> None:
        """Kill what is left, as an engine does once the command has ended."""
        for each in self.members():
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.wait_for_members()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.kill_members()


def wait_while(work: Callable[[], object], is_so: Callable[[], bool], told: Callable[[], str]) -> None:
    """Let an engine work until the condition holds; fail with what `told` says if it never does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        work()
        assert time.monotonic() < deadline, told()
        time.sleep(LOOK_SECONDS)


def _limited_to(cores: int | None) -> list[str]:
    """A command that runs another one on so many cores, and becomes it."""
    if cores is None:
        return []
    chosen = random.sample(sorted(os.sched_getaffinity(0)), k=min(cores, len(os.sched_getaffinity(0))))
    return ["taskset", "--cpu-list", ",".join(map(str, chosen))]


def lines_of(containers: Sequence[Container]) -> Iterator[str]:
    """What all of them printed, for the message of a test that failed."""
    for each in containers:
        yield f"--- {each.output.name} {each.process.poll()}\n{each.process.text}"
