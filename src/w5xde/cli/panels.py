"""The panels of the live display: how far a run is, how fast, and what each node does.

Draws what the status of a run says; knows no terminal and no coordinator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from w5xde.cli.units import bytes_text, duration_text
from w5xde.sanitize import harmless

if TYPE_CHECKING:
    from w5xde.runtime.telemetry.status import RunStatus

# Longer lists say how many rows they leave out.
NODES_SHOWN = 20


def progress(status: RunStatus) -> Table:
    """How far the run is, in one row."""
    row = Table.grid(padding=(0, 2), expand=False)
    done = status.done
    cells: list[Text | ProgressBar] = [
        Text(f"epoch {status.epoch}" + (f"/{status.epochs_total}" if status.epochs_total else ""))
    ]
    if done is not None:
        cells += [ProgressBar(total=1.0, completed=done, width=30), Text(f"{done:4.0%}")]
    cells.append(Text(f"step {status.step:,} ({status.durable_steps:,} safe)"))
    if status.loss is not None:
        cells.append(Text(f"loss {status.loss:.4f}", style="bold"))
    cells += [Text(f"{key} {value:.4g}", style="bold green") for key, value in status.evaluation.items()]
    if status.seconds_left is not None:
        cells.append(Text(f"{duration_text(status.seconds_left)} left"))
    row.add_row(*cells)
    return row


def rates(status: RunStatus) -> str:
    """How fast the run is."""
    return (
        f"{status.samples_per_second:,.0f} samples/s, {status.batches_per_second:,.1f} batches/s, "
        f"out {bytes_text(status.sent_per_second)}/s, in {bytes_text(status.received_per_second)}/s"
        + (f", {status.compression_ratio:.2f}× smaller" if (status.compression_ratio or 1.0) > 1.005 else "")
        + (f", {status.staleness_mean:.1f} updates late" if status.mode == "async" else "")
        + (f", {_rounds(status)}" if status.mode == "rounds" else "")
        + (f", memory {bytes_text(status.memory_pss_bytes)}" if status.memory_pss_bytes else "")
    )


def _rounds(status: RunStatus) -> str:
    """How seldom nodes talk."""
    each = f", {bytes_text(status.bytes_per_sample)} a sample" if status.bytes_per_sample is not None else ""
    return f"{status.rounds:,} rounds, now of {status.round_steps} steps{each}"


def node_table(status: RunStatus) -> Table:
    """What each node does."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("node", "device", "state"):
        table.add_column(heading)
    for heading in ("batches/s", "share", "loss", "computes", "wait", "network"):
        table.add_column(heading, justify="right")
    # Working nodes first, and not a long list of those that left.
    rows = sorted(status.nodes, key=lambda node: node.state == "gone")
    for node in rows[:NODES_SHOWN]:
        loss = f"{node.loss:.4f}" if node.loss is not None else "-"
        style = "dim" if node.state == "gone" else ""
        table.add_row(
            plain_text(node.name), plain_text(node.device), node.state, f"{node.batches_per_second:,.1f}",
            f"{node.share:.0%}", loss, f"{node.computing:.0%}", f"{node.waiting:.0%}",
            f"{bytes_text(node.network_per_second)}/s",
            style=style,
        )  # fmt: skip
    if len(rows) > NODES_SHOWN:
        table.add_row(f"… {len(rows) - NODES_SHOWN} more", *[""] * 8)
    return table


def plain_text(text: str) -> Text:
    """Text from a node for a table, which would interpret markup in a plain string."""
    return Text(harmless(str(text)))
