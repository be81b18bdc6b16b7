"""A pool of real processes, a coordinator and its nodes, that can be killed and frozen.

Watches them only from outside: their logs, the run folder and their exit codes. Restarts killed processes,
wakes frozen ones, and ends all of them at last. Decides nothing about when to kill which.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from w5xde.chaos.child import Child, Command, Process, environment, spawn
from w5xde.config import Settings
from w5xde.errors import NOT_OVER, TrainingError, UsageError
from w5xde.runtime.durable.disk import RealDisk
from w5xde.runtime.durable.ledger_segments import LedgerReader, segments

JOB = "w5xde.chaos:slow_job"
TICKET = "ticket"
POLL_SECONDS = 0.05
# Progress is printed this often when nothing happens.
PROGRESS_SECONDS = 5.0
# Loading torch takes seconds, and nodes retry every few seconds: longer than this is a hang.
PATIENCE_SECONDS = 90.0
# Seconds for nodes to end after the run; a node that was just being started would never end by itself.
PARTING_SECONDS = 5.0
# A killed node is started again after this long; a coordinator at once.
NODE_RESTART_SECONDS = 0.2
# The newest row of metrics is in these last bytes.
TAIL_BYTES = 16 * 1024
LOG_LINES_SHOWN = 3
# Exit codes of processes that ended in order: with the run, or because it was asked to stop.
_ORDERLY = (0, NOT_OVER)


class PoolProgress(msgspec.Struct, frozen=True):
    """The progress of the run, by the newest row of its metrics, at most a second old."""

    step: int = 0
    durable_steps: int = 0
    epoch: int = 0
    batches: int = 0
    loss: float | None = None
    # Batches of each node so far.
    nodes: dict[str, int] = {}


class ChaosPool:
    """Open it as a context, which ends every process at its end, also after Ctrl-C and errors.

    Everything happens in `poll`, which `until` calls repeatedly; each event is one line of output.
    """

    def __init__(
        self,
        run: Path,
        settings: Settings,
        say: Callable[[str], None],
        start: Callable[[Command], Process] = spawn,
    ) -> None:
        if not hasattr(signal, "SIGSTOP"):
            raise UsageError("this system cannot freeze a process", code="W5-303", fix="try Linux or macOS")
        self.run = run.absolute()
        self.logs = self.run.with_name(f"{run.name}.chaos")
        self.coordinator = Child("the coordinator", self.logs / "coordinator.log", "listening on")
        self.nodes: list[Child] = []
        # Seconds with a working coordinator; these times the share of working nodes (two of four nodes for
        # ten seconds give five); and seconds without a coordinator.
        self.up_seconds = 0.0
        self.ready_seconds = 0.0
        self.down_seconds = 0.0
        self._settings = settings
        self._say = say
        self._start_process = start
        self._began_at = self._told_at = self._polled_at = time.monotonic()
        self._is_interrupted = False
        self._environment = environment()

    @property
    def children(self) -> list[Child]:
        return [self.coordinator, *self.nodes]

    @property
    def is_over(self) -> bool:
        """Whether the run has ended by itself, or because it was asked to."""
        process = self.coordinator.process
        return process is not None and process.poll() in _ORDERLY

    def tell(self, text: str) -> None:
        self._told_at = time.monotonic()
        self._say(f"{self._told_at - self._began_at:5.1f} s  {text}")

    # --- beginning and end ------------------------------------------------------------------------

    @contextmanager
    def open(self) -> Iterator[ChaosPool]:
        """Start the coordinator and wait until it is ready; end all processes at the end of the context."""
        with self._signals_noted():
            try:
                self.logs.mkdir(parents=True, exist_ok=True)
                self._start(self.coordinator)
                self.until(lambda: self.coordinator.is_ready, "the coordinator listens")
                self.tell("the coordinator listens")
                yield self
            finally:
                for child in self.children:
                    child.end()

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Only note signals, so that none interrupts the start of a process, which would then be lost."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: object) -> None:
            self._is_interrupted = True

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # Signals that are ignored already (nohup) stay ignored.
        heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def add_node(self) -> Child:
        """Start one more node."""
        name = f"node-{len(self.nodes) + 1}"
        node = Child(name, self.logs / f"{name}.log", "looking for the coordinator")
        self.nodes.append(node)
        self._start(node)
        return node

    def _start(self, child: Child) -> None:
        if child is not self.coordinator:
            words = [
                "join",
                f"@{self.logs / TICKET}",
                JOB,
                "--nodes",
                "1",
                "--name",
                child.name,
                "--wait",
                str(PATIENCE_SECONDS),
            ]
        elif child.lives:
            words = ["serve", JOB, "--resume", str(self.run)]
        else:
            place = ["--name", self.run.name, "--runs", str(self.run.parent)]
            place += ["--ticket-file", str(self.logs / TICKET)]
            words = ["serve", JOB, *place, *_flags(self._settings)]
        child.lives += 1
        child.is_ready, child.starts_at = False, None
        child.log.touch()
        child.log_bytes_before = child.log.stat().st_size
        child.process = self._start_process(Command(words, child.log, self.logs, self._environment))

    def finish(self) -> None:
        """Wait until the run has ended by itself, and then for the nodes."""
        self.until(lambda: self.is_over, "the run ends")
        deadline = time.monotonic() + PARTING_SECONDS
        self.until(
            lambda: time.monotonic() > deadline or not any(node.is_alive for node in self.nodes),
            "the nodes go",
        )

    def stop(self) -> None:
        """Ask the coordinator to finish the current step and stop, as Ctrl-C does, and wait for that."""
        if self.coordinator.process is not None:
            self.coordinator.process.send_signal(signal.SIGINT)
        self.finish()

    # --- faults -----------------------------------------------------------------------------------

    def kill(self, child: Child) -> bool:
        """Kill a process by SIGKILL; it is restarted. False if it is not running."""
        if not child.is_alive:
            return False
        child.end()
        child.kills += 1
        is_coordinator = child is self.coordinator
        child.starts_at = time.monotonic() + (0.0 if is_coordinator else NODE_RESTART_SECONDS)
        progress = self.progress()
        saved = f" ({progress.durable_steps} of them saved)" if is_coordinator else ""
        self.tell(f"killed {child.name} at step {progress.step}{saved}")
        return True

    def freeze(self, child: Child, seconds: float) -> bool:
        """Stop a process by SIGSTOP, and wake it by SIGCONT after `seconds`. False if it is not running."""
        if child.process is None or not child.is_alive or child.thaws_at is not None:
            return False
        child.process.send_signal(signal.SIGSTOP)
        child.thaws_at = time.monotonic() + seconds
        child.freezes += 1
        self.tell(f"froze {child.name} for {seconds:.1f} s at step {self.progress().step}")
        return True

    def thaw(self, child: Child) -> None:
        if child.process is not None and child.thaws_at is not None:
            child.thaws_at = None
            child.process.send_signal(signal.SIGCONT)
            self.tell(f"{child.name} goes on")

    # --- watching ---------------------------------------------------------------------------------

    def until(self, is_so: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Poll until the condition holds; TrainingError after `seconds`."""
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise self._error(f"waited {seconds:.0f} s in vain until {what}", self.coordinator)
            time.sleep(POLL_SECONDS)
            self.poll()

    def wait(self, seconds: float) -> None:
        """Poll for that long."""
        deadline = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= deadline, f"{seconds:.0f} s are over", seconds + 1.0)

    def until_step(self, step: int) -> None:
        """Poll until the run has come this far, or to its end."""
        self.until(lambda: self.progress().step >= step or self.is_over, f"step {step} is applied")

    def poll(self) -> None:
        """Check every process once: count the time, do what is due, and raise if one ended by itself."""
        if self._is_interrupted:
            raise KeyboardInterrupt
        now = time.monotonic()
        self._count(now)
        for child in self.children:
            if child.starts_at is not None and now >= child.starts_at:
                self._start(child)
            if child.thaws_at is not None and now >= child.thaws_at:
                self.thaw(child)
            if child.becomes_ready() and child.lives > 1:
                where = f", and goes on from step {self.restored_step()}" * (child is self.coordinator)
                self.tell(f"{child.name} is back{where}")
            status = child.process.poll() if child.process is not None else None
            if status is not None and status not in _ORDERLY:
                raise self._error(f"{child.name} ended by itself with exit code {status}", child)
        if now - self._told_at >= PROGRESS_SECONDS:
            self._tell_progress()

    def _tell_progress(self) -> None:
        progress = self.progress()
        working = sum(node.is_working for node in self.nodes)
        loss = f", loss {progress.loss:.4f}" if progress.loss is not None else ""
        self.tell(f"step {progress.step}, epoch {progress.epoch}{loss}, {working} of {len(self.nodes)} nodes")

    def _count(self, now: float) -> None:
        passed, self._polled_at = now - self._polled_at, now
        if self.coordinator.is_working:
            self.up_seconds += passed
            working = sum(node.is_working for node in self.nodes)
            self.ready_seconds += passed * working / max(1, len(self.nodes))
        elif not self.is_over and self.up_seconds:
            self.down_seconds += passed

    def _error(self, what: str, child: Child) -> TrainingError:
        last = [line for line in child.words().splitlines() if line.strip()][-LOG_LINES_SHOWN:]
        return TrainingError(what, code="W5-313", why=" / ".join(last), fix=f"see the logs in {self.logs}")

    def progress(self) -> PoolProgress:
        """The newest whole row of the metrics: a killed coordinator may leave half a row."""
        try:
            with (self.run / "metrics.jsonl").open("rb") as metrics:
                metrics.seek(max(0, metrics.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = metrics.read().split(b"\n")
        except OSError:
            return PoolProgress()
        for line in reversed(lines):
            try:
                return msgspec.json.decode(line, type=PoolProgress)
            except msgspec.DecodeError:
                continue
        return PoolProgress()

    def records(self) -> Iterator[dict[str, Any]]:
        """The records of the ledger so far."""
        return LedgerReader(RealDisk(self.run)).records()

    def restored_step(self) -> int:
        """The step from which the newest life of the coordinator continued, by its first ledger records."""
        newest = self.run / segments(RealDisk(self.run))[-1][1]
        with newest.open("rb") as lines:
            found = [msgspec.json.decode(line)["sealed"] for line, _ in zip(lines, range(3), strict=False)]
        return next((int(record["version"]) for record in found if record["kind"] == "restore"), 0)

    def summary(self) -> dict[str, Any]:
        """Counts of all faults, and the seconds without a coordinator."""
        return {
            "seconds": round(time.monotonic() - self._began_at, 3),
            "kills": sum(node.kills for node in self.nodes),
            "coordinator_kills": self.coordinator.kills,
            "freezes": sum(child.freezes for child in self.children),
            "seconds_down": round(self.down_seconds, 3),
        }


def _flags(settings: Settings) -> list[str]:
    """The flags of a coordinator with these settings and with frequent checkpoints: a kill costs little."""
    values = {
        "host": "127.0.0.1",
        "port": 0,
        "nodes": 0,
        "mode": settings.mode,
        "batch-size": settings.batch_samples,
        "batches-per-step": settings.step_batches,
        "seed": settings.seed,
        "threads": settings.threads,
        "checkpoint-every": "2s",
        "epochs": settings.epochs,
        "steps": settings.steps,
        "seconds": settings.seconds,
    }
    return [word for key, value in values.items() if value is not None for word in (f"--{key}", str(value))]
