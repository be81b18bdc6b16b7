"""Pairs: two contestants in turns, because machines drift and only neighbours can be compared.

One, the other, one, the other …; of several pairs the first is dropped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from w5xde.bench.contestants.product import count_again, run_product, settings_for
from w5xde.bench.suites.seed import Say, runs_folder
from w5xde.learn.job.job import Job
from w5xde.runtime.admission.register import TicketRegister

# However slow a run is, it ends after this many times what it is measured for, and some seconds.
SECONDS_FACTOR, SECONDS_MORE = 3, 20.0

Measured = dict[str, Any]


@dataclass(slots=True)
class Turns:
    """What both gave, pair by pair; each says at least its batches a second."""

    ones: list[Measured] = field(default_factory=list)
    others: list[Measured] = field(default_factory=list)
    # Of all runs of ours, dropped ones too.
    audit_clean: bool = True

    @property
    def ratios(self) -> list[float]:
        """The one's batches a second over the other's, for each pair."""
        return [
            one["batches_per_second"] / other["batches_per_second"]
            for one, other in zip(self.ones, self.others, strict=True)
        ]


def dropped(pairs: int) -> int:
    """How many of so many pairs do not count."""
    return 1 if pairs > 1 else 0


def in_turns(
    pairs: int, one: tuple[str, Callable[[], Measured]], other: tuple[str, Callable[[], Measured]], say: Say
) -> Turns:
    """Let both, which are named, run so many times."""
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
    """One run of ours with these settings, measured for so long, and its ledger counted again."""
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
