"""`bench links`: the effect of each codec on slow links, and whether `auto` finds the best one.

Coordinator and nodes are real; each node is behind a relay that limits the rate in both directions. They
train a text model in sync mode with one batch for each node in a step: every step sends the parameters to
every node and brings back a gradient from each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from w5xde.api import run_node
from w5xde.bench import jobs
from w5xde.bench.contestants.product import (
    Announcing,
    ProductRun,
    Stopwatch,
    count_again,
    run_here,
    runs_folder,
    settings_for,
)
from w5xde.bench.measure.meter import machine
from w5xde.bench.measure.processes import Line, Work, crew, warm_up
from w5xde.bench.measure.relay import be_relay, open_listener
from w5xde.bench.measure.stats import quotient
from w5xde.bench.progress import Say
from w5xde.compression import AUTO, AUTO_LOSSY, LOSSY, NONE, parse_compress, parse_spec
from w5xde.learn.job.job import Job
from w5xde.ticket import parse

# Lossless codecs, then lossy ones.
CODECS = (
    NONE,
    "lz4",
    "zstd:1",
    "shuffle | zstd:1",
    AUTO,
    "bf16",
    "up: int8, down: bf16",
    AUTO_LOSSY,
)
# Small batches, so that sending takes longer than computing.
BATCH_SIZE = 4
# Turns of each codec; the better one counts, because machines drift.
ROUNDS = 2
# The first parameters travel raw, the first gradients measure the link, and the first node to join may get
# the whole first step.
WARM_UP_STEPS = 3
# However slow it is, a run ends after this many times its measured seconds, plus this many raw steps.
SECONDS_FACTOR, STEPS_MAX = 4, 10
BITS_PER_BYTE, FLOAT_BYTES, MEGA = 8, 4, 1e6


@dataclass(frozen=True, slots=True)
class LinksOptions:
    """The options of the benchmark. Rates are in Mbit/s."""

    rates: tuple[float, ...] = (1000.0, 100.0, 10.0)
    parameters: int = 1_000_000
    nodes: int = 2
    seconds: float = 6.0
    codecs: tuple[str, ...] = CODECS


def run_links(options: LinksOptions, say: Say) -> dict[str, Any]:
    """Measure a row for each rate."""
    warm_up()
    job = jobs.text_job(options.parameters)
    parameters = jobs.parameter_count(job)
    rows = []
    for rate in options.rates:
        turns = []
        for number in range(ROUNDS):
            for codec in options.codecs:
                say(f"{rate:g} Mbit/s, {codec}, turn {number + 1} of {ROUNDS}, for {options.seconds:g} s")
                turns.append({"codec": codec, **_turn(options, job, parameters, codec, rate)})
        rows.append({"mbit_per_second": rate, **_compare(turns), "turns": turns})
    return {
        "bench": "links",
        "parameters": parameters,
        "nodes": options.nodes,
        "batch_size": BATCH_SIZE,
        "seconds": options.seconds,
        "rounds": ROUNDS,
        "lossy": [codec for codec in options.codecs if is_lossy(codec)],
        "rows": rows,
        "audit_clean": all(turn["audit_clean"] for row in rows for turn in row["turns"]),
        "machine": machine(),
    }


def is_lossy(codec: str) -> bool:
    """Whether a setting may round numbers."""
    specs = parse_compress(codec)
    return any(
        spec == AUTO_LOSSY or (spec != AUTO and any(stage.name in LOSSY for stage in parse_spec(spec)))
        for spec in (specs.up, specs.down)
    )


def _compare(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The better turn of each codec, and `auto` relative to the best fixed codec."""
    speeds: dict[str, float] = {}
    for turn in turns:
        speeds[turn["codec"]] = max(speeds.get(turn["codec"], 0.0), turn["batches_per_second"] or 0.0)
    fixed = {codec: speed for codec, speed in speeds.items() if codec not in (AUTO, AUTO_LOSSY)}
    lossless = {codec: speed for codec, speed in fixed.items() if not is_lossy(codec)}
    best = max(lossless, key=lossless.__getitem__, default=None)
    return {
        "batches_per_second": speeds,
        "best": best,
        "auto_over_best": quotient(speeds.get(AUTO), speeds.get(best or "")),
        "auto_over_raw": quotient(speeds.get(AUTO), speeds.get(NONE)),
        "auto_lossy_over_best": quotient(speeds.get(AUTO_LOSSY), max(fixed.values(), default=None)),
    }


def _turn(options: LinksOptions, job: Job, parameters: int, codec: str, rate: float) -> dict[str, Any]:
    bytes_per_second = rate * MEGA / BITS_PER_BYTE
    raw_step_seconds = 2 * FLOAT_BYTES * parameters / bytes_per_second
    seconds = SECONDS_FACTOR * options.seconds + STEPS_MAX * raw_step_seconds
    with runs_folder(None) as runs, open_listener() as listener:
        settings = settings_for(
            runs,
            mode="sync",
            batch_size=BATCH_SIZE,
            batches_per_step=options.nodes,
            nodes=0,
            seconds=seconds,
            compress=codec,
            checkpoint_every="off",
            road="tcp",
        )
        stopwatch = Stopwatch(options.seconds, options.nodes, stops=True, warm_up_steps=WARM_UP_STEPS)

        def coordinate(line: Line) -> ProductRun:
            return run_here(job, settings, "w5xde.bench:links", stopwatch, Announcing(stopwatch, line))

        def help_out(line: Line, name: str) -> None:
            # The ticket of the coordinator with the address of the relay.
            ticket = replace(parse(line.hear()), addresses=(listener.getsockname()[:2],))
            run_node(ticket, job, msgspec.structs.replace(settings, node_name=name), keeps=False)

        works: dict[str, Work] = {
            "the relay": lambda line: be_relay(line, listener, bytes_per_second),
            "the coordinator": coordinate,
        }
        for number in range(options.nodes):
            works[f"node {number + 1}"] = lambda line, name=f"node-{number + 1}": help_out(line, name)  # type: ignore[misc]
        with crew(works, seconds) as [relay, coordinator, *nodes]:
            ticket = coordinator.hear()
            relay.say(parse(ticket).addresses[0])
            for node in nodes:
                node.say(ticket)
            run = msgspec.convert(coordinator.hear(), ProductRun)
        count = count_again(run)
    summary, window = run.summary, run.window
    return {
        "batches_per_second": window.batches_per_second,
        "window_batches": window.batches,
        "window_seconds": window.seconds,
        # Of the whole run, the first parameters and gradients included.
        "compression_ratio": summary["compression_ratio"],
        "bytes_up_per_batch": quotient(summary["bytes_received"], summary["batches"]),
        "bytes_down_per_batch": quotient(summary["bytes_sent"], summary["batches"]),
        "batches": summary["batches"],
        "batches_per_node": run.batches_per_node,
        "batches_relent": summary["batches_relent"],
        "ledger_batches": count.batches,
        "audit_clean": count.is_clean,
    }
