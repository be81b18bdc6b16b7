"""The panels of the live display: how far a run is, how fast, and what each machine does.

Every panel fits the width that it is given: what matters least is left out, and nothing is wrapped. Draws
what the status of a run says; knows no terminal and no coordinator.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from w5xde.cli.screen.machines import MachineRow, machine_rows
from w5xde.cli.units import bytes_text, duration_text, number_text
from w5xde.config import Settings
from w5xde.learn.job.named_job import FROM_PYTHON
from w5xde.sanitize import harmless

if TYPE_CHECKING:
    from w5xde.callbacks.evaluation import Evaluation
    from w5xde.callbacks.status import RunStatus

# Longer lists say how many rows they leave out.
NODES_SHOWN = 20
BAR_CELLS_MIN, BAR_CELLS_MAX = 10, 30
# Between two parts of a line.
GAP = 2
# Names and devices are the nodes' own words.
NAME_CELLS_MAX, DEVICE_CELLS_MAX = 28, 24


@dataclass(frozen=True, slots=True)
class LinePart:
    """A part of a line, and its rank: parts of higher rank are left out first."""

    rank: int
    text: str
    style: str = ""


def fitting(parts: Sequence[LinePart], width: int, gap: int = GAP) -> list[LinePart]:
    """The parts that fit into a line, in their order; the first of all always stays."""
    kept = list(parts)
    while len(kept) > 1 and sum(cell_len(part.text) for part in kept) + gap * (len(kept) - 1) > width:
        kept.remove(max(reversed(kept), key=lambda part: part.rank))
    return kept


def progress(status: RunStatus, width: int) -> Table:
    """How far the run is, in one row."""
    done = status.done
    of_all = f"/{status.epochs_total}" if status.epochs_total else ""
    bar = LinePart(3, " " * BAR_CELLS_MIN)
    parts = [LinePart(0, f"epoch {status.epoch}{of_all}")]
    if done is not None:
        parts += [bar, LinePart(2, f"{done:4.0%}")]
    parts += [LinePart(2, f"step {status.step:,}"), LinePart(7, f"({status.durable_steps:,} saved)")]
    if status.loss is not None:
        parts.append(LinePart(1, f"loss {status.loss:.4f}", "bold"))
    if status.evaluation:
        parts.append(LinePart(4, evaluation_text(status.evaluation), "bold green"))
    if status.seconds_left is not None:
        parts.append(LinePart(2, f"{duration_text(status.seconds_left)} left"))
    kept = fitting(parts, width)
    room = width - sum(cell_len(part.text) for part in kept) - GAP * (len(kept) - 1)
    row = Table.grid(padding=(0, GAP), expand=False)
    cells = min(BAR_CELLS_MAX, BAR_CELLS_MIN + max(0, room))
    row.add_row(
        *(
            ProgressBar(total=1.0, completed=done or 0.0, width=cells)
            if part is bar
            else Text(part.text, style=part.style, no_wrap=True)
            for part in kept
        )
    )
    return row


def evaluation_text(evaluation: Evaluation) -> str:
    """What an evaluation found, and after which step."""
    step = f" at step {evaluation.step:,}" if evaluation.step is not None else ""
    return f"evaluation: {evaluation}{step}"


def from_here(path: Path) -> Path:
    """A path as seen from the current folder, if it is below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def reach_text(host: str) -> str:
    """Which machines can join at this address, if not all."""
    if host in ("127.0.0.1", "localhost", "::1"):
        return "  (only this machine; others: --host 0.0.0.0)"
    return ""


def page_text(address: str) -> str:
    """Where the page of a run is."""
    return f"  page:     {address}" if address else "the page could not be started; try  w5xde show"


def resume_line(folder: Path, job_name: str) -> str:
    """How to go on with a run that was stopped before it was over."""
    if job_name == FROM_PYTHON:
        return f"  to go on:  w5xde.train(job, resume={str(from_here(folder))!r})"
    runs = str(from_here(folder.parent))
    elsewhere = f" --runs {shlex.quote(runs)}" if runs != Settings().runs else ""
    return f"  to go on:  w5xde train --resume {shlex.quote(folder.name)}{elsewhere}"


def learned_lines(summary: dict[str, Any], folder: Path) -> Iterator[str]:
    """What a run has learned."""
    if summary["loss_first"] is not None:
        found = ", ".join(f"{key} {value:.4g}" for key, value in summary["metrics"].items())
        measured = f"   evaluation: {found}" if found else ""
        average = f" (average {summary['loss_average']:.4f})"
        yield f"  loss {summary['loss_first']:.4f} → {summary['loss_last']:.4f}{average}{measured}"
    step = summary["metrics_step"]
    if step is not None and step != summary["weights_step"]:
        yield f"  measured on the weights of step {step:,}"
    if summary["best"] is not None:
        best = summary["best"]
        file = from_here(folder / best["file"])
        yield f"  best {best['metric']} {best['value']:.4g} after step {best['step']:,}, in  {file}"
    if summary["evaluations_skipped"]:
        skipped = number_text(summary["evaluations_skipped"], "evaluation")
        yield f"  {skipped} skipped, because the one before was still under way (--evaluate wait)"


def exported_text(written: dict[str, Any]) -> str:
    """What was exported, and where to."""
    best = f", with the best {written['metric']} {written['value']:.4g}," if "metric" in written else ""
    return (
        f"weights of {written['run']} after {written['steps']:,} steps{best} in {written['file']} "
        f"({bytes_text(written['bytes'])}, sha256 of weights {written['weights_sha256'][:16]}…)"
    )


def rates(status: RunStatus, width: int | None = None) -> str:
    """How fast the run is, in one line; without a width, all that is known."""
    parts = [
        LinePart(0, f"{status.samples_per_second:,.0f} samples/s"),
        LinePart(1, f"{status.batches_per_second:,.1f} batches/s"),
        LinePart(3, f"out {bytes_text(status.sent_per_second)}/s"),
        LinePart(3, f"in {bytes_text(status.received_per_second)}/s"),
    ]
    if (status.compression_ratio or 1.0) > 1.005:
        parts.append(LinePart(5, f"{status.compression_ratio:.2f}× smaller"))
    if status.mode == "async":
        parts.append(LinePart(2, f"{status.staleness_mean:.1f} updates late"))
    if status.mode == "rounds":
        parts.append(LinePart(2, f"{status.rounds:,} rounds, now of {status.round_steps} steps"))
        if status.bytes_per_sample is not None:
            parts.append(LinePart(4, f"{bytes_text(status.bytes_per_sample)} a sample"))
    if status.learning_rate is not None:
        parts.append(LinePart(4, f"lr {status.learning_rate:.3g}"))
    if status.memory_pss_bytes:
        parts.append(LinePart(6, f"memory {bytes_text(status.memory_pss_bytes)}"))
    return ", ".join(part.text for part in (parts if width is None else fitting(parts, width)))


@dataclass(frozen=True, slots=True)
class _TableColumn:
    """A column of the table of machines; columns of higher rank are left out first."""

    heading: str
    rank: int
    cell: Callable[[MachineRow], str]
    is_text: bool = False


_COLUMNS = [
    _TableColumn("machine", 0, lambda row: _cut(row.name, NAME_CELLS_MAX), is_text=True),
    _TableColumn("device", 6, lambda row: _cut(row.device, DEVICE_CELLS_MAX), is_text=True),
    _TableColumn("state", 2, lambda row: row.state, is_text=True),
    _TableColumn("batches/s", 1, lambda row: f"{row.batches_per_second:,.1f}"),
    _TableColumn("share", 3, lambda row: f"{row.share:.0%}"),
    _TableColumn("loss", 5, lambda row: f"{row.loss:.4f}" if row.loss is not None else "-"),
    _TableColumn("computes", 4, lambda row: f"{row.computing:.0%}"),
    _TableColumn("waits", 7, lambda row: f"{row.waiting:.0%}"),
    _TableColumn("network", 8, lambda row: f"{bytes_text(row.network_per_second)}/s"),
]


def machine_table(
    status: RunStatus, width: int, *, rows_max: int = NODES_SHOWN, each_node: bool = False
) -> Text:
    """What each machine does, or with `each_node` what each node does: a line for each, below headings."""
    rows = machine_rows(status.nodes, each_node=each_node)
    shown = rows if len(rows) <= rows_max else rows[: max(1, rows_max - 1)]
    lines: dict[str, list[str]] = {
        each.heading: [each.heading, *(each.cell(row) for row in shown)] for each in _COLUMNS
    }
    if each_node:
        lines["machine"][0] = "node"
    cells = {heading: max(map(cell_len, column)) for heading, column in lines.items()}
    # A part stands for a column here, and is as wide as its widest cell.
    parts = [LinePart(each.rank, " " * cells[each.heading], each.heading) for each in _COLUMNS]
    kept = {part.style for part in fitting(parts, width - GAP)}
    columns = [each for each in _COLUMNS if each.heading in kept]
    table = Text(no_wrap=True, overflow="ellipsis")
    for number in range(len(shown) + 1):
        style = "dim" if number == 0 or shown[number - 1].is_gone else ""
        texts = [_padded(each, lines[each.heading][number], cells[each.heading]) for each in columns]
        table.append(f"{' ' * GAP}{(' ' * GAP).join(texts)}".rstrip(), style=style)
        table.append("\n")
    if len(shown) < len(rows):
        table.append(f"{' ' * GAP}… {len(rows) - len(shown)} more\n", style="dim")
    table.right_crop(1)
    return table


def _padded(column: _TableColumn, text: str, cells: int) -> str:
    padding = " " * (cells - cell_len(text))
    return text + padding if column.is_text else padding + text


def _cut(text: str, cells: int) -> str:
    """Words of a node, made harmless and not too long."""
    shown = harmless(str(text))
    return shown if cell_len(shown) <= cells else f"{set_cell_size(shown, cells - 1)}…"


def plain_text(text: str) -> Text:
    """Text from a node for a table, which would interpret markup in a plain string."""
    return Text(harmless(str(text)))


def step_text(settings: Settings, round_rate: float = 1.0) -> str:
    """How many samples make a step, and how that number comes about."""
    lengths, rounds = settings.round_lengths, ""
    if lengths is not None:
        steps = f"{lengths.at(0)} to {lengths.most}" if lengths.growth else f"{lengths.most}"
        most = " (or what the link needs)" if settings.local_steps == "auto" else ""
        rounds = f", rounds of {steps} steps{most}, learning rate × {round_rate:g}"
    if settings.batch_size is None:
        batches = "a batch" if settings.step_batches == 1 else f"{settings.step_batches} batches"
        return f"{batches} of the sampler a step{rounds}"
    if settings.step_batches == 1:
        return f"{settings.batch_size} samples a step{rounds}"
    samples = settings.batch_size * settings.step_batches
    return f"{settings.batch_size} × {settings.step_batches} = {samples:,} samples a step{rounds}"
