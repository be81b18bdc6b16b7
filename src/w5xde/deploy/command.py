"""`w5xde deploy`: what can be typed, and where the files go. Knows no engine by name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from w5xde.cli.help_format import HelpFormat
from w5xde.cli.main import results_to
from w5xde.cli.parser import DEPLOY_ABOUT, Parser
from w5xde.deploy.engines import ENGINES
from w5xde.deploy.files import print_files, write_files
from w5xde.deploy.request import make_request
from w5xde.sanitize import to_json

_JOB = "train.py, train.py:name or package.module:name"
_OVERVIEW = """examples:
{examples}
  w5xde deploy ENGINE --help

after a -- come flags of  w5xde serve:  … -- --epochs 5 --batch-size 64"""
# What separates the flags of `w5xde serve` from those of `deploy`.
_SEPARATOR = "--"


def build_parser() -> Parser:
    """The parser of all engines and their flags."""
    first = [engine.examples.splitlines()[1] for engine in ENGINES.values()]
    parser = Parser(
        prog="w5xde deploy",
        description=DEPLOY_ABOUT,
        epilog=_OVERVIEW.format(examples="\n".join(first)),
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    engines = parser.add_subparsers(dest="engine", metavar="ENGINE", required=True)
    for name, engine in ENGINES.items():
        command = engines.add_parser(
            name,
            help=engine.about,
            description=engine.about,
            epilog=engine.examples,
            formatter_class=HelpFormat,
            allow_abbrev=False,
            usage=f"w5xde deploy {name} JOB [options] [-- flags of w5xde serve]",
        )
        command.add_argument("job", metavar="JOB", help=_JOB)
        command.add_argument("--name", metavar="NAME", help="name of the run (default: that of the job file)")
        engine.add_flags(command)
        command.add_argument("--out", metavar="DIR", help="write the files there (default: print them)")
        command.add_argument("--json", action="store_true", help="print one JSON object with all files")
    return parser


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What was typed, and the flags for `w5xde serve`."""
    typed = list(arguments)
    cut = typed.index(_SEPARATOR) if _SEPARATOR in typed else len(typed)
    return build_parser().parse_args(typed[:cut] or ["--help"]), typed[cut + 1 :]


def run_deploy(arguments: Sequence[str]) -> int:
    """Print or write the files; returns the exit code of the command."""
    given, flags = parse(arguments)
    is_here = not vars(given).get("job_in_image", False)
    request = make_request(given.job, given.name, flags, is_here=is_here)
    files = ENGINES[given.engine].write(request, given)
    written = write_files(files, Path(given.out)) if given.out is not None else []
    with results_to(given.json) as out:
        if given.json:
            found = [
                {"name": each.name, "text": each.text, "is_executable": each.is_executable} for each in files
            ]
            places = [str(place) for place in written]
            print(
                to_json({"engine": given.engine, "run": request.run, "files": found, "written": places}),
                file=out,
                flush=True,
            )
        elif written:
            print("\n".join(f"wrote {place}" for place in written), file=sys.stderr)
        else:
            print_files(files, out)
    return 0
