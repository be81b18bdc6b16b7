"""Pictures of benchmarks, one function for each. Drawn into a file, never onto a screen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart also by those who do not see all colours (Okabe and Ito).
OURS, THEIRS, LIMIT, FOURTH = "#0072B2", "#E69F00", "#999999", "#009E73"
WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 8.0, 4.2, 150


def draw(bench: str, found: dict[str, Any], path: Path) -> None:
    """Draw what a benchmark found."""
    from matplotlib.figure import Figure

    # Without pyplot: no window system is looked for, a file is drawn with Agg.
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    _DRAW[bench](figure, found)
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


_DRAW: dict[str, Callable[[Figure, dict[str, Any]], None]] = {
    "seed": draw_seed,
}
