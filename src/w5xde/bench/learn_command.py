"""`bench learn` as a command: its flags, and the suite that they choose. Loads no torch for its help text."""

from __future__ import annotations

import argparse
from typing import Any

from w5xde.bench.flags import add_rows, add_seconds, number, one_of, several, whole
from w5xde.bench.progress import Say

# Named here as well, because the modules that define them load torch.
LEARN_JOB_NAMES = ("seed", "digits", "text", "conv")
LEARN_ROW_NAMES = (
    "plain",
    "threads",
    "plain-large",
    "ddp",
    "sync",
    "sync-1",
    "sync-n",
    "sync-best",
    "async",
)


def learn_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--jobs",
        type=several(one_of(LEARN_JOB_NAMES)),
        default=LEARN_JOB_NAMES,
        metavar="JOB,…",
        help=f"some of {', '.join(LEARN_JOB_NAMES)} (default: all)",
    )
    add_rows(command, LEARN_ROW_NAMES)
    command.add_argument(
        "--seeds", type=whole(1, 100), default=3, metavar="N", help="runs of each contestant (default: 3)"
    )
    command.add_argument(
        "--nodes", type=whole(1, 1000), metavar="N", help="processes (default: 10 for the seeds' job, else 2)"
    )
    command.add_argument(
        "--budget",
        type=number(0.01, 100.0),
        default=1.0,
        metavar="X",
        help="part of each plain loop's steps; the target is its loss after 70 %% of them (default: 1)",
    )
    command.add_argument(
        "--sizes",
        action="store_true",
        help="instead: batches/s over a plain loop and DDP, for models of 1k to 25M parameters",
    )
    command.add_argument(
        "--params",
        type=several(whole(100, 10**9)),
        metavar="N,…",
        help="with --sizes: sizes of the model (default: 1e3 to 25e6)",
    )
    command.add_argument(
        "--tensors",
        type=several(whole(4, 10_000)),
        metavar="N,…",
        help="with --sizes: numbers of tensors (default: 4,40,400)",
    )
    add_seconds(command, 2.0, "with --sizes: how long to measure each turn")


def run_learn_command(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    if given.sizes:
        from w5xde.bench.suites.sizes import SizesOptions, run_sizes

        chosen = {name: getattr(given, name) for name in ("params", "tensors") if getattr(given, name)}
        return run_sizes(SizesOptions(seconds=given.seconds, **chosen), say)
    from w5xde.bench.suites.learn import LearnOptions, run_learn

    return run_learn(LearnOptions(given.jobs, given.rows, given.seeds, given.nodes, given.budget), say)
