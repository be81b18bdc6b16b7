"""`python -m tests.sim --seeds N --first K` runs many seeds; `--seed S --verbose` shows one."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.scenario import Scenario
from tests.sim.world import Failure, World

PROGRESS_SECONDS = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many (500)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--verbose", action="store_true", help="print every event and its effects")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.seeds) if asked.seed is None else [asked.seed]
    say = print if asked.verbose else None
    started = told = time.perf_counter()
    failures = events = 0
    for done, seed in enumerate(seeds, 1):
        try:
            outcome = World(Scenario.of_seed(seed), say).run()
            events += outcome.events
        except Failure as failure:
            failures += 1
            print(f"\r{failure}", file=sys.stderr)
            if not asked.keep_going:
                return 1
            continue
        now = time.perf_counter()
        if asked.seed is not None:
            print(f"seed {seed}: {outcome}")
        elif now - told >= PROGRESS_SECONDS or done == len(seeds):
            told = now
            rate = done / (now - started)
            print(f"\r{done} of {len(seeds)} seeds, {rate:.0f} a second, {events} events", end="", flush=True)
    if asked.seed is None:
        print(f"\n{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
