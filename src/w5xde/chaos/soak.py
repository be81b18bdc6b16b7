"""The soak: kills or freezes a random process every few seconds, for as long as asked.

    python -m w5xde.chaos --seconds 600 --every 5 --seed 1

Before and after, the same pool runs undisturbed for a while, and the throughput under chaos is compared with
that. The seed fixes the faults; the state in which a fault finds a process depends on the machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from w5xde.chaos.child import Command, Process, spawn
from w5xde.chaos.pool import ChaosPool
from w5xde.chaos.verdict import judge
from w5xde.chaos.warm_start import start_warm
from w5xde.cli.audit_view import show_audit
from w5xde.cli.view import make_view
from w5xde.config import Settings
from w5xde.errors import TrainingError, UsageError, W5xdeError
from w5xde.runs import free_name, read_manifest
from w5xde.sanitize import to_json

# Many batches in a step, so that any number of nodes shares them about evenly.
STEP_BATCHES = 48
FREEZE_SECONDS = (1.0, 5.0)
# Of the undisturbed throughput, counting only time with the coordinator up.
THROUGHPUT_RATIO_MIN = 0.85
# The run must end by itself even if the soak is killed: this long after its planned end.
LIMIT_SECONDS = 600.0
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak; returns 0 only if the audit is clean, the weights are the same, and throughput held."""
    given = _parser().parse_args(argv)
    try:
        return _soak(given)
    except W5xdeError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m w5xde.chaos",
        description="Kill and freeze nodes and the coordinator at random, then check that nothing was lost.",
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of chaos (default: 600)")
    parser.add_argument("--nodes", type=int, default=8, help="how many (default: 8)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults (default: 5)")
    parser.add_argument("--seed", type=int, help="of the random faults (default: a new one)")
    parser.add_argument(
        "--calm", type=float, default=30.0, help="undisturbed seconds, before and after (default: 30)"
    )
    parser.add_argument("--runs", default="runs", help="folder in which runs are kept (default: runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser


def _soak(given: argparse.Namespace) -> int:
    if given.seconds <= 0 or given.every <= 0 or given.calm <= 0 or given.nodes <= 0:
        raise UsageError("seconds, nodes, every and calm must be more than nothing", code="W5-210")
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    times = f"--seconds {given.seconds:g} --nodes {given.nodes} --every {given.every:g} --calm {given.calm:g}"
    again = f"python -m w5xde.chaos {times} --seed {seed}"
    limit = given.seconds + 2 * given.calm + LIMIT_SECONDS
    settings = Settings(batches_per_step=STEP_BATCHES, seconds=limit, runs=given.runs, json=given.json)
    view = make_view(settings)
    view.say(f"seed {seed}; the same again:  {again}")
    run = Path(given.runs) / free_name(Path(given.runs), f"soak-{seed}")
    pool = ChaosPool(run, settings, view.say, start=_start)
    with pool.open():
        for _ in range(given.nodes):
            pool.add_node()
        before = _run_undisturbed(pool, given.calm)
        chaos = _run_chaos(pool, random.Random(seed), given.seconds, given.every)
        after = _run_undisturbed(pool, given.calm)
        pool.stop()
    pool.tell("the run has ended; the same in one process, with a plain PyTorch loop …")
    steps = read_manifest(pool.run)["result"]["steps"]
    verdict = judge(pool.run, msgspec.structs.replace(settings, seconds=None, steps=steps))
    throughput = _throughput(_applied(pool), (before, after), chaos)
    is_good = (
        verdict.is_same and verdict.report.is_clean and throughput["throughput_ratio"] >= THROUGHPUT_RATIO_MIN
    )
    if not verdict.report.is_clean:
        show_audit(view, verdict.report)
    for line in verdict.lines():
        view.say(line, markup=True)
    for key, value in (pool.summary() | throughput).items():
        view.say(f"  {key} {value}")
    view.say(f"seed {seed}: {'good' if is_good else 'NOT GOOD'}; the same again:  {again}")
    if given.json:
        summary = {"run": pool.run.name, "seed": seed, "again": again, "good": is_good}
        print(to_json(summary | pool.summary() | throughput | verdict.summary()), flush=True)
    return 0 if is_good else TrainingError.exit_code


def _start(command: Command) -> Process:
    """Start the coordinator as a user would, and nodes warm: their starts would cost the others cores."""
    return start_warm(command) if command.words[0] == "join" else spawn(command)


@dataclass(frozen=True, slots=True)
class SoakWindow:
    """A part of the run by wall-clock time, with its working seconds."""

    start: float
    stop: float
    up_seconds: float
    ready_seconds: float


def _run_undisturbed(pool: ChaosPool, seconds: float) -> SoakWindow:
    """Wait until all processes work again, then measure them undisturbed."""
    for child in pool.children:
        pool.thaw(child)
    before = pool.progress().nodes

    def all_give() -> bool:
        now = pool.progress().nodes
        giving = sum(batches > before.get(name, 0) for name, batches in now.items())
        return giving >= len(pool.nodes) and all(child.is_working for child in pool.children)

    pool.until(all_give, "all processes work")
    pool.tell(f"all processes work, and run undisturbed for {seconds:g} s")
    return _watch(pool, lambda: pool.wait(seconds))


def _run_chaos(pool: ChaosPool, chance: random.Random, seconds: float, every: float) -> SoakWindow:
    """Kill or freeze a random process every few seconds."""
    pool.tell(f"chaos for {seconds:g} s")

    def strike() -> None:
        left = seconds
        while True:
            # Draw all numbers each time, whichever processes run: one seed gives one list of faults.
            gap = every * chance.uniform(0.5, 1.5)
            victim, is_kill = chance.randrange(len(pool.nodes) + 1), chance.random() < 0.5
            frozen_seconds = chance.uniform(*FREEZE_SECONDS)
            pool.wait(min(gap, left))
            left -= gap
            if left <= 0:
                return
            child = pool.children[victim]
            if is_kill:
                pool.kill(child)
            else:
                pool.freeze(child, frozen_seconds)

    return _watch(pool, strike)


def _watch(pool: ChaosPool, happen: Callable[[], None]) -> SoakWindow:
    start, up, ready = time.time(), pool.up_seconds, pool.ready_seconds
    happen()
    return SoakWindow(start, time.time(), pool.up_seconds - up, pool.ready_seconds - ready)


def _applied(pool: ChaosPool) -> list[tuple[float, int]]:
    """The time and the number of batches of each step that counts."""
    steps: list[tuple[float, int]] = []
    for record in pool.records():
        if record["kind"] == "restore":
            del steps[record["version"] :]
        elif record["kind"] == "step":
            steps.append((record["time"], sum(stop - start for start, stop, _, _ in record["shares"])))
    return steps


def _throughput(
    steps: list[tuple[float, int]], peace: tuple[SoakWindow, SoakWindow], chaos: SoakWindow
) -> dict[str, Any]:
    """Batches a second under chaos over the undisturbed rate, counting only time with the coordinator up."""

    def batches(window: SoakWindow) -> int:
        return sum(count for at, count in steps if window.start <= at < window.stop)

    def over(amount: float, seconds: float) -> float:
        return round(amount / seconds, 4) if seconds else 0.0

    calm_rates = [over(batches(window), window.up_seconds) for window in peace]
    calm_rate = sum(calm_rates) / len(calm_rates)
    done = batches(chaos)
    return {
        "calm_batches_per_second": calm_rates,
        "chaos_batches": done,
        "chaos_seconds": round(chaos.stop - chaos.start, 3),
        "chaos_up_seconds": round(chaos.up_seconds, 3),
        # The mean share of working nodes while the coordinator was up: a bound for the next ratio.
        "nodes_ready": over(chaos.ready_seconds, chaos.up_seconds),
        "throughput_ratio": over(done, chaos.up_seconds * calm_rate),
        # The same for each working node.
        "ready_ratio": over(done, chaos.ready_seconds * calm_rate),
    }
