"""`bench peers`: the same job here and elsewhere, in turns, with the rows that we lose.

Ours, theirs, ours, theirs …: machines drift, so each turn is compared with its neighbour. The first pair is
dropped. A verdict needs the whole confidence interval on one side of 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from w5xde.bench import jobs, ray_peer
from w5xde.bench.crew import warm_up
from w5xde.bench.ddp import Exchanged, run_ddp
from w5xde.bench.meter import machine
from w5xde.bench.product import count_again, run_product, settings_for
from w5xde.bench.seed import SYNC_STEP_BATCHES, Say, runs_folder
from w5xde.bench.stats import compare
from w5xde.learn.job import Job

# However slow a run is, it ends after this many times what it is measured for, and some seconds.
SECONDS_FACTOR, SECONDS_MORE = 3, 20.0


@dataclass(frozen=True, slots=True)
class Match:
    """One row: what we run, and what they run."""

    title: str
    peer: str
    job: Callable[[], Job]
    mode: str
    batches_per_step: Callable[[int], int]
    theirs: Callable[[Job, int, float], Exchanged]
    nodes: int
    # What our run sets besides.
    settings: dict[str, Any] = field(default_factory=dict)
    is_there: Callable[[], bool] = lambda: True


def _ddp(job: Job, nodes: int, seconds: float) -> Exchanged:
    return run_ddp(job, nodes, jobs.BATCH_SIZE, seconds)


def _ddp_bf16(job: Job, nodes: int, seconds: float) -> Exchanged:
    return run_ddp(job, nodes, jobs.BATCH_SIZE, seconds, bf16=True)


def _ray(job: Job, nodes: int, seconds: float) -> Exchanged:
    return ray_peer.run_ray(job, nodes, jobs.BATCH_SIZE, seconds)


MATCHES: dict[str, Match] = {
    "seed-async": Match(
        "seeds' job, async", "DDP/gloo", lambda: jobs.seed, "async", lambda nodes: 1, _ddp, nodes=10
    ),
    "seed-sync": Match(
        "seeds' job, sync",
        "DDP/gloo",
        lambda: jobs.seed,
        "sync",
        lambda nodes: SYNC_STEP_BATCHES,
        _ddp,
        nodes=10,
    ),
    "large-fp32": Match(
        "25M parameters, fp32", "DDP/gloo", lambda: jobs.large, "sync", lambda nodes: nodes, _ddp, nodes=2
    ),
    "large-bf16": Match(
        "25M parameters, bf16",
        "DDP/gloo",
        lambda: jobs.large,
        "sync",
        lambda nodes: nodes,
        _ddp,
        nodes=2,
        settings={"compress": "bf16"},
    ),
    "large-bf16-hook": Match(
        "25M parameters, bf16",
        "DDP/gloo, bf16 hook",
        lambda: jobs.large,
        "sync",
        lambda nodes: nodes,
        _ddp_bf16,
        nodes=2,
        settings={"compress": "bf16"},
    ),
    "seed-ray": Match(
        "seeds' job, async",
        "Ray parameter server",
        lambda: jobs.seed,
        "async",
        lambda nodes: 1,
        _ray,
        nodes=10,
        is_there=ray_peer.is_installed,
    ),
}


@dataclass(frozen=True, slots=True)
class PeersOptions:
    """What can be chosen."""

    rows: tuple[str, ...] = tuple(MATCHES)
    pairs: int = 5
    seconds: float = 10.0
    # Nothing: as many as the row says.
    nodes: int | None = None


def run_peers(options: PeersOptions, say: Say) -> dict[str, Any]:
    """A row for each match."""
    warm_up()
    rows = [_row(name, MATCHES[name], options, say) for name in options.rows]
    return {
        "bench": "peers",
        "pairs": options.pairs,
        "pairs_dropped": 1 if options.pairs > 1 else 0,
        "seconds": options.seconds,
        "rows": rows,
        "audit_clean": all(row.get("audit_clean", True) for row in rows),
        "machine": machine(),
    }


def _row(name: str, match: Match, options: PeersOptions, say: Say) -> dict[str, Any]:
    nodes = options.nodes or match.nodes
    row: dict[str, Any] = {
        "row": name,
        "title": match.title,
        "peer": match.peer,
        "mode": match.mode,
        "nodes": nodes,
        "batches_per_step": match.batches_per_step(nodes),
    }
    if not match.is_there():
        return {**row, "status": "not installed"}
    ours, theirs, clean = [], [], True
    for pair in range(options.pairs):
        say(f"{name}, pair {pair + 1} of {options.pairs}: w5xde")
        mine = _ours(match, nodes, options.seconds)
        say(f"{name}, pair {pair + 1} of {options.pairs}: {match.peer}")
        other = match.theirs(match.job(), nodes, options.seconds).summary()
        clean = clean and mine["audit_clean"]
        if pair or options.pairs == 1:
            ours.append(mine)
            theirs.append(other)
    ratios = [
        mine["batches_per_second"] / other["batches_per_second"]
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return {
        **row,
        "status": "measured",
        **compare(ratios).summary(),
        "batches_per_second": statistics.median(one["batches_per_second"] for one in ours),
        "peer_batches_per_second": statistics.median(one["batches_per_second"] for one in theirs),
        "cpu_us_per_batch": statistics.median(one["cpu_us_per_batch"] for one in ours),
        "peer_cpu_us_per_batch": statistics.median(one["cpu_us_per_batch"] for one in theirs),
        "loss_all_samples": ours[-1]["loss_all_samples"],
        "peer_loss_all_samples": theirs[-1]["loss_all_samples"],
        "ours": ours,
        "theirs": theirs,
        "audit_clean": clean,
    }


def _ours(match: Match, nodes: int, seconds: float) -> dict[str, Any]:
    """One run of ours."""
    with runs_folder(None) as runs:
        settings = settings_for(
            runs,
            mode=match.mode,
            nodes=nodes,
            batches_per_step=match.batches_per_step(nodes),
            seconds=SECONDS_FACTOR * seconds + SECONDS_MORE,
            **match.settings,
        )
        run = run_product(match.job(), settings, name="w5xde.bench:peers", window_seconds=seconds)
        count = count_again(run)
    window = run.window
    return {
        "processes": nodes,
        "batches": window.batches,
        "steps": window.steps,
        "seconds": window.seconds,
        "batches_per_second": window.batches_per_second or 0.0,
        "cpu_us_per_batch": window.cpu_us_per_batch or 0.0,
        "loss_all_samples": run.loss_all_samples,
        "compression_ratio": run.summary["compression_ratio"],
        "batches_in_all": run.summary["batches"],
        "ledger_batches": count.batches,
        "audit_clean": count.is_clean,
    }
