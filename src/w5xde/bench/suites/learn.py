"""`bench learn`: seconds and samples until a loss is reached, for a plain loop, DDP, and w5xde in its modes.

For each seed a plain loop learns to the end of its budget, and its loss after 70 % is the target. Then all
others learn from the same initial weights until they reach it, one after the other. Figures are medians over
the seeds; a speed-up compares two runs of the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from w5xde.bench.contestants.learners import LearnTask, learn_ddp, learn_ours, learn_plain
from w5xde.bench.measure.curves import (
    Curve,
    effective_rate,
    median,
    range_of,
    speed_ups,
)
from w5xde.bench.measure.meter import machine
from w5xde.bench.measure.processes import warm_up
from w5xde.bench.progress import Say
from w5xde.bench.suites.learn_jobs import LEARN_JOBS, PLAIN, BatchAndRate, LearnJob, SeedRound
from w5xde.learn.model.device import core_count

# What all contestants of a seed take together, over the plain loop's seconds; and what each takes besides.
ROUND_FACTOR, START_SECONDS = 9.0, 2.5
# Seconds of the plain loops on the machine of docs/findings.md, for the estimate.
BUDGET_SECONDS = {"seed": 2.2, "digits": 0.6, "text": 18.5, "conv": 1.4}


@dataclass(frozen=True, slots=True)
class LearnRow:
    """One contestant of every job."""

    title: str
    learn: Callable[[LearnJob, int, LearnTask], Curve]
    # The settings of ours that this row changes, for this number of nodes; None: not ours.
    settings: Callable[[LearnJob, int], dict[str, Any]] | None = None


def _with(task: LearnTask, job: LearnJob, choice: BatchAndRate) -> LearnTask:
    return replace(task, job=job.job(choice.rate), batch_size=choice.batch_size)


def _threads(job: LearnJob, nodes: int, task: LearnTask) -> Curve:
    return learn_plain(task, threads=core_count())


def _plain_large(job: LearnJob, nodes: int, task: LearnTask) -> Curve:
    return learn_plain(_with(task, job, job.plain_large))


def _ddp(job: LearnJob, nodes: int, task: LearnTask) -> Curve:
    return learn_ddp(_with(task, job, job.ddp), nodes)


def _ours(title: str, settings: Callable[[LearnJob, int], dict[str, Any]]) -> LearnRow:
    def learn(job: LearnJob, nodes: int, task: LearnTask) -> Curve:
        return learn_ours(task, nodes=nodes, **settings(job, nodes))

    return LearnRow(title, learn, settings)


def _best(job: LearnJob, nodes: int, task: LearnTask) -> Curve:
    return learn_ours(_with(task, job, job.best_batch), nodes=nodes, **job.best)


LEARN_ROWS: dict[str, LearnRow] = {
    PLAIN: LearnRow("plain loop, one thread", lambda job, nodes, task: learn_plain(task)),
    "threads": LearnRow("plain loop, all cores", _threads),
    "plain-large": LearnRow("plain loop, its best batch and rate", _plain_large),
    "ddp": LearnRow("DDP/gloo, its best batch and rate", _ddp),
    "sync": _ours("w5xde, default flags", lambda job, nodes: {}),
    "sync-1": _ours("w5xde, 1 batch a step", lambda job, nodes: {"batches_per_step": 1}),
    "sync-n": _ours("w5xde, a batch a step for each node", lambda job, nodes: {"batches_per_step": nodes}),
    "sync-best": LearnRow("w5xde, best known settings", _best, lambda job, nodes: job.best),
    "async": _ours("w5xde, async", lambda job, nodes: {"mode": "async"}),
}


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """The options of the benchmark."""

    jobs: tuple[str, ...] = tuple(LEARN_JOBS)
    rows: tuple[str, ...] = tuple(LEARN_ROWS)
    seeds: int = 3
    # None: as many as the job says.
    nodes: int | None = None
    # The part of each job's budget that is used.
    budget: float = 1.0

    @property
    def contestants(self) -> list[str]:
        """The rows, the plain loop first: the others need its target."""
        return [PLAIN, *(row for row in self.rows if row != PLAIN)]

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        rows = len(self.contestants)
        budgets = sum(
            self.budget * BUDGET_SECONDS[name] * ROUND_FACTOR / len(LEARN_ROWS) for name in self.jobs
        )
        return self.seeds * rows * (len(self.jobs) * START_SECONDS + budgets)


def run_learn(options: LearnOptions, say: Say) -> dict[str, Any]:
    """Measure all contestants of each job, seed by seed."""
    warm_up()
    say(f"about {max(1, round(options.seconds / 60))} min for {', '.join(options.jobs)}")
    found = [_learn_job(name, options, say) for name in options.jobs]
    return {
        "bench": "learn",
        "seeds": options.seeds,
        "budget": options.budget,
        "jobs": found,
        "machine": machine(),
    }


def _learn_job(name: str, options: LearnOptions, say: Say) -> dict[str, Any]:
    job = LEARN_JOBS[name]
    nodes = options.nodes or job.nodes
    seeds = []
    for seed in range(options.seeds):
        say(f"{name}, seed {seed + 1} of {options.seeds}: {LEARN_ROWS[PLAIN].title}")
        round_ = SeedRound(job, seed, options.budget)
        for row in options.contestants[1:]:
            say(f"{name}, seed {seed + 1} of {options.seeds}: {LEARN_ROWS[row].title}")
            round_.add(row, partial(LEARN_ROWS[row].learn, job, nodes))
        seeds.append(round_)
    return {
        "job": name,
        "title": job.title,
        "nodes": nodes,
        "batch_size": job.plain.batch_size,
        "budget_batches": seeds[0].budget,
        "targets": [each.target for each in seeds],
        "plain_batches": [each.plain_batches for each in seeds],
        "rows": [_row(row, job, nodes, seeds) for row in options.contestants],
    }


def _row(row: str, job: LearnJob, nodes: int, seeds: list[SeedRound]) -> dict[str, Any]:
    settings = LEARN_ROWS[row].settings
    seconds = [each.seconds(row) for each in seeds]
    found = [each.found[row] for each in seeds]
    return {
        "row": row,
        "title": LEARN_ROWS[row].title,
        "settings": None if settings is None else settings(job, nodes),
        "reached": sum(each is not None for each in found),
        "seconds": median(seconds),
        "samples": median([each.samples if each is not None else None for each in found]),
        "speed_up": range_of(speed_ups([each.seconds(PLAIN) for each in seeds], seconds)),
        "over_ddp": range_of(speed_ups([each.ddp_seconds for each in seeds], seconds)),
        # DDP gave up then, and would have needed longer.
        "over_ddp_is_a_bound": any(each.gave_up("ddp") for each in seeds),
        "effective_batches_per_second": median_rate(seeds, row),
        "seconds_each": seconds,
        "curve": _points(seeds[0].curves[row]),
    }


def median_rate(seeds: list[SeedRound], row: str) -> float | None:
    """The effective batches/s of a row; a run that did not reach the target counts as 0."""
    rates = [effective_rate(each.plain_batches, each.seconds(row)) for each in seeds]
    return median([rate or 0.0 for rate in rates])


def _points(curve: Curve) -> list[list[float]]:
    """Seconds, samples and loss at each mark, for plots."""
    return [[mark.seconds, mark.samples, mark.loss] for mark in curve.marks]
