"""Plots of benchmark results, one function for each benchmark. Writes files, never to a screen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w5xde.bench.show import engine_runs, slow_links

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
OURS, THEIRS, LIMIT, FOURTH = "#0072B2", "#E69F00", "#999999", "#009E73"
WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 8.0, 4.2, 150


def draw(found: dict[str, Any], path: Path) -> None:
    """Plot the results of a benchmark into a file."""
    from matplotlib.figure import Figure

    # Without pyplot, so that matplotlib looks for no window system and draws with Agg.
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    _DRAW[found["bench"]](figure, found)
    figure.savefig(path, dpi=DOTS_PER_INCH, format="png")


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)


def _bars(axes: Axes, names: list[str], values: list[float], colors: list[str], label: str) -> None:
    """Horizontal bars with their values written at their ends."""
    bars = axes.barh(range(len(names)), values, color=colors, height=0.65)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.bar_label(bars, labels=[f" {value:,.0f}" if value >= 10 else f" {value:.2f}" for value in values])
    axes.set_xlabel(label)
    axes.margins(x=0.15)
    _tidy(axes)


def _footnote(figure: Figure, lines: list[str]) -> None:
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=7, color="#555555", x=0.01, ha="left")


def draw_learn(figure: Figure, found: dict[str, Any]) -> None:
    """How many times sooner than the plain loop each contestant was, one panel for each job."""
    panels = figure.subplots(1, len(found["jobs"]), sharey=True, squeeze=False)[0]
    for axes, job in zip(panels, found["jobs"], strict=True):
        for at, row in enumerate(job["rows"]):
            found_at = row["speed_up"]
            if not found_at["median"]:
                axes.text(0.02, at, "not reached", fontsize=7, va="center", color="#555555")
                continue
            is_ours = row["settings"] is not None
            color = OURS if is_ours and found_at["median"] >= 1 else THEIRS if is_ours else LIMIT
            axes.barh(at, found_at["median"], 0.65, color=color)
            axes.plot([found_at["low"], found_at["high"]], [at, at], color="#333333", linewidth=1)
            axes.text(found_at["high"], at, f" {found_at['median']:.2f}", va="center", fontsize=7)
        axes.axvline(1.0, color=LIMIT, linestyle="--")
        axes.set_yticks(range(len(job["rows"])), [row["title"] for row in job["rows"]], fontsize=7)
        axes.set_title(f"{job['job']}, {job['nodes']} nodes", fontsize=9)
        axes.margins(x=0.25)
        _tidy(axes)
    panels[0].set_ylim(len(found["jobs"][0]["rows"]) - 0.5, -0.5)
    figure.supxlabel(
        f"times sooner than a plain loop, medians and ranges of {found['seeds']} seeds", fontsize=8
    )


def draw_sizes(figure: Figure, found: dict[str, Any]) -> None:
    """Our batches/s over theirs against the size, a line for each number of tensors: a valley would show."""
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"one_node": "one node over a plain loop", "two_nodes": "two nodes over DDP/gloo"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for at, tensors in enumerate(dict.fromkeys(row["tensors"] for row in found["rows"])):
            chosen = [row for row in found["rows"] if row["tensors"] == tensors]
            axes.plot(
                [row["parameters"] for row in chosen],
                [row[key]["ratio"] for row in chosen],
                color=(OURS, THEIRS, FOURTH, LIMIT)[at % 4],
                marker="osD^"[at % 4],
                label=f"{tensors} tensors",
            )
        axes.axhline(1.0, color=LIMIT, linestyle="--")
        axes.set_xscale("log")
        axes.set_xlabel("parameters")
        axes.set_title(title, fontsize=9)
        _tidy(axes)
    panels[0].set_ylabel("our batches/s over theirs")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=8)


def draw_seed(figure: Figure, found: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    _bars(
        left,
        ["w5xde", "limit"],
        [found["batches_per_second"], found["limit_batches_per_second"]],
        [OURS, LIMIT],
        "batches/s",
    )
    left.set_title(f"{found['limit_ratio']:.2f} of what the machine allows")
    names = sorted(found["batches_per_node"], key=lambda name: (len(name), name))
    shares = [found["batches_per_node"][name] for name in names]
    _bars(right, names, shares, [OURS] * len(names), "batches applied")
    right.set_title(f"{found['nodes']} nodes, {found['mode']}")


def draw_evolution(figure: Figure, found: dict[str, Any]) -> None:
    rows = [row for row in found["rows"] if row["study"] == "stages"] or found["rows"]
    axes = figure.subplots()
    places = range(len(rows))
    then = [row["then"]["batches_per_second"] or 0.0 for row in rows]
    now = [row["batches_per_second"] or 0.0 for row in rows]
    shown = [
        (axes.barh([at - 0.2 for at in places], then, 0.38, color=THEIRS, label="reported then"), then),
        (axes.barh([at + 0.2 for at in places], now, 0.38, color=OURS, label="measured now, applied"), now),
    ]
    for bars, values in shown:
        axes.bar_label(bars, labels=[f" {value:,.0f}" if value else "" for value in values])
    axes.set_yticks(list(places), [row["stage"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("batches/s")
    axes.margins(x=0.12)
    axes.legend(frameon=False)
    _tidy(axes)


def draw_codecs(figure: Figure, found: dict[str, Any]) -> None:
    """A line for each codec: ratio on the left, speed on the right, a mark for each kind of data."""
    left, right = figure.subplots(1, 2, sharey=True)
    codecs = list(dict.fromkeys(row["codec"] for row in found["rows"]))
    kinds = list(dict.fromkeys(row["data"] for row in found["rows"]))
    for at, kind in enumerate(kinds):
        chosen = [row for row in found["rows"] if row["data"] == kind]
        places = [codecs.index(row["codec"]) for row in chosen]
        look: dict[str, Any] = {"color": (OURS, THEIRS, FOURTH, LIMIT)[at % 4], "marker": "osD^"[at % 4]}
        left.plot([row["ratio"] for row in chosen], places, linestyle="", label=kind, **look)
        right.plot([row["encode_bytes_per_second"] / 1e9 for row in chosen], places, linestyle="", **look)
    right.axvline(found["memcpy_bytes_per_second"] / 1e9, color=LIMIT, linestyle="--", label="a bare copy")
    right.set_xscale("log")
    right.xaxis.set_major_formatter("{x:g}")
    left.set_yticks(range(len(codecs)), codecs, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("compression ratio")
    right.set_xlabel("encoding, GB/s of raw data")
    for axes in (left, right):
        axes.grid(axis="y", color="#EEEEEE")
        axes.legend(frameon=False, fontsize=8)
        _tidy(axes)


def draw_exchange(figure: Figure, found: dict[str, Any]) -> None:
    """Each row relative to a plain stream, so that model sizes can be compared."""
    axes = figure.subplots()
    rows = found["rows"]
    names = [f"{row['parameters'] / 1e6:g}M, {row['nodes']} nodes, {row['road']}" for row in rows]
    places = range(len(rows))
    ours = [row["limit_ratio"] or 0.0 for row in rows]
    gloo = [row["gloo_exchanges_per_second"] / row["limit_exchanges_per_second"] for row in rows]
    for offset, values, color, label in ((-0.2, ours, OURS, "w5xde"), (0.2, gloo, THEIRS, "gloo all-reduce")):
        bars = axes.barh([at + offset for at in places], values, 0.38, color=color, label=label)
        axes.bar_label(bars, labels=[f" {value:.2f}" for value in values])
    axes.axvline(1.0, color=LIMIT, linestyle="--")
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.set_xlabel("exchanges/s over those of a bare stream on the same road, to and from one place")
    axes.margins(x=0.1)
    axes.legend(frameon=False)
    _tidy(axes)


def draw_links(figure: Figure, found: dict[str, Any]) -> None:
    """Each codec relative to none, so that links of every speed fit one plot."""
    axes = figure.subplots()
    links = found["rows"]
    codecs = list(links[0]["batches_per_second"])
    height = 0.8 / len(links)
    for number, link in enumerate(links):
        speeds = link["batches_per_second"]
        raw = speeds.get("none") or max(speeds.values())
        values = [speeds[codec] / raw for codec in codecs]
        places = [at + (number - (len(links) - 1) / 2) * height for at in range(len(codecs))]
        color = (OURS, THEIRS, FOURTH, LIMIT)[number % 4]
        bars = axes.barh(
            places, values, 0.9 * height, color=color, label=f"{link['mbit_per_second']:g} Mbit/s"
        )
        axes.bar_label(bars, labels=[f" {value:.2f}" for value in values], fontsize=7)
    axes.axvline(1.0, color=LIMIT, linestyle="--")
    axes.set_yticks(range(len(codecs)), codecs)
    axes.invert_yaxis()
    axes.set_xlabel("batches/s over those without compression")
    axes.margins(x=0.1)
    axes.legend(frameon=False)
    _tidy(axes)


def draw_peers(figure: Figure, found: dict[str, Any]) -> None:
    axes = figure.subplots()
    rows = [row for row in found["rows"] if row["status"] == "measured"]
    missing = [row for row in found["rows"] if row["status"] != "measured"]
    for at, row in enumerate(rows):
        color = {"ahead": OURS, "behind": THEIRS}.get(row["verdict"], LIMIT)
        axes.plot([row["low"], row["high"]], [at, at], color=color, linewidth=2)
        axes.plot(row["ratio"], at, "o", color=color)
        place = (row["ratio"], at)
        text = f"{row['ratio']:.2f}× {row['verdict']}"
        axes.annotate(text, place, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.axvline(1.0, color=LIMIT, linestyle="--")
    axes.set_yticks(range(len(rows)), [f"{row['title']}\nvs {row['peer']}" for row in rows])
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlabel("our batches/s over theirs, median and 95 % interval")
    axes.margins(x=0.15)
    # A digit for every line would not be readable over several decades.
    low, high = axes.get_xlim()
    ticks = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)]
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:g}")
    _tidy(axes)
    _footnote(figure, [f"{row['title']} vs {row['peer']}: {row['status']}" for row in missing])


def draw_costs(figure: Figure, found: dict[str, Any]) -> None:
    axes = figure.subplots()
    rows = found["rows"]
    for at, row in enumerate(rows):
        color = {"kept": OURS, "missed": THEIRS}.get(row["verdict"], LIMIT)
        axes.plot([100 * row["cost_low"], 100 * row["cost_high"]], [at, at], color=color, linewidth=2)
        axes.plot(100 * row["cost"], at, "o", color=color)
        axes.plot([100 * row["asked"]] * 2, [at - 0.3, at + 0.3], color=LIMIT, linestyle="--")
        text = f"{100 * row['cost']:.1f} %, asked {100 * row['asked']:g} %: {row['verdict']}"
        place = (100 * row["cost"], at)
        axes.annotate(text, place, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.axvline(0.0, color=LIMIT, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['title']}\nvs {row['without']}" for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("cost in % of batches/s, median and 95 % interval; dashed: what was asked")
    axes.margins(x=0.15)
    _tidy(axes)


def draw_scale(figure: Figure, found: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    nodes = [row["nodes"] for row in found["rows"]]
    left.plot(nodes, [row["updates_per_second"] for row in found["rows"]], "o-", color=OURS)
    left.set_ylabel("updates/s")
    left.set_ylim(0, 1.15 * max(row["updates_per_second"] for row in found["rows"]) or 1.0)
    for key, label, color, marker in (
        ("latency_p50_seconds", "median", OURS, "o"),
        ("latency_p99_seconds", "1 in 100 is longer", THEIRS, "s"),
    ):
        known = [(row["nodes"], 1e3 * row[key]) for row in found["rows"] if row[key] is not None]
        right.plot(*zip(*known, strict=True), marker=marker, color=color, label=label)
    right.set_ylabel("from an update to the next work, ms")
    right.set_yscale("log")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(nodes, [f"{count:,}" for count in nodes])
        axes.minorticks_off()
        axes.set_xlabel("connections")
        _tidy(axes)


_DRAW: dict[str, Callable[[Figure, dict[str, Any]], None]] = {
    "learn": draw_learn,
    "sizes": draw_sizes,
    "seed": draw_seed,
    "evolution": draw_evolution,
    "codecs": draw_codecs,
    "exchange": draw_exchange,
    "links": draw_links,
    "rig": slow_links.draw_rig,
    "utilisation": slow_links.draw_utilisation,
    "peers": draw_peers,
    "engines": engine_runs.draw_engines,
    "costs": draw_costs,
    "scale": draw_scale,
}
