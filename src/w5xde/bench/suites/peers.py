"""`bench peers`: the same jobs on w5xde and on other systems, in turns, including the rows that we lose.

Each turn is compared with its neighbour (`pairs`). A verdict needs the whole confidence interval on one side
of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from w5xde.bench import jobs
from w5xde.bench.contestants import ray_actors as ray_peer
from w5xde.bench.contestants.ddp import Exchanged, run_ddp
from w5xde.bench.contestants.plain import run_plain
from w5xde.bench.measure.meter import machine
from w5xde.bench.measure.pairs import Measured, dropped, in_turns, median, run_of_ours
from w5xde.bench.measure.processes import warm_up
from w5xde.bench.measure.stats import compare
from w5xde.bench.progress import Say
from w5xde.bench.suites.seed import SEED_STEP_BATCHES
from w5xde.learn.job.job import Job


@dataclass(frozen=True, slots=True)
class Match:
    """One row: our run, and theirs."""

    title: str
    peer: str
    job: Callable[[], Job]
    mode: str
    batches_per_step: Callable[[int], int]
    theirs: Callable[[Job, int, int, float], Exchanged]
    nodes: int
    batch_size: int = jobs.BATCH_SIZE
    # Further settings of our run.
    settings: dict[str, Any] = field(default_factory=dict)
    is_there: Callable[[], bool] = lambda: True


def _ddp(job: Job, nodes: int, batch_size: int, seconds: float) -> Exchanged:
    return run_ddp(job, nodes, batch_size, seconds)


def _ddp_bf16(job: Job, nodes: int, batch_size: int, seconds: float) -> Exchanged:
    return run_ddp(job, nodes, batch_size, seconds, bf16=True)


def _ray(job: Job, nodes: int, batch_size: int, seconds: float) -> Exchanged:
    return ray_peer.run_ray(job, nodes, batch_size, seconds)


def _plain(job: Job, nodes: int, batch_size: int, seconds: float) -> Exchanged:
    """One process, one thread, however many nodes ours has."""
    return run_plain(job, batch_size, seconds)


def _text(peer: str, nodes: int, batch_size: int) -> Match:
    """The text job with one batch a step for each node."""
    theirs = {"DDP/gloo": _ddp, "plain loop": _plain}[peer]
    title = f"107k parameters, batches of {batch_size}"
    return Match(
        title, peer, lambda: jobs.text, "sync", lambda count: count, theirs, nodes, batch_size=batch_size
    )


MATCHES: dict[str, Match] = {
    "seed-async": Match(
        "seeds' job, async", "DDP/gloo", lambda: jobs.seed, "async", lambda nodes: 1, _ddp, nodes=10
    ),
    "seed-sync": Match(
        "seeds' job, sync",
        "DDP/gloo",
        lambda: jobs.seed,
        "sync",
        lambda nodes: SEED_STEP_BATCHES,
        _ddp,
        nodes=10,
    ),
    "text-b4": _text("DDP/gloo", nodes=2, batch_size=4),
    "text-b16": _text("DDP/gloo", nodes=2, batch_size=16),
    "text-one-b4": _text("plain loop", nodes=1, batch_size=4),
    "text-one-b16": _text("plain loop", nodes=1, batch_size=16),
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
    """The options of the benchmark."""

    rows: tuple[str, ...] = tuple(MATCHES)
    pairs: int = 5
    seconds: float = 10.0
    # None: as many as the row says.
    nodes: int | None = None


def run_peers(options: PeersOptions, say: Say) -> dict[str, Any]:
    """Measure a row for each match."""
    warm_up()
    rows = [_row(name, MATCHES[name], options, say) for name in options.rows]
    return {
        "bench": "peers",
        "pairs": options.pairs,
        "pairs_dropped": dropped(options.pairs),
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
        "batch_size": match.batch_size,
        "batches_per_step": match.batches_per_step(nodes),
    }
    if not match.is_there():
        return {**row, "status": "not installed"}

    def ours() -> Measured:
        return run_of_ours(
            match.job(),
            nodes,
            options.seconds,
            name="w5xde.bench:peers",
            mode=match.mode,
            batch_size=match.batch_size,
            batches_per_step=match.batches_per_step(nodes),
            **match.settings,
        )

    def theirs() -> Measured:
        return match.theirs(match.job(), nodes, match.batch_size, options.seconds).summary()

    turns = in_turns(
        options.pairs, ("w5xde", ours), (match.peer, theirs), lambda text: say(f"{name}, {text}")
    )
    return {
        **row,
        "status": "measured",
        **compare(turns.ratios).summary(),
        "batches_per_second": median(turns.ones, "batches_per_second"),
        "peer_batches_per_second": median(turns.others, "batches_per_second"),
        "cpu_us_per_batch": median(turns.ones, "cpu_us_per_batch"),
        "peer_cpu_us_per_batch": median(turns.others, "cpu_us_per_batch"),
        "loss_all_samples": turns.ones[-1]["loss_all_samples"],
        "peer_loss_all_samples": turns.others[-1]["loss_all_samples"],
        "ours": turns.ones,
        "theirs": turns.others,
        "audit_clean": turns.audit_clean,
    }
