"""`bench links --rig --utilisation`: the share of the time in which nodes compute, over slow links.

Fixed seconds, and nobody looks at the loss. A node computes while its thread is on a core in forward,
backward and optimizer; what it waits for links and other nodes does not count. If there are more nodes than
cores, they would also wait for each other: a paced job sleeps after each batch until a fixed time is over,
so that several nodes on one core are as several machines, and each batch counts for that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from w5xde.bench import jobs
from w5xde.bench.contestants.learners import LearnTask
from w5xde.bench.measure.curves import Curve, range_of
from w5xde.bench.measure.meter import machine
from w5xde.bench.measure.processes import warm_up
from w5xde.bench.measure.stats import quotient
from w5xde.bench.progress import Say
from w5xde.bench.rig.entrants import Entrant, require_modes
from w5xde.bench.rig.link_check import check_rig
from w5xde.bench.rig.namespaces import Rig, SlowLink, build_rig, require_rig
from w5xde.bench.rig.racing import HOST_MODULE, race

# More than anybody learns from: only the seconds end a run.
SAMPLES_MAX = 1e15
# How often a run of ours is looked at: a quarter of this.
LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class UtilisationOptions:
    """The options of the benchmark."""

    links: tuple[SlowLink, ...]
    entrants: tuple[Entrant, ...]
    nodes: int = 2
    parameters: int = 1_000_000
    seeds: int = 3
    seconds: float = 120.0
    # The time of a batch of a paced job; 0: as long as it takes.
    paced_seconds: float = 0.0


def run_utilisation(options: UtilisationOptions, say: Say) -> dict[str, Any]:
    """Measure all contestants on each kind of link, in turns."""
    require_modes(options.entrants)
    require_rig()
    warm_up()
    rows = []
    for link in options.links:
        say(f"{link.title}: building {options.nodes} hosts and the coordinator's, and checking every link")
        with build_rig(options.nodes, link, HOST_MODULE) as rig:
            rows.append(_measure(rig, options, say))
    return {
        "bench": "utilisation",
        "parameters": jobs.parameter_count(jobs.split_text_job(options.parameters)),
        "nodes": options.nodes,
        "batch_size": jobs.TEXT_BATCH_SIZE,
        "seconds": options.seconds,
        "paced_seconds": options.paced_seconds,
        "seeds": options.seeds,
        "rows": rows,
        "machine": machine(),
    }


def _measure(rig: Rig, options: UtilisationOptions, say: Say) -> dict[str, Any]:
    check = check_rig(rig)
    found: dict[str, list[Curve]] = {each.label: [] for each in options.entrants}
    for seed in range(options.seeds):
        task = LearnTask(
            job=jobs.split_text_job(options.parameters),
            batch_size=jobs.TEXT_BATCH_SIZE,
            seed=seed,
            probe_samples=0,
            mark_samples=jobs.TEXT_BATCH_SIZE,
            samples_max=SAMPLES_MAX,
            seconds_max=options.seconds,
            mark_seconds=LOOK_SECONDS,
        )
        for entrant in options.entrants:
            say(f"{rig.link.title}, turn {seed + 1} of {options.seeds}: {entrant.title}")
            curve = race(rig, entrant, task, options.parameters, options.paced_seconds)
            found[entrant.label].append(curve)
    return {
        "mbit_per_second": rig.link.mbit_per_second,
        "delay_ms": rig.link.delay_ms,
        "check": check,
        "contestants": [_row(each, found[each.label]) for each in options.entrants],
    }


def _row(entrant: Entrant, curves: list[Curve]) -> dict[str, Any]:
    last = [curve.marks[-1] for curve in curves]
    return {
        "name": entrant.label,
        "title": entrant.title,
        "settings": entrant.settings,
        "utilisation": range_of([curve.utilisation for curve in curves]),
        "samples_per_second": range_of([quotient(mark.samples, mark.seconds) for mark in last]),
        "bytes_per_sample": range_of([quotient(mark.bytes_moved, mark.samples) for mark in last]),
    }
