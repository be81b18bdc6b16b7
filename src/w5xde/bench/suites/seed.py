"""`bench seed`: the benchmark of the first system, counted strictly, beside the limit of this machine.

Ten processes, 430 parameters, a thousand samples, batches of 32. The first system counted computed batches;
here a batch counts when its gradient is applied, and the ledger must agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from w5xde.bench import jobs
from w5xde.bench.contestants.learners import LearnTask, learn_ours
from w5xde.bench.contestants.limits import ComputeLimit, compute_limit
from w5xde.bench.contestants.product import (
    Count,
    ProductRun,
    count_again,
    run_product,
    runs_folder,
    settings_for,
)
from w5xde.bench.measure.curves import Curve, effective_rate
from w5xde.bench.measure.meter import machine
from w5xde.bench.measure.stats import quotient
from w5xde.bench.progress import Say
from w5xde.bench.suites.learn_jobs import LEARN_JOBS, SeedRound
from w5xde.config import Settings

SEED_STEP_BATCHES = 32
# A limit is measured for this part of the seconds of the run, before it and after it.
LIMIT_PART = 0.1
LIMIT_SECONDS_MAX = 2.0
LIMIT_SECONDS_MIN = 0.2
# A shorter run is also given less to learn for its effective rate.
WHOLE_BUDGET_SECONDS = 10.0
# A run that takes this many times the plain loop's seconds has no effective rate worth the wait.
EFFECTIVE_PATIENCE = 4.0


@dataclass(frozen=True, slots=True)
class SeedOptions:
    """The options of the benchmark."""

    mode: str = "async"
    nodes: int = 10
    seconds: float = 30.0
    batches_per_step: int | None = None
    staleness: int | None = None
    # The folder that keeps the run; None: a temporary one.
    runs: str | None = None

    @property
    def step_batches(self) -> int:
        return self.batches_per_step or (SEED_STEP_BATCHES if self.mode == "sync" else 1)


def limit_seconds(seconds: float) -> float:
    return max(LIMIT_SECONDS_MIN, min(LIMIT_SECONDS_MAX, LIMIT_PART * seconds))


def run_seed(options: SeedOptions, say: Say) -> dict[str, Any]:
    """Measure the benchmark between two measurements of its limit."""
    torch.set_num_threads(1)
    seconds = limit_seconds(options.seconds)
    with runs_folder(options.runs) as runs:
        say(f"forward and backward alone, for {seconds:.1f} s")
        before = compute_limit(jobs.seed, jobs.BATCH_SIZE, seconds)
        say(f"{options.nodes} nodes, {options.mode}, for {options.seconds:g} s")
        run = run_product(jobs.seed, seed_settings(options, runs), name="w5xde.bench.jobs:seed")
        say(f"forward and backward alone again, for {seconds:.1f} s")
        after = compute_limit(jobs.seed, jobs.BATCH_SIZE, seconds)
        say("counting the ledger again")
        count = count_again(run)
    say("a plain loop, then these settings again, until its loss is reached")
    effective = effective_figures(options)
    return {
        "bench": "seed",
        "mode": options.mode,
        "nodes": options.nodes,
        "batch_size": jobs.BATCH_SIZE,
        "batches_per_step": options.step_batches,
        "parameters": jobs.parameter_count(jobs.seed),
        **figures(run, [before, after], count),
        **effective,
        "run": run.summary["run"],
        "runs": options.runs,
        "machine": machine(),
    }


def seed_settings(options: SeedOptions, runs: str, **more: Any) -> Settings:
    """The settings of the run."""
    return settings_for(
        runs,
        mode=options.mode,
        batches_per_step=options.step_batches,
        staleness=options.staleness,
        nodes=options.nodes,
        seconds=options.seconds,
        **more,
    )


def effective_figures(options: SeedOptions) -> dict[str, Any]:
    """The effective batches/s of `bench learn` for these settings, with one seed and its tuned rate."""
    job = replace(LEARN_JOBS["seed"], patience=EFFECTIVE_PATIENCE)
    round_ = SeedRound(job, jobs.SEED, min(1.0, options.seconds / WHOLE_BUDGET_SECONDS))

    def learn(task: LearnTask) -> Curve:
        return learn_ours(
            task,
            mode=options.mode,
            nodes=options.nodes,
            batches_per_step=options.step_batches,
            staleness=options.staleness,
        )

    round_.add("w5xde", learn)
    return {
        "effective_batches_per_second": effective_rate(round_.plain_batches, round_.seconds("w5xde")),
        "effective_seconds": round_.seconds("w5xde"),
        "effective_plain_batches": round_.plain_batches,
        "effective_target": round_.target,
    }


def figures(run: ProductRun, limits: list[ComputeLimit], count: Count) -> dict[str, Any]:
    """All figures of the first system's report, and those that it lacked."""
    summary, window = run.summary, run.window
    limit = sum(one.batches_per_second for one in limits) / len(limits)
    limit_cpu = sum(one.cpu_us_per_batch for one in limits) / len(limits)
    cpu = window.cpu_us_per_batch
    on_core = sum(node["seconds_on_core"] for node in summary["nodes"])
    computing = on_core / summary["batches"] * 1e6
    moved = summary["bytes_sent"] + summary["bytes_received"]
    return {
        "batches": summary["batches"],
        "seconds": summary["seconds"],
        "epochs": summary["epochs"],
        "steps": summary["steps"],
        "warm_up_seconds": run.warm_up_seconds,
        "window_seconds": window.seconds,
        "window_batches": window.batches,
        "batches_per_second": window.batches_per_second,
        "batches_per_second_whole": summary["batches"] / summary["seconds"],
        "limit_batches_per_second": limit,
        "limit_ratio": quotient(window.batches_per_second, limit),
        "limits": [one.summary() for one in limits],
        "cpu_us_per_batch": cpu,
        "cpu_us_per_batch_limit": limit_cpu,
        "cpu_us_per_batch_computing": computing,
        # What the nodes computed, or the limit if they took longer: then something kept them.
        "cpu_us_per_batch_outside": cpu - min(computing, limit_cpu) if cpu is not None else None,
        "loss_first": summary["loss_first"],
        "loss_last": summary["loss_last"],
        "loss_average": summary["loss_average"],
        "loss_all_samples": run.loss_all_samples,
        "bytes_sent": summary["bytes_sent"],
        "bytes_received": summary["bytes_received"],
        "bytes_per_second": moved / summary["seconds"],
        "bytes_per_batch": moved / summary["batches"],
        "compression_ratio": summary["compression_ratio"],
        "memory_pss_bytes": run.memory_pss_bytes,
        "batches_per_node": run.batches_per_node,
        "fairness": run.fairness,
        "per_node": [_node(node, summary["seconds"]) for node in summary["nodes"]],
        "batches_relent": summary["batches_relent"],
        "staleness_mean": summary["staleness_mean"],
        "staleness_max": summary["staleness_max"],
        "ledger_batches": count.batches,
        "audit_clean": count.is_clean,
        "audit_violations": count.violations,
    }


def _node(node: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The row of one node."""
    return {
        "name": node["name"],
        "batches": node["batches"],
        "bytes_per_second": (node["bytes_sent"] + node["bytes_received"]) / seconds,
        "seconds_network": node["seconds_network"],
        "seconds_codec": node["seconds_codec"],
        "seconds_busy": node["seconds_busy"],
        "seconds_waiting": node["seconds_waiting"],
    }
