"""The processes that tests start: real coordinators and nodes, and how to wait for, freeze and kill them.

A process starts in one of three ways:

    command      a `w5xde` command, in a child of a fork server that has already loaded torch
    forked       a function of the test, in a fork of the test's own process
    run_python   a fresh interpreter that runs to its end, for what a real start loads, prints and returns

`coordinator` and `node` are forks that serve and join runs. No process outlives its `with` block, also when
the test fails. Tests wait for what a process has done, never for a number of seconds.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

import w5xde
from w5xde.callbacks.status import RunStatus
from w5xde.chaos.child import Command
from w5xde.chaos.warm_start import start_warm
from w5xde.runtime.admission.register import TicketRegister
from w5xde.ticket import Ticket, parse

ROOT = Path(__file__).resolve().parents[1]
JOBS = str(ROOT / "tests" / "system" / "jobs.py")
HERE = "127.0.0.1"
# Longer than anything here takes on a busy machine; a test that waits so long has failed.
PATIENCE_SECONDS = 60.0
# How often a test looks for what another process does; far less than any of them takes.
LOOK_SECONDS = 0.01


def wait_until(is_so: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Return once the condition holds; fail with the second function's text if it never does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(LOOK_SECONDS)


def wait_for_file(path: Path) -> Path:
    """Return the path once another process has written the file, which it must do by renaming."""
    wait_until(path.exists, lambda: f"{path} was never written")
    return path


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", **extra}


# --- one process ----------------------------------------------------------------------------------


class Process:
    """A process that a test started; its stdout and stderr go to one file, so it never waits for a reader.

    `poll` returns its exit code (negative: the signal that killed it), or None while it runs.
    """

    def __init__(self, pid: int | None, poll: Callable[[], int | None], output: Path) -> None:
        assert pid is not None
        self.pid = pid
        self.poll = poll
        self._output = output
        self._text: str | None = None
        self._next_line = 0

    @property
    def text(self) -> str:
        """Everything that the process has printed so far."""
        return self._output.read_text(errors="replace") if self._text is None else self._text

    def wait_for(self, text: str) -> str:
        """Return the next line that contains the text, after those that earlier calls returned."""
        found: list[str] = []

        def is_there() -> bool:
            has_ended = self.poll() is not None
            lines = self.text.splitlines(keepends=True)
            for at in range(self._next_line, len(lines)):
                if text in lines[at] and lines[at].endswith("\n"):
                    found.append(lines[at])
                    self._next_line = at + 1
                    return True
            assert not has_ended, f"the process ended without printing {text!r}:\n{self.text}"
            return False

        wait_until(is_there, lambda: f"the process does not print {text!r}:\n{self.text}")
        return found[0]

    def wait(self) -> int:
        """Wait for the process to end, not for its children; return its exit code."""
        wait_until(lambda: self.poll() is not None, lambda: f"the process does not end:\n{self.text}")
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int, /) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def interrupt(self) -> None:
        self.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill this process alone; local nodes that it started notice later and end by themselves."""
        self.send_signal(signal.SIGKILL)

    def kill_with_children(self) -> None:
        family = psutil.Process(self.pid).children(recursive=True)
        self.kill()
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def close(self) -> None:
        """Make sure that the process is gone, and keep what it printed."""
        if self.poll() is None:
            with suppress(psutil.NoSuchProcess):
                self.kill_with_children()
        self.wait()
        self._text = self.text


# --- three ways to start one ----------------------------------------------------------------------


def _print_to(output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # A fork of the test has pytest's streams, which do not lead to these descriptors.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _run_function(work: Callable[[], object], output: Path) -> None:
    _print_to(output)
    work()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for threads that still compute: a test may ask how soon a run ends.
    os._exit(0)


def start_command(words: list[str], folder: Path, variables: Mapping[str, str], output: Path) -> Process:
    """Start a command whose end is the caller's concern; tests use `command`, chaos pools use this."""
    child = start_warm(Command(words, output, folder, dict(variables)))
    return Process(child.pid, child.poll, output)


def _start_interpreter(words: list[str], folder: Path, variables: Mapping[str, str], output: Path) -> Process:
    with output.open("ab") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "w5xde", *words], stdout=file, stderr=file, cwd=folder, env=dict(variables)
        )
    return Process(child.pid, child.poll, output)


@contextmanager
def _closing(start: Callable[[Path], Process]) -> Iterator[Process]:
    descriptor, name = tempfile.mkstemp(prefix="w5xde-test-output-")
    os.close(descriptor)
    output = Path(name)
    try:
        running = start(output)
        try:
            yield running
        finally:
            running.close()
    finally:
        output.unlink()


@contextmanager
def command(
    *words: str, cwd: Path | None = None, is_fresh: bool = False, **variables: str
) -> Iterator[Process]:
    """Run a `w5xde` command; `is_fresh`: in an interpreter of its own, as a person would start it."""
    start = _start_interpreter if is_fresh else start_command
    folder, every = cwd or Path.cwd(), environment(**variables)
    with _closing(lambda output: start(list(words), folder, every, output)) as running:
        yield running


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[Process]:
    """Run a function in a fork of this process: it has torch already, and all that the function refers to."""

    def start(output: Path) -> Process:
        child = multiprocessing.get_context("fork").Process(target=_run_function, args=(work, output))
        # By a thread that has computed nothing: a child of one that has would wait for OpenMP's threads.
        with ThreadPoolExecutor(max_workers=1) as fresh_thread:
            fresh_thread.submit(child.start).result()
        return Process(child.pid, lambda: child.exitcode, output)

    with _closing(start) as running:
        yield running


def run_python(
    *arguments: str,
    cwd: Path = ROOT,
    seconds_max: float = PATIENCE_SECONDS,
    prefix: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter to its end; `prefix` is a command that runs it, such as `ip netns exec`."""
    return subprocess.run(
        [*prefix, sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**variables or {}),
        timeout=seconds_max,
        check=False,
    )


def run_json(*words: str, cwd: Path, **variables: str) -> dict[str, Any]:
    """Run a command with --json in a fresh interpreter; its stdout must be exactly one JSON object."""
    done = run_python("-m", "w5xde", *words, "--json", cwd=cwd, variables=variables)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- coordinators and nodes -----------------------------------------------------------------------


@dataclass
class Coordinator:
    """A coordinator in a process of its own, and what it has written to its run folder."""

    process: Process
    folder: Path
    ticket: Ticket
    settings: dict[str, Any]

    @property
    def port(self) -> int:
        return self.ticket.addresses[0][1]

    @property
    def register(self) -> TicketRegister:
        return TicketRegister(self.folder)

    def metrics(self) -> dict[str, Any]:
        """Return the newest row of metrics; the coordinator writes one a second."""
        lines = whole_lines(self.folder / "metrics.jsonl")
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {"step": 0, "seconds": 0.0, "batches": 0}
        return found

    def metrics_after(self, seconds: float) -> dict[str, Any]:
        """Return the first row of metrics that is later than this second of the run."""
        wait_until(lambda: self.metrics()["seconds"] > seconds, lambda: f"nothing new after {seconds} s")
        return self.metrics()

    def step(self) -> int:
        return int(self.metrics()["step"])

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step() >= step, lambda: f"still at step {self.step()}")

    def ledger_text(self) -> str:
        return str(events(self.folder))

    def wait_until_recorded(self, text: str) -> None:
        """Wait until the text is in the ledger."""
        wait_until(
            lambda: text in self.ledger_text(), lambda: f"{text!r} is not in {self.ledger_text()[-2000:]}"
        )

    def result(self) -> dict[str, Any]:
        """Return the summary of a run that has ended."""
        found: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())["result"]
        return found

    def stop(self) -> dict[str, Any]:
        """Interrupt the run, wait for its end, and return its summary."""
        self.process.interrupt()
        assert self.process.wait() == 0, self.process.text
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL

    def stop_and_compare(self, runs: Path) -> dict[str, Any]:
        """Stop the run: it has the weights that one undisturbed node gives in as many steps."""
        self.wait_for_step(1)
        result = self.stop()
        self.compare(runs, result)
        return result

    def compare(self, runs: Path, result: dict[str, Any]) -> None:
        alone = {"host": HERE, "name": "alone", "steps": result["steps"], "epochs": None, "ticket_file": None}
        again = w5xde.train(f"{JOBS}:job", runs=str(runs), **{**self.settings, **alone})
        assert again.summary["weights_sha256"] == result["weights_sha256"]


@contextmanager
def _serving(work: Callable[[], object], folder: Path, settings: dict[str, Any]) -> Iterator[Coordinator]:
    """Yield the coordinator once it listens: it then writes its ticket to a file."""
    file = Path(settings["ticket_file"])
    with forked(work) as process:
        wait_until(lambda: file.exists() or process.poll() is not None, lambda: process.text)
        assert file.exists(), process.text
        ticket = parse(file.read_text())
        here = replace(ticket, addresses=((HERE, ticket.addresses[0][1]),))
        yield Coordinator(process, folder, here, settings)


@contextmanager
def coordinator(runs: Path, job: str = f"{JOBS}:slow", **more: Any) -> Iterator[Coordinator]:
    """Serve a run over TLS, with one local node, at this machine's own address; yield it once it listens."""
    settings = {"host": "0.0.0.0", "nodes": 1, "epochs": 9999, "batch_size": 6, "batches_per_step": 4, **more}
    settings |= {"ticket_file": str(runs / "ticket"), "name": "mine", "port": 0}
    work = functools.partial(w5xde.serve, job, runs=str(runs), **settings)
    with _serving(work, runs / "mine", settings) as found:
        yield found


@contextmanager
def resumed(before: Coordinator, job: str = f"{JOBS}:slow", **settings: Any) -> Iterator[Coordinator]:
    """Serve the run of a coordinator that was killed or has ended; yield it once it listens."""
    Path(before.settings["ticket_file"]).unlink(missing_ok=True)
    work = functools.partial(w5xde.serve, job, resume="mine", runs=str(before.folder.parent), **settings)
    with _serving(work, before.folder, before.settings) as found:
        yield found


@contextmanager
def node(
    ticket: Ticket | Path, job: str = "slow", *, seconds: float = 0.0, **settings: Any
) -> Iterator[Process]:
    """Join as one node; `ticket` may be a file that will be written, `seconds` is what a batch takes."""

    def join() -> None:
        if seconds:
            os.environ["TEST_BATCH_SECONDS"] = str(seconds)
        found = f"@{wait_for_file(ticket)}" if isinstance(ticket, Path) else ticket
        w5xde.join(found, f"{JOBS}:{job}", **{"nodes": 1, **settings})

    with forked(join) as process:
        yield process


def ticket_of(coordinator: Process) -> str:
    """Return the ticket in the line that a coordinator prints."""
    return coordinator.wait_for("to join:").split("to join:")[1].split()[2]


def sha256_of(coordinator: Process) -> str:
    """Return the hash of the code that a coordinator offers, by the line after that with its ticket."""
    return coordinator.wait_for("its code:").split("sha256")[1].strip()


# --- a run in the test's own process --------------------------------------------------------------


class AtStep(w5xde.Callback):
    """Calls a function when a step has been applied."""

    def __init__(self, actions: dict[int, Callable[[RunStatus], None]]) -> None:
        self._actions = actions

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        action = self._actions.get(step)
        if action is not None:
            action(run)


class HurryOnce(w5xde.Callback):
    """Writes the file for which `jobs.slow` waits, once all these nodes have joined."""

    def __init__(self, file: Path, *nodes: str) -> None:
        self._file = file
        self._missing = set(nodes)

    def on_node_join(self, run: RunStatus, node: str) -> None:
        self._missing.discard(node)
        if not self._missing:
            self._file.touch()


def family(pid: int) -> list[psutil.Process]:
    """Return the processes that this one has started, and those that these have."""
    return psutil.Process(pid).children(recursive=True)


def forked_nodes(pid: int) -> list[psutil.Process]:
    """Return the nodes of a command: children of its fork server, which is a child of the guard."""
    found = family(pid)
    parents = {each.ppid() for each in found}
    return [each for each in found if each.pid not in parents and each.ppid() != pid]


def kill_any_node(run: RunStatus) -> str:
    """Kill a local node that has joined, and return its name."""
    name, pid = next((node.name, node.pid) for node in run.nodes if node.pid is not None)
    os.kill(pid, signal.SIGKILL)
    return name


def pid_of(run: RunStatus, name: str) -> int:
    """Return the process of a local node."""
    pid = next(node.pid for node in run.nodes if node.name == name)
    assert pid is not None
    return pid


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's ledger, read without any code of w5xde."""
    lines = [line for path in sorted(folder.glob("ledger-*.jsonl")) for line in whole_lines(path)]
    return [json.loads(line)["sealed"] for line in lines]


def count_steps(folder: Path) -> int:
    """Return how many steps are in the ledger of a run, which may not exist yet."""
    return sum(event["kind"] == "step" for event in events(folder))


def wait_for_steps(folder: Path, count: int) -> None:
    wait_until(lambda: count_steps(folder) >= count, lambda: f"{count_steps(folder)} steps")


def wait_for_quiet(folder: Path) -> None:
    """Wait until nothing has happened in a run for a second: its nodes are stuck."""
    wait_until(lambda: time.time() - events(folder)[-1]["time"] > 1, lambda: "the run goes on")


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that may not exist yet, without a last one that is still being written."""
    with suppress(FileNotFoundError):
        return path.read_text().rpartition("\n")[0].splitlines()
    return []
