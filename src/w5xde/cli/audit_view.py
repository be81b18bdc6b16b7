"""What an audit found, for people: a table of nodes, and whether the promise held. Counts nothing itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from w5xde.cli.panels import plain_text
from w5xde.cli.units import number_text

if TYPE_CHECKING:
    from w5xde.cli.view import View
    from w5xde.runtime.durable.audit import AuditReport

# Longer lists say how many rows they leave out.
VIOLATIONS_SHOWN = 20


def show_audit(view: View, report: AuditReport) -> None:
    """Print what an audit found, for each node, and whether the promise held."""
    found = report.findings
    lives = f"{found.lives} {'life' if found.lives == 1 else 'lives'} of the coordinator"
    view.say(
        f"run {report.run}: {found.records:,} records, {lives}, {found.crashes} without a goodbye; "
        f"ended: {found.ended or 'not yet, or without a word'}"
    )
    view.say(
        f"  {number_text(found.steps, 'step')}, {number_text(found.batches, 'batch')}, "
        f"{number_text(found.samples, 'sample')} applied, {number_text(found.epochs, 'epoch')} complete; "
        f"{number_text(found.steps_redone, 'step')} redone after a crash"
    )
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("node")
    for heading in ("batches", "samples", "share", "leases", "refused", "expired"):
        table.add_column(heading, justify="right")
    for name, part in sorted(found.nodes.items(), key=lambda each: -each[1].batches):
        share = f"{part.batches / max(1, found.batches):.0%}"
        table.add_row(
            plain_text(name), f"{part.batches:,}", f"{part.samples:,}", share, f"{part.leases:,}",
            f"{part.refused:,}", f"{part.expired:,}",
        )  # fmt: skip
    view.show(table)
    for epoch, batch in found.aside:
        view.say(f"  set aside: batch {batch} of epoch {epoch + 1}")
    whole = sum(not wrong for wrong in report.checkpoints.values())
    view.say(f"  {whole} of {len(report.checkpoints)} checkpoints here are whole and the ledger's own")
    if report.model_step is not None:
        view.say(f"  model.safetensors has the weights of step {report.model_step:,}")
    for remark in found.remarks:
        view.say(f"  note: {remark}")
    for violation in found.violations[:VIOLATIONS_SHOWN]:
        view.say(f"  VIOLATION: {violation}")
    if len(found.violations) > VIOLATIONS_SHOWN:
        view.say(f"  … and {len(found.violations) - VIOLATIONS_SHOWN} more")
    if report.is_clean:
        view.say("[bold green]clean[/]: every batch that counts was applied exactly once", markup=True)
    else:
        view.say("[bold red]the promise did not hold[/]", markup=True)
