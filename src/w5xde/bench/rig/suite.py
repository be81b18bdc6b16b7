"""`bench links --rig`: seconds, samples and bytes until a loss is reached over slow links, beside PyTorch.

For each seed a plain loop on one host, without a network, learns to the end of its budget; its loss after
70 % on held-out text is the target. Then the contestants learn from the same initial weights until they reach
it, one after the other on the same links. Bytes are those of all nodes' links, both ways: joining,
encryption and signs of life are in them; samples are not, because every host has its own copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from w5xde.bench import jobs
from w5xde.bench.contestants.learners import LearnTask
from w5xde.bench.measure.curves import Curve, Reached, median, range_of, speed_ups
from w5xde.bench.measure.meter import machine
from w5xde.bench.measure.processes import warm_up
from w5xde.bench.measure.stats import quotient
from w5xde.bench.progress import Say
from w5xde.bench.rig.entrants import DDP, OURS_SYNC, Entrant, require_modes
from w5xde.bench.rig.link_check import check_rig
from w5xde.bench.rig.namespaces import Rig, SlowLink, build_rig, require_rig
from w5xde.bench.rig.racing import HOST_MODULE, race
from w5xde.bench.suites.learn_jobs import LEARN_JOBS, LearnJob, SeedRound

PROBE_WINDOWS = 128
# A curve with marks further apart than two of the plain loop's is not averaged: who exchanges seldom would
# seem to learn slower. The half is for marks that come a batch late.
AVERAGED_MARKS = 2.5
METRICS = ("seconds", "samples", "bytes_moved")


@dataclass(frozen=True, slots=True)
class RigOptions:
    """The options of the benchmark."""

    links: tuple[SlowLink, ...]
    entrants: tuple[Entrant, ...]
    nodes: int = 2
    parameters: int = 100_000
    seeds: int = 3
    # Steps of the plain loop, and seconds after which a contestant gives up.
    budget: int = 2000
    patience_seconds: float = 900.0


@dataclass(frozen=True, slots=True)
class RaceEnd:
    """The end of one run; `is_reached`: it reached the target, else it gave up and would have needed more."""

    at: Reached
    is_reached: bool
    utilisation: float | None


def run_rig(options: RigOptions, say: Say) -> dict[str, Any]:
    """Measure all contestants on each kind of link, seed by seed."""
    require_modes(options.entrants)
    require_rig()
    warm_up()
    job = _job(options)
    rows = []
    for link in options.links:
        say(f"{link.title}: building {options.nodes} hosts and the coordinator's")
        with build_rig(options.nodes, link, HOST_MODULE) as rig:
            rows.append(_measure(rig, job, options, say))
    return {
        "bench": "rig",
        "parameters": jobs.parameter_count(job.base),
        "nodes": options.nodes,
        "batch_size": job.plain.batch_size,
        "budget_batches": options.budget,
        "patience_seconds": options.patience_seconds,
        "seeds": options.seeds,
        "rows": rows,
        "machine": machine(),
    }


def _job(options: RigOptions) -> LearnJob:
    text = LEARN_JOBS["text"]
    return replace(
        text,
        base=jobs.split_text_job(options.parameters),
        budget=options.budget,
        probe_samples=PROBE_WINDOWS,
        held_out=lambda: jobs.held_out_windows(PROBE_WINDOWS),
        averaged_marks=AVERAGED_MARKS,
        patience_seconds=options.patience_seconds,
    )


def _measure(rig: Rig, job: LearnJob, options: RigOptions, say: Say) -> dict[str, Any]:
    say(f"{rig.link.title}: checking the rate and the delay of every link")
    check, rounds = check_rig(rig), []
    began, carried = time.monotonic(), rig.carrier_seconds()
    for seed in range(options.seeds):
        about = f"{rig.link.title}, seed {seed + 1} of {options.seeds}"
        say(f"{about}: a plain loop on one host, for the target")
        rounds.append(SeedRound(job, seed))
        for entrant in options.entrants:
            say(f"{about}: {entrant.title}")
            rounds[-1].add(entrant.label, _learner(rig, entrant, options.parameters))
    carrier_part = (rig.carrier_seconds() - carried) / (time.monotonic() - began)
    ends = {each.label: [end_of(seed, each.label) for seed in rounds] for each in options.entrants}
    return {
        "mbit_per_second": rig.link.mbit_per_second,
        "delay_ms": rig.link.delay_ms,
        "check": check,
        # Of one core: what delaying the packets took from the contestants.
        "carrier_part": carrier_part,
        "targets": [each.target for each in rounds],
        "plain": {
            "seconds": median([each.seconds("plain") for each in rounds]),
            "samples": median([found.samples for each in rounds if (found := each.found["plain"])]),
        },
        **compare(options.entrants, ends),
        "curves": {each.label: _points(rounds[0].curves[each.label]) for each in options.entrants},
    }


def _learner(rig: Rig, entrant: Entrant, parameters: int) -> Callable[[LearnTask], Curve]:
    return lambda task: race(rig, entrant, task, parameters)


def end_of(seed: SeedRound, label: str) -> RaceEnd:
    found, curve = seed.found[label], seed.curves[label]
    last = curve.marks[-1]
    at = found or Reached(last.seconds, last.samples, last.bytes_moved)
    return RaceEnd(at, found is not None, curve.utilisation)


def _points(curve: Curve) -> list[list[float]]:
    """Seconds, samples, loss and bytes at each mark."""
    return [[mark.seconds, mark.samples, mark.loss, mark.bytes_moved] for mark in curve.marks]


# --- what the figures say -----------------------------------------------------------------------------


def compare(entrants: Sequence[Entrant], ends: dict[str, list[RaceEnd]]) -> dict[str, Any]:
    """A row for each contestant, with how much better than DDP, our sync mode and the best peer it is."""
    peers = [each.label for each in entrants if each.settings is None]
    best = {metric: _best(peers, ends, metric) for metric in METRICS}
    bases: dict[str, dict[str, str | None]] = {
        "ddp": dict.fromkeys(METRICS, DDP),
        "ours_sync": dict.fromkeys(METRICS, OURS_SYNC),
        "best_peer": best,
    }
    return {
        "best_peers": best,
        "contestants": [
            _row(each, ends[each.label])
            | {
                f"over_{base}": {
                    metric: over(ends.get(labels[metric] or ""), ends[each.label], metric)
                    for metric in METRICS
                }
                for base, labels in bases.items()
            }
            for each in entrants
        ],
    }


def _best(labels: Sequence[str], ends: dict[str, list[RaceEnd]], metric: str) -> str | None:
    medians = {label: median(_figures(ends[label], metric)) for label in labels}
    known = {label: value for label, value in medians.items() if value is not None}
    return min(known, key=known.__getitem__, default=None)


def _row(entrant: Entrant, ends: list[RaceEnd]) -> dict[str, Any]:
    return {
        "name": entrant.label,
        "title": entrant.title,
        "settings": entrant.settings,
        "reached": sum(each.is_reached for each in ends),
        **{metric: median(_figures(ends, metric)) for metric in METRICS},
        "each": {metric: _figures(ends, metric) for metric in METRICS},
        "bytes_per_sample": range_of([quotient(each.at.bytes_moved, each.at.samples) for each in ends]),
        "utilisation": range_of([each.utilisation for each in ends]),
    }


def _figure(end: RaceEnd, metric: str) -> float:
    return {
        "seconds": end.at.seconds,
        "samples": end.at.samples,
        "bytes_moved": end.at.bytes_moved,
    }[metric]


def _figures(ends: Sequence[RaceEnd], metric: str) -> list[float | None]:
    """The figure of each seed; None if the target was not reached."""
    return [_figure(each, metric) if each.is_reached else None for each in ends]


def over(bases: Sequence[RaceEnd] | None, own: Sequence[RaceEnd], metric: str) -> dict[str, Any]:
    """How many times less than the base each run took; at least that much, if a base gave up."""
    if bases is None:
        return {**range_of([]), "is_a_bound": False}
    ratios = speed_ups([_figure(each, metric) for each in bases], _figures(own, metric))
    return {**range_of(ratios), "is_a_bound": not all(each.is_reached for each in bases)}
