"""`python -m tests.security.guided --minutes M`: the properties, driven by a fuzzer that sees what runs.

Needs atheris (`pip install "w5xde[fuzz]"`). Each property gets its part of the time in a process of its own:
the fuzzer keeps the bytes that reach new lines of w5xde, changes them, and hypothesis makes of them what the
property is tried on. What it learned stays in .fuzz, where the next run goes on; what fails is kept in
.hypothesis too, where the tests begin. No `assert`, as in all of these.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import resource
import sys
import tempfile
from pathlib import Path

import atheris

# Before anything else loads them: what is loaded within is watched. It names every file, which nobody reads.
with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["w5xde"]):
    from tests.security.properties import PROPERTIES, Property

LEARNED = Path(".fuzz")
# Bytes to begin with, where nothing was learned yet: enough for hypothesis to draw from.
FIRST_INPUTS, INPUT_BYTES_MAX = 32, 4096
# What one input may take: CPU time, which stands still while others keep us from the cores, and memory.
INPUT_SECONDS, MEMORY_MIB = 20, 4096


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security.guided")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all properties together")
    parser.add_argument("--properties", default=",".join(PROPERTIES), help="only these")
    given = parser.parse_args()
    names = given.properties.split(",")
    seconds = max(1, round(60 * given.minutes / len(names)))
    tried, failed = 0, []
    for name in names:
        with tempfile.TemporaryFile("w+") as log:
            status = _in_a_process(PROPERTIES[name], name, seconds, log.fileno())
            log.seek(0)
            told = log.read()
        executed = re.search(r"number_of_executed_units: (\d+)", told)
        tried += int(executed[1]) if executed else 0
        print(f"{name}: {executed[1] if executed else '?'} inputs in {seconds} s", flush=True)
        if status != 0 or executed is None:
            failed.append(name)
            print(f"{name} ended with {status}:\n{told[-6000:]}", flush=True)
    print(f"{len(names)} properties, {tried:,} guided inputs; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _in_a_process(found: Property, name: str, seconds: int, log: int) -> int:
    """Its exit code; the fuzzer never returns, and a decoder that crashes takes its process with it."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.dup2(log, 1)
        os.dup2(log, 2)
        _fuzz(found, LEARNED / name, seconds)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _fuzz(found: Property, learned: Path, seconds: int) -> None:
    learned.mkdir(parents=True, exist_ok=True)
    draws = random.Random(0)
    for number in range(FIRST_INPUTS):
        (learned / f"first-{number}").write_bytes(draws.randbytes(draws.randint(64, INPUT_BYTES_MAX)))
    options = {
        "max_total_time": seconds,
        "max_len": INPUT_BYTES_MAX,
        "len_control": 0,
        # The fuzzer's own limit goes by the clock on the wall; ours is below.
        "timeout": 3600,
        "rss_limit_mb": MEMORY_MIB,
        "print_final_stats": 1,
        "artifact_prefix": f"{learned}-failed-",
    }
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + INPUT_SECONDS,) * 2)
    atheris.Setup(
        ["guided", *(f"-{key}={value}" for key, value in options.items()), str(learned)], found.on_bytes()
    )
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
