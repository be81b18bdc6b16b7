"""Pairs: runs two contestants in turns, because machines drift and only neighbouring runs compare.

The first of several pairs is a warm-up and does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from w5xde.bench.contestants.product import count_again, run_product, runs_folder, settings_for
from w5xde.bench.progress import Say
from w5xde.learn.job.job import Job
from w5xde.runtime.admission.register import TicketRegister

# However slow a run is, it ends after this many times its measured seconds, plus these.
SECONDS_FACTOR, SECONDS_MORE = 3, 20.0

Measured = dict[str, Any]


@dataclass(slots=True)
class Turns:
    """The results of both contestants, pair by pair; each has at least `batches_per_second`."""

    ones: list[Measured] = field(default_factory=list)
    others: list[Measured] = field(default_factory=list)
    # Of all runs of w5xde, the dropped ones included.
    audit_clean: bool = True

    @property
    def ratios(self) -> list[float]:
        """The rate of the first contestant over that of the second, for each pair."""
        return [
            one["batches_per_second"] / other["batches_per_second"]
            for one, other in zip(self.ones, self.others, strict=True)
        ]


def dropped(pairs: int) -> int:
    """How many of `pairs` pairs do not count."""
    return 1 if pairs > 1 else 0


def in_turns(
    pairs: int, one: tuple[str, Callable[[], Measured]], other: tuple[str, Callable[[], Measured]], say: Say
) -> Turns:
    """Run both contestants, given as (name, function), `pairs` times in turn."""
    turns = Turns()
    for pair in range(pairs):
        found = []
        for name, run in (one, other):
            say(f"pair {pair + 1} of {pairs}: {name}")
            found.append(run())
        turns.audit_clean &= all(each.get("audit_clean", True) for each in found)
        if pair >= dropped(pairs):
            turns.ones.append(found[0])
            turns.others.append(found[1])
    return turns


def median(runs: list[Measured], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


def run_of_ours(
    job: Job, nodes: int, seconds: float, *, name: str, checks_in_turns: bool = False, **settings: Any
) -> Measured:
    """Run w5xde with these settings, measure it for `seconds`, and audit its ledger."""
    with runs_folder(None) as runs:
        chosen = settings_for(runs, nodes=nodes, seconds=SECONDS_FACTOR * seconds + SECONDS_MORE, **settings)
        run = run_product(job, chosen, name=name, window_seconds=seconds, checks_in_turns=checks_in_turns)
        count = count_again(run)
        entrance = TicketRegister(Path(run.folder)).entrance
    window = run.window
    return {
        "processes": nodes,
        "is_encrypted": entrance is not None and not entrance.is_clear,
        "batches": window.batches,
        "steps": window.steps,
        "seconds": window.seconds,
        "batches_per_second": window.batches_per_second or 0.0,
        "cpu_us_per_batch": window.cpu_us_per_batch or 0.0,
        "checks": msgspec.to_builtins(run.checks) if checks_in_turns else None,
        "loss_all_samples": run.loss_all_samples,
        "compression_ratio": run.summary["compression_ratio"],
        "batches_in_all": run.summary["batches"],
        "ledger_batches": count.batches,
        "audit_clean": count.is_clean,
    }
