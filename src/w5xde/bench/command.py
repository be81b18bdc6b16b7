"""`w5xde bench`: flags, progress, tables, JSON and pictures around the benchmarks. Loads no torch itself."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w5xde.cli import BENCH_ABOUT, NOT_CLEAN, Parser, results_to
from w5xde.errors import UsageError

_OVERVIEW = """examples:
  w5xde bench seed                        the first system's benchmark, beside what this machine allows
  w5xde bench seed --mode sync --json
  w5xde bench peers --plot peers.png      the same jobs on PyTorch DDP, in turns
  w5xde bench BENCH --help                what can be chosen"""

_SECONDS_MAX = 3600.0
_NODES_MAX = 1000

Say = Callable[[str], None]


def build_parser() -> Parser:
    """Everything that can be asked for."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="w5xde bench",
        description=BENCH_ABOUT,
        epilog=_OVERVIEW,
        formatter_class=plain,
        allow_abbrev=False,
    )
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, bench in BENCHES.items():
        command = benches.add_parser(
            name,
            help=bench.about,
            description=bench.about,
            epilog=bench.examples,
            formatter_class=plain,
            allow_abbrev=False,
        )
        bench.add_flags(command)
        command.add_argument(
            "--json", action="store_true", help="print one JSON object with the results on stdout"
        )
        command.add_argument(
            "--plot", metavar="FILE.png", type=_picture, help="also draw the results into this file"
        )
    return parser


def run_bench(arguments: Sequence[str]) -> int:
    """Run a benchmark; returns the exit code of the command."""
    given = build_parser().parse_args(arguments or ["--help"])
    bench = BENCHES[given.bench]
    if given.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed",
            code="W5-230",
            fix='pip install "w5xde[bench]"',
        )
    with results_to(given.json) as out:
        found = bench.run(given, Progress(given.bench).say)
        if given.plot is not None:
            from w5xde.bench import plot

            plot.draw(given.bench, found, given.plot)
            print(f"drawn: {given.plot}", file=sys.stderr, flush=True)
        if given.json:
            from w5xde.runtime.recorder import to_json

            print(to_json(found), file=out, flush=True)
        else:
            from w5xde.bench import report

            report.show(found, out)
    return 0 if found.get("audit_clean", True) else NOT_CLEAN


class Progress:
    """What is being done, on stderr, with the time that has passed."""

    def __init__(self, bench: str) -> None:
        self._bench = bench
        self._began_at = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_at:6.1f} s  {text} …", file=sys.stderr, flush=True)


# --- what is typed --------------------------------------------------------------------------------


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.absolute().parent}")
    return path


def _number(text: str, low: float, high: float, *, whole: bool = False) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not low <= number <= high or (whole and number != int(number)):
        kind = "a whole number" if whole else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} must be {kind} from {low:g} to {high:g}")
    return number


def _seconds(text: str) -> float:
    return _number(text, 0.2, _SECONDS_MAX)


def _nodes(text: str) -> int:
    return int(_number(text, 1, _NODES_MAX, whole=True))


def _batches(text: str) -> int:
    return int(_number(text, 1, 65536, whole=True))


def _staleness(text: str) -> int:
    return int(_number(text, 0, 10**9, whole=True))


# --- the benchmarks -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark as a command."""

    about: str
    examples: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Say], dict[str, Any]]


def _seed_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--mode", choices=["async", "sync"], default="async", help="(default: async)")
    command.add_argument("--nodes", type=_nodes, default=10, metavar="N", help="processes (default: 10)")
    command.add_argument(
        "--seconds", type=_seconds, default=30.0, metavar="X", help="how long to train (default: 30)"
    )
    command.add_argument(
        "--batches-per-step", type=_batches, metavar="N", help="(default: 1 in async mode, 32 in sync)"
    )
    command.add_argument("--staleness", type=_staleness, metavar="N", help="async: the product's own default")
    command.add_argument("--runs", metavar="FOLDER", help="keep the run there (default: thrown away)")


def _run_seed(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    from w5xde.bench.seed import SeedOptions, run_seed

    options = SeedOptions(
        mode=given.mode,
        nodes=given.nodes,
        seconds=given.seconds,
        batches_per_step=given.batches_per_step,
        staleness=given.staleness,
        runs=given.runs,
    )
    return run_seed(options, say)


BENCHES: dict[str, Bench] = {
    "seed": Bench(
        "the first system's benchmark, counted strictly, beside what this machine allows",
        """examples:
  w5xde bench seed
  w5xde bench seed --mode sync --seconds 10
  w5xde bench seed --nodes 4 --json > seed.json
  w5xde bench seed --runs runs            keep the run, for  w5xde audit latest""",
        _seed_flags,
        _run_seed,
    ),
}
