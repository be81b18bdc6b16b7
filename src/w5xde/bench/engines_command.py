"""`bench engines` as a command: its flags, and the suite that they choose. Loads no torch for its help."""

from __future__ import annotations

import argparse
from typing import Any

from w5xde.bench.flags import add_pairs, add_rows, add_runs, add_seconds, whole
from w5xde.bench.progress import Say

# Named here as well, because the modules that define them load torch.
ENGINE_ROW_NAMES = ("text", "large", "text-local", "large-local", "kill")
PAIRS, SECONDS = 4, 10.0

ENGINES_EXAMPLES = """examples:
  w5xde bench engines                                   about fifteen minutes; starts a Ray cluster here
  RAY_ADDRESS=HOST:6379 w5xde bench engines --runs /shared/runs
  w5xde bench engines --rows kill --nodes 4 --pairs 3   what one killed worker costs
  w5xde bench engines --rows text,text-local --seconds 5 --json"""


def engines_flags(command: argparse.ArgumentParser) -> None:
    add_rows(command, ENGINE_ROW_NAMES)
    add_pairs(command, PAIRS)
    command.add_argument(
        "--nodes", type=whole(1, 64), metavar="N", help="workers of each (default: 2; for kill: 4)"
    )
    add_seconds(command, SECONDS, "how long to measure each turn; for kill: before the kill and after it")
    add_runs(command)


def run_engines_command(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    from w5xde.bench.engines.suite import EnginesOptions, run_engines

    return run_engines(EnginesOptions(given.rows, given.pairs, given.seconds, given.nodes, given.runs), say)
