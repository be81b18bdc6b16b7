"""`bench evolution`: the stages and studies of the first system, run on this one, beside its own figures.

The first system counted batches that ten threads computed and that were not applied; here ten processes
compute batches, and only applied ones count. So the two figures are not comparable. Its compression ratios
were relative to pickles; stages with pickles report that ratio as well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from w5xde.bench import jobs
from w5xde.bench.contestants.product import ProductRun, count_again, run_product, runs_folder
from w5xde.bench.measure.meter import machine, socket_buffer_bytes
from w5xde.bench.measure.processes import warm_up
from w5xde.bench.progress import Say
from w5xde.bench.suites import pickled
from w5xde.bench.suites.seed import SeedOptions, seed_settings
from w5xde.bench.suites.stages import STUDIES, StudyStage
from w5xde.config import Settings


@dataclass(frozen=True, slots=True)
class EvolutionOptions:
    """The options of the benchmark."""

    studies: tuple[str, ...] = tuple(STUDIES)
    nodes: int = 10
    seconds: float = 10.0


def run_evolution(options: EvolutionOptions, say: Say) -> dict[str, Any]:
    """Measure a row for each stage of each study, in the order of the first system."""
    warm_up()
    # Before any process is forked, so that all of them have the stage.
    pickled.register()
    rows = []
    for study in options.studies:
        for stage in STUDIES[study]:
            say(f"{study}: {stage.name}, for {options.seconds:g} s")
            rows.append({"study": study, **_row(stage, options)})
    return {
        "bench": "evolution",
        "nodes": options.nodes,
        "seconds": options.seconds,
        "rows": rows,
        "audit_clean": all(row["audit_clean"] for row in rows),
        "machine": machine(),
    }


def _row(stage: StudyStage, options: EvolutionOptions) -> dict[str, Any]:
    with runs_folder(None) as runs:
        seed_options = SeedOptions(nodes=options.nodes, seconds=options.seconds)
        settings = seed_settings(seed_options, runs, **stage.settings)
        run = run_product(jobs.seed, settings, name="w5xde.bench.jobs:seed", has_view="log" in stage.settings)
        count = count_again(run)
    return {
        "stage": stage.name,
        "about": stage.about,
        "note": stage.note,
        "settings": stage.settings,
        # The system silently limits the size.
        "socket_buffer_bytes": socket_buffer_bytes(settings.socket_buffer),
        "then": asdict(stage.then),
        **_figures(run),
        "compression_ratio_of_pickles": _of_pickles(run, settings),
        "ledger_batches": count.batches,
        "audit_clean": count.is_clean,
    }


def _of_pickles(run: ProductRun, settings: Settings) -> float | None:
    """How many times smaller pickles became; None if there were none."""
    if pickled.NAME not in settings.compress:
        return None
    return float(run.summary["compression_ratio"]) * pickled.growth(jobs.seed.model())


def _figures(run: ProductRun) -> dict[str, Any]:
    summary = run.summary
    moved = summary["bytes_sent"] + summary["bytes_received"]
    network = [node["seconds_network"] for node in summary["nodes"]]
    return {
        "batches": summary["batches"],
        "seconds": summary["seconds"],
        "batches_per_second": run.window.batches_per_second,
        "batches_per_second_whole": summary["batches"] / summary["seconds"],
        "bytes_per_second": moved / summary["seconds"],
        "seconds_network": [min(network), max(network)],
        "memory_pss_bytes": run.memory_pss_bytes,
        "compression_ratio": summary["compression_ratio"],
        "loss_all_samples": run.loss_all_samples,
    }
