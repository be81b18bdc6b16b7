"""Tables and plots of `bench links --rig`. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from w5xde.bench.show.figures import (
    UNKNOWN,
    count,
    least_and_most,
    loss,
    percent,
    ratio,
    seconds,
    size,
    times,
)
from w5xde.bench.show.layout import rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS_COLOR, THEIRS_COLOR, NOTE_COLOR = "#0072B2", "#999999", "#555555"
# Beyond this ratio of the largest to the least, only powers of ten are written at an axis.
FEW_DECADES = 300
BYTE_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
Shown = Callable[[float | None], str]


def show_rig(out: Console, found: dict[str, Any]) -> None:
    out.print(
        f"[bold]bench links --rig[/]  {count(found['parameters'])} parameters, {found['nodes']} nodes, "
        f"batches of {found['batch_size']}; medians of {found['seeds']} seeds; the target is the loss of a "
        f"plain loop on held-out text after 70 % of {count(found['budget_batches'])} steps"
    )
    for link in found["rows"]:
        _show_link(out, link)
        out.print(
            f"  targets {', '.join(map(loss, link['targets']))}; {_plain_text(link['plain'])}; delaying the "
            f"packets took {percent(link['carrier_part'])} of a core"
        )
        headings = ["reached", "seconds", "range", "samples", "bytes", "a sample", "computing"]
        out.print(rows(["", *headings], [_figures_row(row, found["seeds"]) for row in link["contestants"]]))
        best = link["best_peers"]
        bases = ["sooner than DDP", "than our sync", f"than {best['seconds']}"]
        bases += ["fewer bytes than DDP", "than our sync", f"than {best['bytes_moved']}"]
        out.print(rows(["", *bases], [_ratios_row(row) for row in link["contestants"]]))
    out.print(
        "  bytes: on all nodes' links, both ways, from joining on; every host has its own copy of the data"
    )
    out.print("  the last columns are the best peer's; a ratio below 1 is a race that was lost")
    out.print(
        f"  a contestant gives up after {seconds(found['patience_seconds'])}: then > is the least it can be"
    )
    out.print("  computing: CPU time in forward, backward and optimizer, as a share of all time")


def _plain_text(plain: dict[str, Any]) -> str:
    return (
        f"the plain loop, without a network: {seconds(plain['seconds'])}, {count(plain['samples'])} samples"
    )


def _show_link(out: Console, link: dict[str, Any]) -> None:
    check = link["check"]
    rates = least_and_most(
        [*check["up_mbit_per_second"], *check["down_mbit_per_second"]], lambda rate: f"{rate or 0:.2f}"
    )
    delays = least_and_most(check["delays_ms"], lambda delay: f"{delay or 0:.1f}")
    out.print(
        f"  [bold]{link['mbit_per_second']:g} Mbit/s each way, {link['delay_ms']:g} ms between any two "
        f"hosts[/] (measured before: {rates} Mbit/s, {delays} ms); the nodes' links are slow, the "
        "coordinator's host has one for each of them"
    )


def _spread(found: dict[str, Any], shown: Shown) -> str:
    return least_and_most([found["low"], found["high"]], shown)


def _figures_row(row: dict[str, Any], seeds: int) -> list[str]:
    return [
        row["title"],
        f"{row['reached']} of {seeds}",
        seconds(row["seconds"]),
        least_and_most(row["each"]["seconds"], seconds),
        count(row["samples"]),
        size(row["bytes_moved"]),
        size(row["bytes_per_sample"]["median"]),
        percent(row["utilisation"]["median"]),
    ]


def _ratios_row(row: dict[str, Any]) -> list[str]:
    bases = ("ddp", "ours_sync", "best_peer")
    found = [
        over_text(row[f"over_{base}"][metric]) for metric in ("seconds", "bytes_moved") for base in bases
    ]
    return [row["title"], *found]


def over_text(found: dict[str, Any]) -> str:
    """A ratio with its range; 0 means that the row did not reach the target."""
    if not found["median"]:
        return UNKNOWN
    text = times(found["median"])
    if found["low"] != found["high"]:
        text += f" ({ratio(found['low'])}–{ratio(found['high'])})"
    return f"> {text}" if found["is_a_bound"] else text


def show_utilisation(out: Console, found: dict[str, Any]) -> None:
    out.print(
        f"[bold]bench links --rig --utilisation[/]  {count(found['parameters'])} parameters, "
        f"{found['nodes']} nodes, batches of {found['batch_size']}; medians of {found['seeds']} turns of "
        f"{seconds(found['seconds'])}"
    )
    for link in found["rows"]:
        _show_link(out, link)
        headings = ["computing", "range", "samples/s", "bytes a sample"]
        lines = [
            [
                row["title"],
                percent(row["utilisation"]["median"]),
                _spread(row["utilisation"], percent),
                count(row["samples_per_second"]["median"]),
                size(row["bytes_per_sample"]["median"]),
            ]
            for row in link["contestants"]
        ]
        out.print(rows(["", *headings], lines))
    out.print(f"  computing: {computing_text(found)}")


def computing_text(found: dict[str, Any]) -> str:
    """What counts as computing."""
    if not found["paced_seconds"]:
        return "CPU time in forward, backward and optimizer, as a share of all time"
    return (
        f"PACED: each batch sleeps after its computation until {seconds(found['paced_seconds'])} are over, "
        f"so that {found['nodes']} nodes on {found['machine']['cores']} cores are as so many machines; the "
        "share is that of these times. Not a training result"
    )


# --- plots --------------------------------------------------------------------------------------------


def draw_rig(figure: Figure, found: dict[str, Any]) -> None:
    """Seconds and bytes until the target for each contestant, a line of panels for each kind of link."""
    links = found["rows"]
    # Space for every name.
    figure.set_figheight(max(4.2, sum(0.9 + 0.26 * len(link["contestants"]) for link in links)))
    panels = figure.subplots(len(links), 2, squeeze=False, sharey="row")
    for (left, right), link in zip(panels, links, strict=True):
        _points(left, link["contestants"], "seconds", seconds)
        _points(right, link["contestants"], "bytes_moved", size)
        left.set_xlabel("seconds to the target", fontsize=8)
        right.set_xlabel("bytes on the nodes' links to the target", fontsize=8)
        left.set_title(
            f"{link['mbit_per_second']:g} Mbit/s, {link['delay_ms']:g} ms, {found['nodes']} nodes", fontsize=9
        )
    note = f"medians and ranges of {found['seeds']} seeds, {found['parameters']:,} parameters; less is better"
    figure.supxlabel(note, fontsize=7, color=NOTE_COLOR, x=0.01, ha="left")


def _points(axes: Axes, contestants: list[dict[str, Any]], metric: str, shown: Shown) -> None:
    for at, row in enumerate(contestants):
        known = [value for value in row["each"][metric] if value is not None]
        color = OURS_COLOR if row["settings"] is not None else THEIRS_COLOR
        if row[metric] is None:
            axes.text(0.02, at, "not reached", transform=axes.get_yaxis_transform(), fontsize=7, va="center")
            continue
        axes.plot([min(known), max(known)], [at, at], color=color, linewidth=2)
        axes.plot(row[metric], at, "o", color=color)
        place = (max(known), at)
        axes.annotate(
            shown(row[metric]), place, xytext=(6, 0), textcoords="offset points", va="center", fontsize=7
        )
    axes.set_xscale("log")
    axes.margins(x=0.25)
    low, high = axes.get_xlim()
    # A digit for every line would not be readable over several decades.
    digits = (1, 2, 5) if high < FEW_DECADES * low else (1,)
    ticks = [digit * 10.0**power for power in range(13) for digit in digits]
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda tick, _: tick_text(tick, metric))
    axes.set_yticks(range(len(contestants)), [row["title"] for row in contestants], fontsize=7)
    axes.set_ylim(len(contestants) - 0.5, -0.5)
    axes.grid(axis="x", color="#EEEEEE")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelsize=7)


def tick_text(tick: float, metric: str) -> str:
    """A round number with its unit."""
    if metric == "seconds":
        return f"{tick:,g} s"
    unit, name = next((pair for pair in BYTE_UNITS if tick >= pair[0]), (1, "B"))
    return f"{tick / unit:g} {name}"


def draw_utilisation(figure: Figure, found: dict[str, Any]) -> None:
    """The share of the time in which nodes compute, a panel for each kind of link."""
    links = found["rows"]
    panels = figure.subplots(1, len(links), squeeze=False, sharey=True)[0]
    for axes, link in zip(panels, links, strict=True):
        contestants = link["contestants"]
        for at, row in enumerate(contestants):
            share = row["utilisation"]
            color = OURS_COLOR if row["settings"] is not None else THEIRS_COLOR
            axes.barh(at, 100 * share["median"], 0.65, color=color)
            axes.plot([100 * share["low"], 100 * share["high"]], [at, at], color="#333333", linewidth=1)
            axes.text(100 * share["high"], at, f" {100 * share['median']:.0f} %", va="center", fontsize=7)
        axes.set_yticks(range(len(contestants)), [row["title"] for row in contestants], fontsize=7)
        axes.set_ylim(len(contestants) - 0.5, -0.5)
        axes.set_xlim(0, 115)
        axes.set_title(f"{link['mbit_per_second']:g} Mbit/s, {link['delay_ms']:g} ms", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0, labelsize=7)
    pace = f"; paced: a batch takes {seconds(found['paced_seconds'])}" if found["paced_seconds"] else ""
    note = (
        f"% of the time in which a node computes, {found['nodes']} nodes, {found['parameters']:,} parameters"
    )
    figure.supxlabel(note + pace, fontsize=8)
