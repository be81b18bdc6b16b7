"""`bench links` as a command: its flags, and the suite that they choose. Loads no torch for its help text."""

from __future__ import annotations

import argparse
from typing import Any

from w5xde.bench.flags import compression, number, several, whole
from w5xde.bench.progress import Say
from w5xde.bench.rig.entrants import DEFAULT, NAMES, entrant

CODEC_RATES, RIG_RATES = (1000.0, 100.0, 10.0), (10.0,)
CODEC_PARAMS, RIG_PARAMS, UTILISATION_PARAMS = 1_000_000, 100_000, 1_000_000
CODEC_SECONDS, UTILISATION_SECONDS = 6.0, 120.0
MILLISECONDS = 1000

LINKS_EXAMPLES = """examples:
  w5xde bench links                       a quarter of an hour, most of it at 10 Mbit/s
  w5xde bench links --rates 100 --codec none --codec zstd:1 --codec auto

with --rig, as root on Linux: hosts in network namespaces, behind links of a rate and a delay
  w5xde bench links --rig --contestants ddp,ours-sync,diloco-50 --budget 300 --seeds 1
  w5xde bench links --rig --rates 10,100 --delay 50 --plot links.png         hours
  w5xde bench links --rig --rates 1000 --delay 0 --contestants diloco-50@0.003,diloco-50@0.006
  w5xde bench links --rig --utilisation --nodes 4 --paced 400"""


def links_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--rates",
        type=several(number(0.1, 100_000.0)),
        metavar="MBIT,…",
        help="what each link carries in a second, each way (default: 1000,100,10; with --rig: 10)",
    )
    command.add_argument(
        "--params", type=whole(1000, 10**8), metavar="N", help="(default: 1e6; with --rig: 1e5)"
    )
    command.add_argument("--nodes", type=whole(1, 64), default=2, metavar="N", help="(default: 2)")
    command.add_argument(
        "--seconds",
        type=number(0.2, 3600.0),
        metavar="X",
        help="how long to measure each turn, and at least a step (default: 6; with --utilisation: 120)",
    )
    command.add_argument(
        "--codec",
        type=compression,
        action="append",
        metavar="SPEC",
        help="as --compress of w5xde train; may be given several times (default: eight of them)",
    )
    _rig_flags(command.add_argument_group("with --rig"))


def _rig_flags(group: Any) -> None:
    group.add_argument(
        "--rig",
        action="store_true",
        help="instead: seconds and bytes until a loss is reached, beside PyTorch's ways to send less",
    )
    group.add_argument(
        "--delay",
        type=number(0.0, 1000.0),
        default=50.0,
        metavar="MS",
        help="how long a packet takes from any host to any other (default: 50)",
    )
    group.add_argument(
        "--contestants",
        type=several(entrant),
        default=DEFAULT,
        metavar="NAME,…",
        help=f"some of {', '.join(NAMES)}; NAME@RATE has another learning rate (default: all but torchft)",
    )
    group.add_argument(
        "--seeds", type=whole(1, 100), default=3, metavar="N", help="runs of each contestant (default: 3)"
    )
    group.add_argument(
        "--budget",
        type=whole(60, 10**6),
        default=2000,
        metavar="N",
        help="steps of a plain loop; the target is its loss after 70 %% of them (default: 2000)",
    )
    group.add_argument(
        "--patience",
        type=number(1.0, 100_000.0),
        default=900.0,
        metavar="X",
        help="seconds after which a contestant gives up (default: 900)",
    )
    group.add_argument(
        "--utilisation",
        action="store_true",
        help="instead: the share of the time in which nodes compute, for 1e6 parameters",
    )
    group.add_argument(
        "--paced",
        type=number(1.0, 60_000.0),
        metavar="MS",
        help="with --utilisation: sleep after each batch until so long has passed, for more nodes than cores",
    )


def run_links_command(given: argparse.Namespace, say: Say) -> dict[str, Any]:
    if not given.rig:
        from w5xde.bench.suites.links import LinksOptions, run_links

        chosen = {"codecs": tuple(given.codec)} if given.codec else {}
        options = LinksOptions(
            given.rates or CODEC_RATES,
            given.params or CODEC_PARAMS,
            given.nodes,
            given.seconds or CODEC_SECONDS,
            **chosen,
        )
        return run_links(options, say)
    from w5xde.bench.rig.namespaces import SlowLink

    links = tuple(SlowLink(rate, given.delay) for rate in given.rates or RIG_RATES)
    if given.utilisation:
        from w5xde.bench.rig.utilisation import UtilisationOptions, run_utilisation

        return run_utilisation(
            UtilisationOptions(
                links,
                given.contestants,
                nodes=given.nodes,
                parameters=given.params or UTILISATION_PARAMS,
                seeds=given.seeds,
                seconds=given.seconds or UTILISATION_SECONDS,
                paced_seconds=(given.paced or 0.0) / MILLISECONDS,
            ),
            say,
        )
    from w5xde.bench.rig.suite import RigOptions, run_rig

    return run_rig(
        RigOptions(
            links,
            given.contestants,
            nodes=given.nodes,
            parameters=given.params or RIG_PARAMS,
            seeds=given.seeds,
            budget=given.budget,
            patience_seconds=given.patience,
        ),
        say,
    )
