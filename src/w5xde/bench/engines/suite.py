"""`bench engines`: our pool on Ray beside Ray Train and beside our local pool, in turns, in one cluster.

A row of speed has, for both, the batches a second while all workers are at work, and the seconds from
starting the command to its first step. A row of loss has what one killed worker costs. Rows that we lose are
shown.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w5xde.bench.contestants.product import runs_folder
from w5xde.bench.engines.clusters import RayCluster, ray_cluster
from w5xde.bench.engines.commands import LOCAL, ON_RAY, RAY_TRAIN, RUN, Contestant, EngineRun, run_of
from w5xde.bench.engines.ray_train import TrainTask, missing
from w5xde.bench.engines.step_times import complete_at, outage_after, pace_between
from w5xde.bench.jobs import BATCH_SIZE, TEXT_BATCH_SIZE
from w5xde.bench.measure.meter import machine
from w5xde.bench.measure.pairs import Measured, Turns, dropped, in_turns, median
from w5xde.bench.measure.stats import compare, quotient
from w5xde.bench.progress import Say
from w5xde.engines.start import require_ray
from w5xde.errors import TrainingError
from w5xde.runs import read_manifest
from w5xde.runtime.durable.audit import audit_run

EXTRA = "bench-engines"
# Seconds with all workers at work before anything counts; at most this part of what is measured.
WARM_UP_SECONDS, WARM_UP_PART = 2.0, 0.25
# However long a step takes, so many are measured.
STEPS_MIN = 3
# Of a run that loses a worker: often enough that a run which is set back to a checkpoint loses little.
CHECKPOINT_STEPS = 50


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One row: a job on Ray, and what it is compared with."""

    title: str
    job: str
    batch_size: int
    peer: Contestant
    nodes: int
    # What our figure should at least (of speed) or at most (seconds without a step) be.
    asked: float | None = None
    kills: bool = False


TEXT, LARGE = "107k parameters, batches of 16", "25M parameters"
ENGINE_ROWS: dict[str, EngineRow] = {
    "text": EngineRow(TEXT, "text", TEXT_BATCH_SIZE, RAY_TRAIN, nodes=2),
    "large": EngineRow(LARGE, "large", BATCH_SIZE, RAY_TRAIN, nodes=2),
    "text-local": EngineRow(TEXT, "text", TEXT_BATCH_SIZE, LOCAL, nodes=2, asked=0.95),
    "large-local": EngineRow(LARGE, "large", BATCH_SIZE, LOCAL, nodes=2, asked=0.95),
    "kill": EngineRow(TEXT, "text", TEXT_BATCH_SIZE, RAY_TRAIN, nodes=4, asked=2.0, kills=True),
}


@dataclass(frozen=True, slots=True)
class EnginesOptions:
    """The options of the benchmark."""

    rows: tuple[str, ...] = tuple(ENGINE_ROWS)
    pairs: int = 4
    seconds: float = 10.0
    # None: as many as the row says.
    nodes: int | None = None
    # None: thrown away.
    runs: str | None = None


def run_engines(options: EnginesOptions, say: Say) -> dict[str, Any]:
    """Measure the rows, in one cluster."""
    require_ray(EXTRA)
    hosts = max(options.nodes or ENGINE_ROWS[name].nodes for name in options.rows)
    say(f"a Ray cluster of {hosts} hosts")
    with _folder(options.runs) as runs, ray_cluster(hosts) as cluster:
        rows = [_Row(name, options, cluster, runs, say).measure() for name in options.rows]
    return {
        "bench": "engines",
        "pairs": options.pairs,
        "pairs_dropped": dropped(options.pairs),
        "seconds": options.seconds,
        "cluster": "started for this" if cluster.is_ours else cluster.address,
        "checkpoint_steps": CHECKPOINT_STEPS,
        "rows": rows,
        "audit_clean": all(row["audit_clean"] for row in rows),
        "machine": machine(),
    }


@contextlib.contextmanager
def _folder(kept: str | None) -> Iterator[Path]:
    """A folder for the runs of this benchmark."""
    with runs_folder(kept) as folder:
        path = Path(folder).absolute() / time.strftime("engines-%Y%m%d-%H%M%S")
        path.mkdir(parents=True)
        yield path


class _Row:
    """Measures one row."""

    def __init__(self, name: str, options: EnginesOptions, cluster: RayCluster, runs: Path, say: Say) -> None:
        self._name = name
        self._row = ENGINE_ROWS[name]
        self._options = options
        self._cluster = cluster
        self._runs = runs
        self._say = say
        self._nodes = options.nodes or self._row.nodes

    def measure(self) -> dict[str, Any]:
        row, lacks = self._row, missing() if self._row.peer is RAY_TRAIN else ""
        turns = self._turns(is_alone=bool(lacks))
        return {
            "row": self._name,
            "title": row.title,
            "peer": row.peer.name,
            "kills": row.kills,
            "nodes": self._nodes,
            "batch_size": row.batch_size,
            "asked": row.asked,
            "status": "not installed" if lacks else "measured",
            "why": lacks,
            "fix": f"pip install 'w5xde[{EXTRA}]'" if lacks else "",
            **(loss_figures(turns, row.asked) if row.kills else speed_figures(turns, row.asked)),
            "ours": turns.ones,
            "theirs": turns.others,
            "audit_clean": turns.audit_clean,
        }

    def _turns(self, *, is_alone: bool) -> Turns:
        pairs = self._options.pairs

        def ours() -> Measured:
            return self._run(ON_RAY)

        def theirs() -> Measured:
            return self._run(self._row.peer)

        def say(text: str) -> None:
            self._say(f"{self._name}, {text}")

        if not is_alone:
            return in_turns(pairs, (ON_RAY.name, ours), (self._row.peer.name, theirs), say)
        say(f"{ON_RAY.name} alone: {self._row.peer.name} is not installed")
        found = [ours() for _ in range(pairs)]
        return Turns(found[dropped(pairs) :], [], all(each["audit_clean"] for each in found))

    def _run(self, contestant: Contestant) -> Measured:
        row, checkpoints = self._row, CHECKPOINT_STEPS if self._row.kills else 0
        task = TrainTask(row.job, row.batch_size, self._nodes, checkpoints)
        with run_of(contestant, task, self._runs, self._cluster.address) as run:
            found = self._lose_worker(run, task) if row.kills else self._time(run, task)
            if contestant.is_ours:
                found |= _ledger_facts(run, found)
        return found

    def _time(self, run: EngineRun, task: TrainTask) -> Measured:
        """Batches a second with all workers at work, and seconds to the first step."""
        begin = self._wait_until_complete(run, task)
        time.sleep(self._options.seconds)
        run.wait_for(lambda moments: pace_between(moments, begin, math.inf).steps >= STEPS_MIN, "more steps")
        end = time.time()
        if not run.ends():
            raise run.failure()
        moments = run.moments()
        pace = pace_between(moments, begin, end)
        batches = task.workers * pace.steps
        return {
            "first_step_seconds": moments[0].at - run.began_at,
            # Until every worker had computed something.
            "complete_seconds": (complete_at(moments, task.workers) or begin) - run.began_at,
            "steps": pace.steps,
            "batches": batches,
            "seconds": pace.seconds,
            "batches_per_second": batches / pace.seconds,
        }

    def _lose_worker(self, run: EngineRun, task: TrainTask) -> Measured:
        """Kill a worker, and look until its place is taken and the run has gone on for a while."""
        self._wait_until_complete(run, task)
        # So that there is a checkpoint to go back to.
        run.wait_for(lambda moments: moments[-1].step > CHECKPOINT_STEPS, "checkpoint")
        time.sleep(self._options.seconds)
        moments = run.moments()
        before = pace_between(moments, moments[-1].at - self._options.seconds, moments[-1].at)
        lost, lost_at = run.kill_worker()
        try:
            run.wait_until_replaced(lost)
            time.sleep(self._options.seconds)
            is_over = run.ends()
        except TrainingError:
            is_over = False
        outage = outage_after(run.moments(), lost_at)
        samples_a_step = task.workers * task.batch_size
        return {
            "step_seconds_before": quotient(before.seconds, before.steps),
            "seconds_without_step": outage.seconds_without_step,
            "seconds_behind": outage.seconds_behind,
            # Of steps that had been applied; the step that the loss interrupted is not counted.
            "samples_again": samples_a_step * outage.steps_again,
            "is_over": is_over,
        }

    def _wait_until_complete(self, run: EngineRun, task: TrainTask) -> float:
        """Wait until all workers have been at work for a while; returns the moment from which it counts."""
        run.wait_for(lambda moments: complete_at(moments, task.workers), "step of all workers")
        warm_up = min(WARM_UP_SECONDS, WARM_UP_PART * self._options.seconds)
        time.sleep(warm_up)
        return (complete_at(run.moments(), task.workers) or time.time()) + warm_up


def _ledger_facts(run: EngineRun, found: Measured) -> Measured:
    """What the ledger of a run of ours says: whether it is clean, and which samples were lent again."""
    folder = run.folder / "runs" / RUN
    facts: Measured = {"audit_clean": audit_run(folder).is_clean}
    if "samples_again" in found:
        # All that was lent again, as if the killed worker had computed it already.
        relent = int(read_manifest(folder).get("result", {}).get("batches_relent", 0))
        facts["samples_again"] = found["samples_again"] + relent * run.task.batch_size
    return facts


def speed_figures(turns: Turns, asked: float | None) -> dict[str, Any]:
    """The medians of both, and ours over theirs; of ours alone if there are no others."""
    found: dict[str, Any] = {}
    for key in ("batches_per_second", "first_step_seconds", "complete_seconds"):
        found[key] = median(turns.ones, key)
        found[f"peer_{key}"] = median(turns.others, key) if turns.others else None
    if not turns.others:
        return found | {"ratio": None, "low": None, "high": None, "verdict": "", "first_step": None}
    pace = compare(turns.ratios)
    pairs = zip(turns.ones, turns.others, strict=True)
    first = compare([one["first_step_seconds"] / other["first_step_seconds"] for one, other in pairs])
    verdict = pace.verdict if asked is None else verdict_on(pace.low, pace.high, asked)
    sooner = {"ahead": "later", "behind": "sooner"}.get(first.verdict, first.verdict)
    return found | pace.summary() | {"verdict": verdict, "first_step": first.summary() | {"verdict": sooner}}


def verdict_on(low: float, high: float, asked: float) -> str:
    """Whether a ratio that should be at least what is asked is; sure only if its whole interval is."""
    return "kept" if low >= asked else "missed" if high < asked else "not sure"


def loss_figures(turns: Turns, asked: float | None) -> dict[str, Any]:
    """The medians of both, the worst of each, and how many runs ended."""
    found: dict[str, Any] = {}
    for prefix, runs in (("", turns.ones), ("peer_", turns.others)):
        for key in ("seconds_without_step", "seconds_behind", "samples_again", "step_seconds_before"):
            known = [each[key] for each in runs if each[key] is not None]
            found[prefix + key] = statistics.median(known) if known else None
        # None: a run made no step any more.
        lasted = [each["seconds_without_step"] for each in runs]
        found[f"{prefix}seconds_without_step_most"] = None if None in lasted else max(lasted, default=None)
        found[f"{prefix}runs"] = len(runs)
        found[f"{prefix}runs_over"] = sum(each["is_over"] for each in runs)
    most = found["seconds_without_step_most"]
    is_kept = most is not None and asked is not None and most <= asked
    ratio = quotient(found["seconds_without_step"], found["peer_seconds_without_step"])
    return found | {"ratio": ratio, "verdict": "kept" if is_kept else "missed"}
