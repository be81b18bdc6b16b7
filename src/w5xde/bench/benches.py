"""The benchmarks as commands: the flags of each, and the suite that it calls. Measures and shows nothing.

Suites load torch, so they are imported when a benchmark runs; the help texts need none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from w5xde.bench.engines_command import ENGINES_EXAMPLES, engines_flags, run_engines_command
from w5xde.bench.flags import add_pairs, add_rows, add_runs, add_seconds, one_of, several, whole
from w5xde.bench.learn_command import learn_flags, run_learn_command
from w5xde.bench.links_command import LINKS_EXAMPLES, links_flags, run_links_command
from w5xde.bench.progress import Say
from w5xde.bench.suites.stages import STUDIES

_NODES = whole(1, 1000)


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
    command.add_argument("--nodes", type=_NODES, default=10, metavar="N", help="processes (default: 10)")
    add_seconds(command, 30.0, "how long to train")
    command.add_argument(
        "--batches-per-step",
        type=whole(1, 65536),
        metavar="N",
        help="(default: 1 in async mode, 32 in sync)",
    )
    command.add_argument(
        "--staleness", type=whole(0, 10**9), metavar="N", help="async: (default: that of w5xde train)"
    )
    add_runs(command)


def _run_seed(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    from w5xde.bench.suites.seed import SeedOptions, run_seed

    options = SeedOptions(
        mode=given.mode,
        nodes=given.nodes,
        seconds=given.seconds,
        batches_per_step=given.batches_per_step,
        staleness=given.staleness,
        runs=given.runs,
    )
    return run_seed(options, say)


# Named here as well, because the modules that define them load torch.
MATCH_NAMES = (
    "seed-async",
    "seed-sync",
    "text-b4",
    "text-b16",
    "text-one-b4",
    "text-one-b16",
    "large-fp32",
    "large-bf16",
    "large-bf16-hook",
    "seed-ray",
)
COST_NAMES = ("tls-sync", "tls-async", "checks-sync", "checks-async", "own-loop-2", "own-loop-8")


def _evolution_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--studies",
        type=several(one_of(tuple(STUDIES))),
        default=tuple(STUDIES),
        metavar="NAME,…",
        help=f"some of {', '.join(tuple(STUDIES))} (default: all)",
    )
    command.add_argument("--nodes", type=_NODES, default=10, metavar="N", help="processes (default: 10)")
    add_seconds(command, 10.0, "how long to train in each stage")


def _run_evolution(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    from w5xde.bench.suites.evolution import EvolutionOptions, run_evolution

    return run_evolution(EvolutionOptions(given.studies, given.nodes, given.seconds), say)


def _codecs_flags(command: argparse.ArgumentParser) -> None:
    add_seconds(command, 10.0, "how long to measure, all codecs together")


def _run_codecs(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    from w5xde.bench.measure.meter import machine
    from w5xde.bench.suites.codecs import measure

    say(f"training for real gradients, then every codec on them, for {given.seconds:g} s")
    found = measure(given.seconds)
    return {"bench": "codecs", "seconds": given.seconds, **found, "machine": machine()}


def _exchange_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--params",
        type=several(whole(1, 10**9)),
        default=(1_000_000, 25_000_000),
        metavar="N,…",
        help="sizes of the model (default: 1e6,25e6)",
    )
    command.add_argument(
        "--nodes", type=several(whole(1, 64)), default=(2, 4), metavar="N,…", help="(default: 2,4)"
    )
    add_seconds(command, 5.0, "how long to measure each row")
    command.add_argument(
        "--optimizer",
        choices=["sgd", "momentum", "adam"],
        default="sgd",
        help="whose state the coordinator holds too (default: sgd, which has none)",
    )
    command.add_argument(
        "--checkpoint-every", default="off", metavar="EVERY", help="as in w5xde train (default: off)"
    )
    command.add_argument("--compress", metavar="SPEC", help="as in w5xde train (default: its own)")


def _run_exchange(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    from w5xde.bench.suites.exchange import ExchangeOptions, run_exchange

    options = ExchangeOptions(
        parameters=given.params,
        nodes=given.nodes,
        seconds=given.seconds,
        optimizer=given.optimizer,
        checkpoint_every=given.checkpoint_every,
        compress=given.compress,
    )
    return run_exchange(options, say)


def _peers_flags(command: argparse.ArgumentParser) -> None:
    add_rows(command, MATCH_NAMES)
    add_pairs(command, 5)
    command.add_argument("--nodes", type=_NODES, metavar="N", help="processes (default: as the row says)")
    add_seconds(command, 10.0, "how long to measure each turn")


def _run_peers(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    from w5xde.bench.suites.peers import PeersOptions, run_peers

    return run_peers(PeersOptions(given.rows, given.pairs, given.seconds, given.nodes), say)


def _costs_flags(command: argparse.ArgumentParser) -> None:
    add_rows(command, COST_NAMES)
    add_pairs(command, 6)
    command.add_argument("--nodes", type=_NODES, default=10, metavar="N", help="processes (default: 10)")
    add_seconds(command, 6.0, "how long to measure each turn")


def _run_costs(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    from w5xde.bench.suites.costs import CostsOptions, run_costs

    return run_costs(CostsOptions(given.rows, given.pairs, given.seconds, given.nodes), say)


def _scale_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nodes",
        type=several(whole(1, 10_000)),
        default=(10, 100, 1000),
        metavar="N,…",
        help="connections (default: 10,100,1000)",
    )
    add_seconds(command, 10.0, "how long to measure each row")
    command.add_argument(
        "--staleness", type=whole(0, 10**9), metavar="N", help="(default: that of w5xde train)"
    )


def _run_scale(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    from w5xde.bench.suites.scale import ScaleOptions, run_scale

    return run_scale(ScaleOptions(given.nodes, given.seconds, given.staleness), say)


BENCHES: dict[str, Bench] = {
    "learn": Bench(
        "seconds and samples until a loss is reached, beside a plain loop and PyTorch DDP",
        """examples:
  w5xde bench learn                       about ten minutes
  w5xde bench learn --jobs text --rows plain,ddp,sync --plot learn.png
  w5xde bench learn --sizes               batches/s for models of every size""",
        learn_flags,
        run_learn_command,
    ),
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
    "evolution": Bench(
        "the first system's stages, buffers and logging, beside what it reported then",
        """examples:
  w5xde bench evolution
  w5xde bench evolution --studies stages --seconds 30 --plot evolution.png""",
        _evolution_flags,
        _run_evolution,
    ),
    "codecs": Bench(
        "ratio and speed of each codec on real gradients, beside a bare copy",
        """examples:
  w5xde bench codecs
  w5xde bench codecs --plot codecs.png""",
        _codecs_flags,
        _run_codecs,
    ),
    "exchange": Bench(
        "gradients up and parameters down, without compute, beside the loopback and gloo",
        """examples:
  w5xde bench exchange
  w5xde bench exchange --params 25e6 --nodes 2 --optimizer adam     also what the coordinator holds""",
        _exchange_flags,
        _run_exchange,
    ),
    "links": Bench(
        "what each codec makes of slow links; with --rig, who reaches a loss over them with fewest bytes",
        LINKS_EXAMPLES,
        links_flags,
        run_links_command,
    ),
    "peers": Bench(
        "the same jobs on PyTorch DDP and, if installed, Ray, in turns; rows we lose included",
        """examples:
  w5xde bench peers
  w5xde bench peers --rows seed-async,seed-sync --pairs 7 --plot peers.png""",
        _peers_flags,
        _run_peers,
    ),
    "engines": Bench(
        "our pool on Ray beside Ray Train and beside our local pool, in turns; what a killed worker costs",
        ENGINES_EXAMPLES,
        engines_flags,
        run_engines_command,
    ),
    "costs": Bench(
        "what encryption, the checks of updates and an own loop cost, in turns, beside what they may",
        """examples:
  w5xde bench costs                       about fifteen minutes
  w5xde bench costs --rows own-loop-2,own-loop-8      w5xde.Pool beside w5xde.train
  w5xde bench costs --rows tls-sync,tls-async --pairs 4 --plot costs.png""",
        _costs_flags,
        _run_costs,
    ),
    "scale": Bench(
        "updates a second, latency and memory with many connections",
        """examples:
  w5xde bench scale
  w5xde bench scale --nodes 10,1000 --seconds 5 --json""",
        _scale_flags,
        _run_scale,
    ),
}
