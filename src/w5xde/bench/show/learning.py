"""Tables of `bench learn` for the terminal. Computes nothing."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from w5xde.bench.show.figures import UNKNOWN, count, loss, rate, ratio, seconds, times
from w5xde.bench.show.layout import rows

NOT_REACHED = "not reached"


def show_learn(out: Console, found: dict[str, Any]) -> None:
    out.print(
        f"[bold]bench learn[/]  medians of {found['seeds']} seeds; the target is the loss of the plain loop "
        "after 70 % of its budget"
    )
    for job in found["jobs"]:
        targets = ", ".join(loss(target) for target in job["targets"])
        out.print(
            f"  [bold]{job['title']}[/], batches of {job['batch_size']}, {job['nodes']} nodes; "
            f"target {targets}"
        )
        headings = ["seconds", "samples", "sooner than plain", "range", "than DDP", "effective b/s"]
        out.print(rows(["", *headings], [_learn_row(row, found["seeds"]) for row in job["rows"]]))
    out.print("  effective b/s: batches that the plain loop needs to the target, for each second of the row")
    out.print("  not counted: starting processes, importing, building models, reading the loops' batches")


def _learn_row(row: dict[str, Any], seeds: int) -> list[str]:
    spread, over_ddp = row["speed_up"], times(row["over_ddp"]["median"])
    if row["seconds"] is None:
        return [row["title"], f"{NOT_REACHED} ({row['reached']} of {seeds})", *[UNKNOWN] * 5]
    return [
        row["title"],
        seconds(row["seconds"]),
        count(row["samples"]),
        times(spread["median"]),
        f"{times(spread['low'])} – {times(spread['high'])}",
        f"> {over_ddp}" if row["over_ddp_is_a_bound"] else over_ddp,
        rate(row["effective_batches_per_second"]),
    ]


def show_sizes(out: Console, found: dict[str, Any]) -> None:
    out.print(
        f"[bold]bench learn --sizes[/]  batches of {found['batch_size']}, {found['pairs']} pairs of "
        f"{seconds(found['seconds'])}, in turns; batches/s"
    )
    out.print(
        rows(
            [
                "parameters",
                "tensors",
                "one node, 1 a step",
                "plain loop",
                "ratio",
                "two nodes, 2 a step",
                "DDP/gloo",
                "ratio",
            ],
            [
                [
                    count(row["parameters"]),
                    count(row["tensors"]),
                    rate(row["one_node"]["batches_per_second"]),
                    rate(row["one_node"]["peer_batches_per_second"]),
                    ratio(row["one_node"]["ratio"]),
                    rate(row["two_nodes"]["batches_per_second"]),
                    rate(row["two_nodes"]["peer_batches_per_second"]),
                    ratio(row["two_nodes"]["ratio"]),
                ]
                for row in found["rows"]
            ],
            words=0,
        )
    )
