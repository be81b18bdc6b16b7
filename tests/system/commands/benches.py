"""Runs benchmarks for the tests of commands, all in one process: loading torch takes longer than they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.processes import PATIENCE_SECONDS, run_python

_PROGRAM = """
import json, sys
from w5xde.cli.main import main
for words in json.loads(sys.argv[1]):
    if main(words):
        sys.exit(f"{words} failed")
"""


def run_benches(
    calls: dict[str, list[str]], folder: Path, variables: dict[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """What these calls of `w5xde bench` print with --json; each draws its picture too, as NAME.png."""
    words = [["bench", *call, "--json", "--plot", f"{name}.png"] for name, call in calls.items()]
    done = run_python(
        "-c", _PROGRAM, json.dumps(words), cwd=folder, seconds_max=2 * PATIENCE_SECONDS, variables=variables
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(calls), done.stdout
    found = {result["bench"]: result for result in map(json.loads, lines)}
    assert list(found) == list(calls)
    return found
