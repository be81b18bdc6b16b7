"""Tables and plots of `bench engines`. Computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from w5xde.bench.show.figures import UNKNOWN, count, rate, ratio, seconds
from w5xde.bench.show.layout import rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS_COLOR, THEIRS_COLOR, NOTE_COLOR = "#0072B2", "#999999", "#555555"


def show_engines(out: Console, found: dict[str, Any]) -> None:
    kept = found["pairs"] - found["pairs_dropped"]
    out.print(
        f"[bold]bench engines[/]  on Ray ({found['cluster']}), {kept} pairs of {seconds(found['seconds'])}, "
        "in turns"
    )
    speed = [row for row in found["rows"] if not row["kills"]]
    if speed:
        headings = ["w5xde b/s", "peer b/s", "ratio", "95 %", "asked", "first step", "peer", "ratio", ""]
        out.print(
            rows(["row", "peer", "verdict", "nodes", *headings], [_speed_row(row) for row in speed], words=3)
        )
        out.print("  first step: from starting the command, on a cluster that is running")
    for row in found["rows"]:
        if row["kills"]:
            _show_loss(out, row, found["checkpoint_steps"])
    for row in found["rows"]:
        if row["status"] != "measured":
            out.print(f"  {row['row']}: {row['peer']} is {row['status']}: {row['fix']}", markup=False)


def _speed_row(row: dict[str, Any]) -> list[str]:
    first = row["first_step"]
    return [
        row["title"],
        row["peer"],
        row["verdict"] or row["status"],
        count(row["nodes"]),
        rate(row["batches_per_second"]),
        rate(row["peer_batches_per_second"]),
        ratio(row["ratio"]),
        f"{ratio(row['low'])} – {ratio(row['high'])}" if row["ratio"] is not None else UNKNOWN,
        ratio(row["asked"]),
        seconds(row["first_step_seconds"]),
        seconds(row["peer_first_step_seconds"]),
        ratio(first["ratio"]) if first is not None else UNKNOWN,
        first["verdict"] if first is not None else "",
    ]


def _show_loss(out: Console, row: dict[str, Any], checkpoint_steps: int) -> None:
    out.print(
        f"  [bold]one of {row['nodes']} workers killed[/], {row['title']}, a checkpoint every "
        f"{checkpoint_steps} steps; asked: at most {seconds(row['asked'])} without a step: {row['verdict']}"
    )
    lines = [
        [
            name,
            seconds(row[f"{prefix}step_seconds_before"]),
            seconds(row[f"{prefix}seconds_without_step"]),
            seconds(row[f"{prefix}seconds_without_step_most"]),
            seconds(row[f"{prefix}seconds_behind"]),
            count(row[f"{prefix}samples_again"]),
            f"{row[f'{prefix}runs_over']} of {row[f'{prefix}runs']}",
        ]
        for name, prefix in (("w5xde on Ray", ""), (row["peer"], "peer_"))
    ]
    headings = [
        "a step before",
        "without a step",
        "most",
        "until new steps",
        "samples again",
        "runs that end",
    ]
    out.print(rows(["", *headings], lines))


# --- plots --------------------------------------------------------------------------------------------


def draw_engines(figure: Figure, found: dict[str, Any]) -> None:
    """A panel for each figure, with a pair of bars for each row that has it."""
    panels = {
        "batches/s": "batches_per_second",
        "seconds to the first step": "first_step_seconds",
        "seconds without a step, after a kill": "seconds_without_step",
    }
    drawn = {label: key for label, key in panels.items() if any(key in row for row in found["rows"])}
    for axes, (label, key) in zip(
        figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True
    ):
        _pairs(axes, [row for row in found["rows"] if key in row], key)
        axes.set_xlabel(label, fontsize=8)
    note = "blue: w5xde on Ray; grey: the peer, or our local pool; medians"
    figure.supxlabel(note, fontsize=7, color=NOTE_COLOR, x=0.01, ha="left")


def _pairs(axes: Axes, shown: list[dict[str, Any]], key: str) -> None:
    for at, row in enumerate(shown):
        for place, value, color in (
            (at - 0.2, row[key], OURS_COLOR),
            (at + 0.2, row[f"peer_{key}"], THEIRS_COLOR),
        ):
            axes.barh(place, value or 0.0, 0.35, color=color)
            axes.text(value or 0.0, place, f" {rate(value)}", va="center", fontsize=7)
    axes.set_yticks(range(len(shown)), [f"{row['row']}\nvs {row['peer']}" for row in shown], fontsize=7)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.margins(x=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelsize=7)
