"""`bench scale`: the cost of more connections. One coordinator, and light nodes that answer at once.

The coordinator is real, with ledger, checks and metrics; the nodes are connections of one process that replay
captured gradients. Only the coordinator is measured.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w5xde.api import Watcher, run_coordinator
from w5xde.bench import jobs
from w5xde.bench.contestants.light_nodes import be_crowd
from w5xde.bench.contestants.product import runs_folder, settings_for
from w5xde.bench.measure.meter import cpu_seconds, machine, resident_bytes
from w5xde.bench.measure.processes import ForkedProcess, Line, Work, crew, warm_up
from w5xde.bench.measure.stats import quotient
from w5xde.bench.progress import Say
from w5xde.config import Settings
from w5xde.runtime.coordinator.body import Coordinator
from w5xde.runtime.durable.audit import audit_run
from w5xde.runtime.system.capacity import require_descriptors
from w5xde.runtime.telemetry.result import Result

# Seconds for all nodes to join: for each connection, and at least.
JOIN_SECONDS_EACH, JOIN_SECONDS_MIN = 0.05, 30.0
SETTLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """The options of the benchmark."""

    nodes: tuple[int, ...] = (10, 100, 1000)
    seconds: float = 10.0
    # None: the default of a run with this many nodes.
    staleness: int | None = None
    compute_seconds: float = 1e-4


class Remote(Watcher):
    """Lets another process ask for the status of a coordinator, and stop it."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        self._coordinator = coordinator
        asyncio.get_running_loop().add_reader(self._line.fileno(), self._told)
        host, _, port = coordinator.address.rpartition(":")
        self._line.say(coordinator.gatekeeper.local_ticket(host, int(port)).to_text())

    def _told(self) -> None:
        if self._line.hear() == "stop":
            asyncio.get_running_loop().remove_reader(self._line.fileno())
            self._coordinator.stop("measured")
            return
        status = self._coordinator.status()
        self._line.say({"at": time.monotonic(), "batches": status.batches})


def run_scale(options: ScaleOptions, say: Say) -> dict[str, Any]:
    """Measure a row for each number of connections."""
    require_descriptors(max(options.nodes))
    warm_up()
    rows: list[dict[str, Any]] = []
    for nodes in options.nodes:
        say(f"{nodes:,} connections, for {options.seconds:g} s")
        row = _row(options, nodes)
        say(f"{row['updates_per_second']:,.0f} updates/s")
        row["ratio_to_first"] = quotient(row["updates_per_second"], (rows or [row])[0]["updates_per_second"])
        rows.append(row)
    return {
        "bench": "scale",
        "seconds": options.seconds,
        "compute_seconds_claimed": options.compute_seconds,
        "rows": rows,
        "audit_clean": all(row["audit_clean"] for row in rows),
        "machine": machine(),
    }


def _row(options: ScaleOptions, nodes: int) -> dict[str, Any]:
    joining = max(JOIN_SECONDS_MIN, JOIN_SECONDS_EACH * nodes)
    with runs_folder(None) as runs:
        settings = settings_for(
            runs,
            mode="async",
            nodes=0,
            staleness=options.staleness,
            # Light nodes send gradients that they captured, and have no optimizer.
            local_steps="off",
            # By TCP, as if from other machines.
            road="tcp",
            # A limit, so that a coordinator ends even if nothing stops it.
            seconds=joining + 10 * options.seconds + 60,
        )

        def coordinate(line: Line) -> dict[str, Any]:
            result: Result = run_coordinator(
                jobs.seed, settings, watcher=Remote(line), name="w5xde.bench.jobs:seed"
            )
            return {"folder": str(result.folder), "summary": result.summary}

        works: dict[str, Work] = {
            "the light nodes": lambda line: be_crowd(line, nodes, options.compute_seconds),
            "the coordinator": coordinate,
        }
        with crew(works, joining + 10 * options.seconds) as [crowd, coordinator]:
            measured = _measure(crowd, coordinator, options.seconds)
            coordinator.say("stop")
            ended = coordinator.hear()
        report = audit_run(Path(ended["folder"]))
    grown, summary = measured.pop("memory_grown_bytes"), ended["summary"]
    return {
        "nodes": nodes,
        "staleness": options.staleness,
        "staleness_mean": summary["staleness_mean"],
        "staleness_max": summary["staleness_max"],
        **measured,
        "memory_per_connection_bytes": grown / nodes,
        "batches": summary["batches"],
        "ledger_batches": report.findings.batches,
        "audit_clean": report.is_clean and report.findings.batches == summary["batches"],
    }


def _measure(crowd: ForkedProcess, coordinator: ForkedProcess, seconds: float) -> dict[str, Any]:
    ticket = coordinator.hear()
    before = resident_bytes(coordinator.pid)
    joining = time.monotonic()
    crowd.say(ticket)
    crowd.hear()
    joined = time.monotonic() - joining
    after = resident_bytes(coordinator.pid)
    crowd.say("answer")
    time.sleep(SETTLE_SECONDS)
    crowd.say("begin")
    begin, cpu_begin = _ask(coordinator)
    time.sleep(seconds)
    end, cpu_end = _ask(coordinator)
    crowd.say("end")
    replayed = crowd.hear()
    batches, spent = end["batches"] - begin["batches"], end["at"] - begin["at"]
    return {
        "updates": batches,
        "window_seconds": spent,
        "updates_per_second": batches / spent,
        "updates_sent": replayed["updates"],
        "updates_refused": replayed["rejected"],
        "cpu_us_per_update": quotient(1e6 * (cpu_end - cpu_begin), batches),
        "latency_p50_seconds": replayed["latencies"]["p50"],
        "latency_p99_seconds": replayed["latencies"]["p99"],
        "latency_most_seconds": replayed["latencies"]["most"],
        "connections_lost": replayed["lost"],
        "join_seconds": joined,
        "memory_grown_bytes": after - before,
    }


def _ask(coordinator: ForkedProcess) -> tuple[dict[str, Any], float]:
    coordinator.say("how far?")
    return coordinator.hear(), cpu_seconds([coordinator.pid])
