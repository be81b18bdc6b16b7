"""`python -m tests.security`: every lie, and every property with EXAMPLES examples or for MINUTES.

For minutes the inputs come from a fuzzer that is guided by what they reach (`guided`), where atheris is
installed, else from hypothesis alone. Uses no `assert`, so that `python -O` checks the same. What fails is
kept in .hypothesis, where the next run begins, of these and of the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
import zlib

from tests.security.lies import LIES, NUMBERS, check_number
from tests.security.measure import Broken
from tests.security.properties import PROPERTIES
from w5xde.learn.codecs.compressors import Zlib

# So many at a time: a property that is never wrong must leave time for the others.
ROUND_EXAMPLES = 2000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security")
    parser.add_argument("--examples", type=int, default=0, help="of each property (default: as in the tests)")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with all properties for so long")
    parser.add_argument(
        "--break-it", action="store_true", help="let zlib give what it likes, to see it found out"
    )
    given = parser.parse_args()
    if given.break_it:
        Zlib.decompress = lambda self, block, raw_bytes: zlib.decompress(block)  # type: ignore[method-assign]
    failed = _lies()
    if given.minutes and not failed and importlib.util.find_spec("atheris") is not None:
        print(f"{len(LIES)} lies, {len(NUMBERS)} numbers; failed: none", flush=True)
        # A process of its own: what is to be watched must not be loaded yet.
        guided = [sys.executable, "-m", "tests.security.guided", "--minutes", str(given.minutes)]
        return subprocess.run(guided, check=False).returncode
    tried = 0
    end = time.monotonic() + 60 * given.minutes
    examples = given.examples or (ROUND_EXAMPLES if given.minutes else 0)
    while not failed:
        for name, found in PROPERTIES.items():
            if given.minutes and time.monotonic() > end:
                break
            try:
                tried += found.run(examples or None)
            except Exception as error:
                failed.append(name)
                print(f"{name}: {type(error).__name__}: {error}", *getattr(error, "__notes__", []), sep="\n")
        if time.monotonic() >= end:
            break
    print(
        f"{len(LIES)} lies, {len(NUMBERS)} numbers, {tried:,} examples; failed: {', '.join(failed) or 'none'}"
    )
    return 1 if failed else 0


def _lies() -> list[str]:
    failed = []
    for name, lie in LIES.items():
        try:
            lie.check()
        except Broken as error:
            failed.append(name)
            print(f"{name}: {error}")
    for spec, value in NUMBERS:
        check_number(spec, value)
    return failed


if __name__ == "__main__":
    sys.exit(main())
