"""Our own contestant: a run of `w5xde` in its own process tree, measured from inside.

Only applied batches count. The rate is measured over a window that begins some time after the first step and
ends before the run; the rate of the whole run is reported as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from w5xde.api import Watcher, run_coordinator
from w5xde.bench.jobs import BATCH_SIZE, SEED, loss_of
from w5xde.bench.measure.meter import (
    cpu_seconds,
    forget_peak,
    lent_bytes,
    peak_bytes,
    resident_bytes,
    resident_without_nodes_bytes,
    tree,
)
from w5xde.bench.measure.processes import Line, run_apart
from w5xde.bench.suites.checks import CheckTurns
from w5xde.config import Settings
from w5xde.errors import UsageError
from w5xde.learn.job.job import Job
from w5xde.runtime.coordinator.body import Coordinator
from w5xde.runtime.durable.audit import audit_run
from w5xde.runtime.system.memory import pss_bytes

# A look at the status costs more with more nodes; with few, steps may be long and need closer timing.
LOOK_SECONDS = 0.1
LOOK_SECONDS_IF_FEW = 0.02
FEW_NODES = 4
WARM_UP_SECONDS = 2.0
FLOAT_BYTES = 4
# The warm-up is at most this part of a short run.
WARM_UP_PART = 0.25


class Window(msgspec.Struct):
    """What happened between two moments of a run; as a moment, the totals until then."""

    seconds: float = 0.0
    batches: int = 0
    steps: int = 0
    cpu_seconds: float = 0.0
    bytes_moved: int = 0

    @property
    def batches_per_second(self) -> float | None:
        return self.per_second(self.batches)

    @property
    def cpu_us_per_batch(self) -> float | None:
        return 1e6 * self.cpu_seconds / self.batches if self.batches else None

    def per_second(self, count: float) -> float | None:
        """The rate of a count; None if the window holds no step."""
        return count / self.seconds if self.steps else None


class Checks(msgspec.Struct):
    """Batches a second in turns with and without the checks of updates, and the CPU time of the checks."""

    looking: list[float]
    blind: list[float]
    cpu_seconds: float
    look_cpu_seconds: float


class ProductRun(msgspec.Struct):
    """The measurements of one run of w5xde."""

    summary: dict[str, Any]
    folder: str
    reason: str
    window: Window
    warm_up_seconds: float
    memory_pss_bytes: int | None
    # The peak growth of the coordinator's memory in training, since just before the model was built.
    coordinator_memory_bytes: int | None
    loss_all_samples: float | None
    # Of a run that made its checks in turns.
    checks: Checks | None = None

    @property
    def batches_per_node(self) -> dict[str, int]:
        return {node["name"]: node["batches"] for node in self.summary["nodes"]}

    @property
    def fairness(self) -> float | None:
        """The most batches of a node over the least; None if a node did nothing."""
        counts = self.batches_per_node.values()
        return max(counts) / min(counts) if counts and min(counts) else None


@dataclass(frozen=True, slots=True)
class Count:
    """The count of a run by its ledger."""

    is_clean: bool
    batches: int
    violations: list[str]


def count_again(run: ProductRun) -> Count:
    """Audit a run: its ledger must have exactly the reported batches, for each node."""
    report = audit_run(Path(run.folder))
    found = report.findings
    wrong = list(found.violations)
    if found.batches != run.summary["batches"]:
        wrong.append(f"{run.summary['batches']} batches were reported, the ledger has {found.batches}")
    for name, batches in run.batches_per_node.items():
        recorded = found.nodes[name].batches if name in found.nodes else 0
        if recorded != batches:
            wrong.append(f"{batches} batches of {name} were reported, the ledger has {recorded}")
    return Count(not wrong, found.batches, wrong)


def settings_for(runs: str, **given: Any) -> Settings:
    """Settings of a measured run. Ignores the environment and the files of the user."""
    base: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "seed": SEED,
        "threads": 1,
        "devices": "cpu",
        "runs": str(Path(runs).absolute()),
        "log": "silent",
    }
    try:
        return Settings(**base | given)
    except ValueError as error:
        raise UsageError(
            str(error), code="W5-210", fix="w5xde train --help-all lists every setting"
        ) from None


@contextlib.contextmanager
def runs_folder(kept: str | None) -> Iterator[str]:
    """The folder for runs: the user's, or a temporary one."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="w5xde-bench-") as folder:
        yield folder


def run_product(
    job: Job,
    settings: Settings,
    *,
    name: str,
    window_seconds: float | None = None,
    measures_loss: bool = True,
    has_view: bool = False,
    checks_in_turns: bool = False,
) -> ProductRun:
    """Train with these settings, which must set `seconds`, in separate processes.

    With `window_seconds` the run ends when a window of that length has been measured. With `has_view` the
    view of `settings.log` is drawn, into memory. With `checks_in_turns` the checks of updates are off half of
    the time (see `checks`).
    """
    seconds = settings.seconds or 0.0
    nodes = settings.node_count or 0
    stopwatch = Stopwatch(window_seconds or seconds, nodes, stops=window_seconds is not None)
    watcher = _Shown(stopwatch, settings) if has_view else stopwatch

    def work(line: Line) -> ProductRun:
        if checks_in_turns:
            stopwatch.checks.start()
        return run_here(job, settings, name, stopwatch, watcher, measures_loss=measures_loss)

    return msgspec.convert(run_apart(work, "w5xde", seconds), ProductRun)


def run_here(
    job: Job,
    settings: Settings,
    name: str,
    stopwatch: Stopwatch,
    watcher: Watcher,
    *,
    measures_loss: bool = False,
) -> ProductRun:
    """Run in this process. `watcher` is the stopwatch, or forwards to it."""
    before: list[int] = []

    def model() -> Any:
        if not before:
            before.append(resident_bytes())
        return job.model()

    result = run_coordinator(replace(job, model=model), settings, watcher=watcher, name=name)
    peak, checks = stopwatch.peak_bytes, stopwatch.checks
    return ProductRun(
        summary=result.summary,
        folder=str(result.folder.absolute()),
        reason=result.reason,
        window=stopwatch.window(),
        warm_up_seconds=stopwatch.warm_up_seconds,
        memory_pss_bytes=stopwatch.memory_pss_bytes,
        coordinator_memory_bytes=peak - before[0] if peak is not None else None,
        loss_all_samples=loss_of(job, result.model, settings.batch_samples) if measures_loss else None,
        checks=Checks(checks.looking, checks.blind, checks.cpu_seconds, checks.look_cpu_seconds),
    )


class _Shown(Watcher):
    """Forwards to a stopwatch, and draws the view of a user into memory."""

    def __init__(self, stopwatch: Stopwatch, settings: Settings) -> None:
        from w5xde.cli.view import View

        self._stopwatch = stopwatch
        self._view = View(settings, io.StringIO())

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        self._view.started(coordinator, settings, job_name)
        self._stopwatch.started(coordinator, settings, job_name)

    def ended(self) -> None:
        self._view.ended()


class Announcing(Watcher):
    """Forwards to a watcher, and says over a line with which ticket nodes can join."""

    def __init__(self, watcher: Watcher, line: Line) -> None:
        self._watcher = watcher
        self._line = line

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        self._watcher.started(coordinator, settings, job_name)
        ticket = coordinator.gatekeeper.ticket
        self._line.say(ticket.to_text() if ticket is not None else "")

    def ended(self) -> None:
        self._watcher.ended()


class Stopwatch(Watcher):
    """Reads the status of a run a few times a second, on the event loop of the coordinator."""

    def __init__(self, seconds: float, nodes: int, *, stops: bool, warm_up_steps: int = 1) -> None:
        self._warm_up_steps = warm_up_steps
        self.warm_up_seconds = min(WARM_UP_SECONDS, WARM_UP_PART * seconds)
        self.memory_pss_bytes: int | None = None
        # The kernel's peak; if nodes share memory with the coordinator, the most that was seen after a step.
        self.peak_bytes: int | None = None
        self._peak_seen = 0
        self.checks = CheckTurns()
        self._seconds = seconds
        self._stops = stops
        self._look_seconds = LOOK_SECONDS if nodes > FEW_NODES else LOOK_SECONDS_IF_FEW
        self._first_step_at: float | None = None
        self._steps_seen = 0
        self._begin: Window | None = None
        self._end: Window | None = None
        self._tree: list[int] = []

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._look()

    def _look(self) -> None:
        if self._coordinator.is_over:
            return
        self._loop.call_later(self._look_seconds, self._look)
        status = self._coordinator.status()
        # The window begins and ends with a step, so that it never cuts a long step.
        if status.step == self._steps_seen:
            return
        self._steps_seen = status.step
        now = self._loop.time()
        if self._first_step_at is None:
            self._first_step_at = now
            # Memory for the trial of the first batch does not count, only memory for training.
            forget_peak()
        # What nodes have put into shared memory is theirs: it is in `memory_pss_bytes`, once.
        own = resident_without_nodes_bytes(FLOAT_BYTES * status.parameters)
        is_sharing = own is not None and own < resident_bytes()
        seen = own if is_sharing else peak_bytes()
        self.peak_bytes = max(seen, self._peak_seen) if seen is not None else None
        self._peak_seen = self.peak_bytes or 0 if is_sharing else 0
        if now - self._first_step_at < self.warm_up_seconds or status.step < self._warm_up_steps:
            return
        # Costly, so only twice: when all nodes have joined, and in the middle.
        if not self._tree:
            self._tree = tree(os.getpid())
        if self.memory_pss_bytes is None and now - self._first_step_at >= self._seconds / 2:
            self._weigh()
        self._end = Window(
            seconds=now,
            batches=status.batches,
            steps=status.step,
            cpu_seconds=cpu_seconds(self._tree),
            bytes_moved=status.bytes_sent + status.bytes_received,
        )
        self._begin = self._begin or self._end
        self.checks.turn(now, status.batches)
        if self._stops and now - self._begin.seconds >= self._seconds:
            self._coordinator.stop("measured")

    def _weigh(self) -> None:
        pss = pss_bytes(tree(os.getpid()))
        # Our parent shares its loaded libraries with these processes; a real run would own that memory.
        self.memory_pss_bytes = pss + lent_bytes(os.getppid())

    def window(self) -> Window:
        """The window from the end of the warm-up to the last look."""
        begin, end = self._begin, self._end
        if begin is None or end is None:
            return Window()
        return Window(
            **{key: getattr(end, key) - getattr(begin, key) for key in Window.__struct_fields__},
        )
