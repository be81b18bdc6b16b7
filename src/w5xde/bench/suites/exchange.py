"""`bench exchange`: gradients up and parameters down, without compute, beside the loopback and gloo.

One exchange is one step of sync mode with a batch for each node: every node sends a gradient as large as the
model and gets the model back. A bare stream would need `nodes · 2 · 4 · parameters` bytes for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from w5xde.bench import jobs
from w5xde.bench.contestants.ddp import run_all_reduce
from w5xde.bench.contestants.limits import copy_limit, stream_limit
from w5xde.bench.contestants.product import ProductRun, count_again, run_product, runs_folder, settings_for
from w5xde.bench.measure.meter import machine
from w5xde.bench.measure.processes import warm_up
from w5xde.bench.measure.stats import quotient
from w5xde.bench.progress import Say
from w5xde.config import Settings
from w5xde.runtime.net.sockets import HAS_LOCAL_SOCKETS

FLOAT_BYTES = 4
# Values of the setting; the last is the default where the system can.
ROADS = ("tcp", "unix", "shared")
# However slow the exchange is, a run ends after this many times its measured seconds.
SECONDS_FACTOR = 6
STREAM_SECONDS_MAX = 2.0


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """The options of the benchmark."""

    parameters: tuple[int, ...] = (1_000_000, 25_000_000)
    nodes: tuple[int, ...] = (2, 4)
    seconds: float = 5.0
    optimizer: str = "sgd"
    checkpoint_every: str = "off"
    compress: str | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """The limits of a row, measured before and after it."""

    tcp: float
    unix: float

    def under(self, road: str) -> float:
        """The rate of a plain stream over the same kind of socket; of a Unix socket for shared memory."""
        return self.unix if road != "tcp" and HAS_LOCAL_SOCKETS else self.tcp


def run_exchange(options: ExchangeOptions, say: Say) -> dict[str, Any]:
    """Measure a row for each model size, number of nodes and kind of socket."""
    # Refuse bad settings before anything is measured.
    _settings(options, 1, "shared", "runs")
    warm_up()
    rows = []
    # Longer than other limits: a stream takes a while to reach its speed.
    seconds = min(STREAM_SECONDS_MAX, options.seconds / 3)
    say("one bare stream, over TCP and a Unix socket")
    before = _streams(seconds)
    for parameters in options.parameters:
        for nodes in options.nodes:
            say(f"gloo all-reduce, {parameters:,} parameters, {nodes} processes")
            gloo = run_all_reduce(parameters, nodes, min(options.seconds, 2.0))
            for road in ROADS:
                say(f"w5xde, {parameters:,} parameters, {nodes} nodes, road {road}")
                rows.append(_row(options, parameters, nodes, road, gloo.steps / gloo.seconds))
    say("one bare stream again")
    after = _streams(seconds)
    streams = Beside((before.tcp + after.tcp) / 2, (before.unix + after.unix) / 2)
    for row in rows:
        stream = streams.under(row["road"])
        limit = stream / (row["nodes"] * 2 * FLOAT_BYTES * row["parameters"])
        row["stream_bytes_per_second"] = stream
        row["limit_exchanges_per_second"] = limit
        row["limit_ratio"] = quotient(row["exchanges_per_second"], limit)
        row["limit_ratio_bytes"] = quotient(row["bytes_per_second"], stream)
    return {
        "bench": "exchange",
        "seconds": options.seconds,
        "optimizer": options.optimizer,
        "checkpoint_every": options.checkpoint_every,
        "compress": options.compress,
        "tcp_bytes_per_second": streams.tcp,
        "unix_bytes_per_second": streams.unix,
        "memcpy_bytes_per_second": copy_limit(seconds),
        "rows": rows,
        "audit_clean": all(row["audit_clean"] for row in rows),
        "machine": machine(),
    }


def _streams(seconds: float) -> Beside:
    return Beside(stream_limit(seconds, "tcp"), stream_limit(seconds, "unix"))


def _row(options: ExchangeOptions, parameters: int, nodes: int, road: str, gloo: float) -> dict[str, Any]:
    with runs_folder(None) as runs:
        settings = _settings(options, nodes, road, runs)
        job = jobs.exchange_job(parameters, options.optimizer)
        run = run_product(
            job, settings, name="w5xde.bench:exchange", window_seconds=options.seconds, measures_loss=False
        )
        count = count_again(run)
    window = run.window
    exchanges = window.per_second(window.steps)
    state = parameters * (2 * FLOAT_BYTES + jobs.OPTIMIZERS[options.optimizer])
    return {
        "parameters": parameters,
        "nodes": nodes,
        "road": road,
        "exchanges_per_second": exchanges,
        "exchanges": window.steps,
        "window_seconds": window.seconds,
        "bytes_per_second": window.per_second(window.bytes_moved),
        "compression_ratio": run.summary["compression_ratio"],
        "gloo_exchanges_per_second": gloo,
        "gloo_ratio": quotient(exchanges, gloo),
        **_memory(run, state),
        "batches": run.summary["batches"],
        "batches_per_node": run.batches_per_node,
        "ledger_batches": count.batches,
        "audit_clean": count.is_clean,
    }


def _settings(options: ExchangeOptions, nodes: int, road: str, runs: str) -> Settings:
    more = {} if options.compress is None else {"compress": options.compress}
    return settings_for(
        runs,
        mode="sync",
        batch_size=1,
        batches_per_step=nodes,
        nodes=nodes,
        seconds=SECONDS_FACTOR * options.seconds,
        checkpoint_every=options.checkpoint_every,
        road=road,
        **more,
    )


def _memory(run: ProductRun, state_bytes: int) -> dict[str, Any]:
    """The growth of the coordinator's memory, relative to parameters, optimizer state and an accumulator."""
    grown = run.coordinator_memory_bytes
    return {
        "coordinator_memory_bytes": grown,
        "coordinator_state_bytes": state_bytes,
        "coordinator_memory_ratio": quotient(grown, state_bytes),
    }
