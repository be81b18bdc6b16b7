"""`w5xde bench`: runs a benchmark, and shows its progress, tables, JSON and plots. Measures nothing."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from w5xde.bench.benches import BENCHES
from w5xde.bench.flags import picture
from w5xde.bench.progress import ProgressLine
from w5xde.cli.main import NOT_CLEAN, results_to
from w5xde.cli.parser import BENCH_ABOUT, Parser
from w5xde.errors import UsageError
from w5xde.sanitize import to_json

_OVERVIEW = """examples:
  w5xde bench learn                       how soon a loss is reached, beside a plain loop and PyTorch DDP
  w5xde bench seed                        the first system's benchmark, beside what this machine allows
  w5xde bench seed --mode sync --json
  w5xde bench peers --plot peers.png      the same jobs on PyTorch DDP, in turns
  w5xde bench engines                     on a Ray cluster, beside Ray Train
  w5xde bench BENCH --help                what can be chosen"""


def build_parser() -> Parser:
    """The parser of all benchmarks and their flags."""
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
            "--plot", metavar="FILE.png", type=picture, help="also draw the results into this file"
        )
    return parser


def run_bench(arguments: Sequence[str]) -> int:
    """Run a benchmark and show its results; returns the exit code of the command."""
    given = build_parser().parse_args(arguments or ["--help"])
    bench = BENCHES[given.bench]
    if given.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed",
            code="W5-240",
            fix='pip install "w5xde[bench]"',
        )
    with results_to(given.json) as out:
        found = bench.run(given, ProgressLine().say)
        if given.plot is not None:
            from w5xde.bench.show import plots as plot

            plot.draw(found, given.plot)
            print(f"drawn: {given.plot}", file=sys.stderr, flush=True)
        if given.json:
            print(to_json(found), file=out, flush=True)
        else:
            from w5xde.bench.show import tables as report

            report.show(found, out)
    return 0 if found.get("audit_clean", True) else NOT_CLEAN
