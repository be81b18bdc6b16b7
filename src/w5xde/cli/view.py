"""The view: a live display on a terminal, plain lines elsewhere, and a summary at the end.

Reads the status of the run a few times a second and draws it; changes nothing. A stream that can no longer
be written ends the view, never the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import w5xde
from w5xde.api import CLEAR_TEXT, Result, Watcher
from w5xde.config import Settings
from w5xde.sanitize import harmless
from w5xde.ticket import join_line

if TYPE_CHECKING:
    from w5xde.runtime.coordinator.body import Coordinator
    from w5xde.runtime.durable.audit import AuditReport
    from w5xde.runtime.node.body import Node
    from w5xde.runtime.telemetry.status import NodeReport, RunStatus

# Often enough to look alive, and seldom enough to cost nothing.
REFRESH_SECONDS = 0.25
LINE_SECONDS = 5.0
# What fits on a terminal of 40 lines; longer lists say how many rows they leave out.
EVENTS_SHOWN, NODES_SHOWN, VIOLATIONS_SHOWN = 6, 20, 20


def make_view(settings: Settings) -> View:
    """A view on stdout; with --json on stderr, because stdout is for the result."""
    return View(settings, sys.stderr if settings.json else sys.stdout)


class View(Watcher):
    """Shows a run, or one node's work for a run."""

    def __init__(self, settings: Settings, stream: IO[str]) -> None:
        self._settings = settings
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._is_silent = settings.log == "silent"
        self._is_live = self._console.is_terminal and not self._is_silent
        self._live: Live | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._coordinator: Coordinator | None = None
        self._node: Node | None = None
        self._shown_events = 0.0
        self._next_line = 0.0

    # --- a coordinator ------------------------------------------------------------------------

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        if self._is_silent:
            return
        self._coordinator = coordinator
        status = coordinator.status()
        self.say(
            f"[bold]w5xde {w5xde.__version__}[/]  run [bold]{status.run}[/]  "
            f"{status.mode}, seed {settings.seed}, {_count(status.parameters)} parameters",
            markup=True,
        )
        self.say(f"listening on {status.address}" + _reach(settings.host))
        if coordinator.gatekeeper.is_exposed:
            self.say(f"[bold red]{CLEAR_TEXT}[/]", markup=True)
        if coordinator.gatekeeper.ticket is not None:
            # The only place that shows the secret, to the user who started the run.
            self.say(f"  to join:  {join_line(coordinator.gatekeeper.ticket, job_name)}")
        self._begin()

    def ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._live is not None:
            self._draw(self._live)
            with contextlib.suppress(OSError, ValueError, SystemExit):
                self._live.stop()
            self._live = None
        elif self._coordinator is not None:
            self._print_events()

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        if self._is_live:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._refresh()

    def _refresh(self) -> None:
        self._timer = self._loop.call_later(REFRESH_SECONDS, self._refresh)
        if self._is_silent:
            return
        if self._live is not None:
            self._draw(self._live)
            return
        self._print_events()
        if self._loop.time() >= self._next_line:
            self._next_line = self._loop.time() + LINE_SECONDS
            self.say(self._line())

    def _draw(self, live: Live) -> None:
        try:
            live.update(self._display(), refresh=True)
        except (OSError, ValueError, SystemExit):
            self._is_silent = True

    def _display(self) -> Group:
        if self._node is not None:
            return Group(Text(self._node_line(self._node)))
        status = self._status()
        parts: list[Text | Table] = [_progress(status), Text(_rates(status), style="dim")]
        if status.nodes:
            parts.append(node_table(status))
        else:
            parts.append(Text(self._waiting_text(), style="yellow"))
        for kind, text in self._events_after(0.0)[-EVENTS_SHOWN:]:
            parts.append(
                Text(
                    f"  {harmless(text)}",
                    style=_EVENT_STYLES.get(kind, "dim"),
                    overflow="ellipsis",
                    no_wrap=True,
                )
            )
        return Group(*parts)

    def _status(self) -> RunStatus:
        if self._coordinator is None:
            raise RuntimeError("the view was started without a coordinator")
        return self._coordinator.status()

    def _waiting_text(self) -> str:
        waited = self._loop.time() - self._started_at
        return f"waiting for nodes for {waited:.0f} s" if waited > 1 else "waiting for nodes"

    def _print_events(self) -> None:
        if self._coordinator is None:
            return
        for _, text in self._events_after(self._shown_events):
            self.say(text)
        if self._coordinator.recent_events:
            self._shown_events = max(self._shown_events, self._coordinator.recent_events[-1][0])

    def _events_after(self, moment: float) -> list[tuple[str, str]]:
        events = self._coordinator.recent_events if self._coordinator is not None else ()
        is_verbose = self._settings.log == "verbose"
        return [
            (kind, text)
            for at, kind, text in events
            if at > moment and (is_verbose or kind not in _QUIET_EVENTS)
        ]

    def _line(self) -> str:
        if self._node is not None:
            return self._node_line(self._node)
        status = self._status()
        if not status.nodes and not status.step:
            return self._waiting_text()
        total = f"/{status.steps_total}" if status.steps_total else ""
        parts = [f"step {status.step}{total} ({status.durable_steps} safe)"]
        parts.append(f"epoch {status.epoch}" + (f"/{status.epochs_total}" if status.epochs_total else ""))
        if status.loss is not None:
            parts.append(f"loss {status.loss:.4f}")
        parts += [f"{key} {value:.4g}" for key, value in status.evaluation.items()]
        parts.append(_rates(status))
        parts.append(f"{sum(node.state == 'working' for node in status.nodes)} nodes")
        if status.seconds_left is not None:
            parts.append(f"{duration_text(status.seconds_left)} left")
        return ", ".join(parts)

    def show_result(self, result: Result) -> None:
        """Print the summary of a run that ended in order."""
        if self._is_silent:
            return
        s = result.summary
        self.say(
            f"[bold green]done[/]  run [bold]{s['run']}[/]  {s['epochs']} epochs, {s['steps']:,} steps, "
            f"{s['samples']:,} samples in {duration_text(s['seconds'])} ({escape(result.reason)})",
            markup=True,
        )
        if s["loss_first"] is not None:
            measured = "".join(f"   {key} {value:.4g}" for key, value in s["metrics"].items())
            average = f" (average {s['loss_average']:.4f})"
            self.say(f"  loss {s['loss_first']:.4f} → {s['loss_last']:.4f}{average}{measured}")
        self.say(
            f"  {len(s['nodes'])} nodes, {s['batches']:,} batches, {s['batches_relent']} of them lent again; "
            f"{_bytes(s['bytes_sent'])} out, {_bytes(s['bytes_received'])} in"
        )
        if s["robust"] != "off":
            short = f"{s['degraded_steps']:,} of the steps had fewer nodes than that takes"
            self.say(f"  robust {s['robust']}: {short}; the weights depend on who computed what")
        if s["verified_batches"] or s["unverified_batches"]:
            self.say(
                f"  {s['verified_batches']:,} batches verified, {s['unverified_batches']:,} could not be"
            )
        self.say(f"  weights sha256 {s['weights_sha256'][:16]}…  in  {result.folder / 'model.safetensors'}")

    def show_audit(self, report: AuditReport) -> None:
        """Print what an audit found, for each node, and whether the promise held."""
        found = report.findings
        lives = f"{found.lives} {'life' if found.lives == 1 else 'lives'} of the coordinator"
        self.say(
            f"run {report.run}: {found.records:,} records, {lives}, {found.crashes} without a goodbye; "
            f"ended: {found.ended or 'not yet, or without a word'}"
        )
        self.say(
            f"  {found.steps:,} steps, {found.batches:,} batches, {found.samples:,} samples applied, "
            f"{found.epochs} epochs complete; {found.steps_redone} steps redone after a crash"
        )
        table = Table(box=None, padding=(0, 2), header_style="dim")
        table.add_column("node")
        for heading in ("batches", "samples", "share", "leases", "refused", "expired"):
            table.add_column(heading, justify="right")
        for name, part in sorted(found.nodes.items(), key=lambda each: -each[1].batches):
            share = f"{part.batches / max(1, found.batches):.0%}"
            table.add_row(
                _word(name), f"{part.batches:,}", f"{part.samples:,}", share, f"{part.leases:,}",
                f"{part.refused:,}", f"{part.expired:,}",
            )  # fmt: skip
        self._console.print(table)
        for epoch, batch in found.aside:
            self.say(f"  set aside: batch {batch} of epoch {epoch + 1}")
        whole = sum(not wrong for wrong in report.checkpoints.values())
        self.say(f"  {whole} of {len(report.checkpoints)} checkpoints here are whole and the ledger's own")
        if report.model_step is not None:
            self.say(f"  model.safetensors has the weights of step {report.model_step:,}")
        for remark in found.remarks:
            self.say(f"  note: {remark}")
        for violation in found.violations[:VIOLATIONS_SHOWN]:
            self.say(f"  VIOLATION: {violation}")
        if len(found.violations) > VIOLATIONS_SHOWN:
            self.say(f"  … and {len(found.violations) - VIOLATIONS_SHOWN} more")
        if report.is_clean:
            self.say("[bold green]clean[/]: every batch that counts was applied exactly once", markup=True)
        else:
            self.say("[bold red]the promise did not hold[/]", markup=True)

    def show_export(self, written: dict[str, Any]) -> None:
        for damage in written["damaged"]:
            self.say(f"a damaged checkpoint is passed over: {damage}")
        self.say(
            f"weights of {written['run']} after {written['steps']:,} steps in {written['file']} "
            f"({_bytes(written['bytes'])}, sha256 of weights {written['weights_sha256'][:16]}…)"
        )

    # --- a node ----------------------------------------------------------------------------------

    def node_started(self, node: Node) -> None:
        if not self._is_silent:
            self._node = node
            self._begin()

    def node_note(self, kind: str, text: str) -> None:
        if self._is_silent or (kind in _QUIET_EVENTS and self._settings.log != "verbose"):
            return
        self.say(text)

    def _node_line(self, node: Node) -> str:
        report = node.report
        if not report.run:
            return "looking for the coordinator"
        spent = (report.seconds_busy + report.seconds_waiting) or 1.0
        rate = report.batches / (self._loop.time() - self._started_at + 1e-9)
        loss = f", loss {report.loss:.4f}" if report.loss is not None else ""
        return (
            f"{report.batches:,} batches, {rate:.1f}/s{loss}, compute {report.seconds_busy / spent:.0%}, "
            f"wait {report.seconds_waiting / spent:.0%}    Ctrl-C leaves politely"
        )

    def show_report(self, report: NodeReport) -> None:
        if self._is_silent:
            return
        self.say(
            f"[bold green]done[/]  {report.name} computed {report.batches:,} batches of {report.run} "
            f"in {duration_text(report.seconds_busy)} ({escape(harmless(report.reason))})",
            markup=True,
        )

    def say(self, text: str, *, markup: bool = False) -> None:
        """Print a sentence. Only our own text may have markup; text from nodes and jobs is shown as it is."""
        if self._is_silent:
            return
        try:
            shown = "\n".join(harmless(line) for line in text.split("\n"))
            self._console.print(shown, markup=markup, emoji=False)
        except (OSError, ValueError, SystemExit):
            # The pipe or the terminal is closed: training goes on unseen.
            self._is_silent = True


_EVENT_STYLES = {
    "left": "yellow",
    "failed": "red",
    "turned away": "yellow",
    "insecure": "bold red",
    "storage": "red",
    "bad batch": "red",
    "joined": "green",
    "finished": "bold",
}
# Frequent events, which only --log verbose shows.
_QUIET_EVENTS = {"epoch", "rejected", "evaluated"}


def _progress(status: RunStatus) -> Table:
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


def _rates(status: RunStatus) -> str:
    return (
        f"{status.samples_per_second:,.0f} samples/s, {status.batches_per_second:,.1f} batches/s, "
        f"out {_bytes(status.sent_per_second)}/s, in {_bytes(status.received_per_second)}/s"
        + (f", {status.compression_ratio:.2f}× smaller" if (status.compression_ratio or 1.0) > 1.005 else "")
        + (f", {status.staleness_mean:.0f} steps stale" if status.mode == "async" else "")
        + (f", memory {_bytes(status.memory_pss_bytes)}" if status.memory_pss_bytes else "")
    )


def node_table(status: RunStatus) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("node", "device", "state"):
        table.add_column(heading)
    for heading in ("batches/s", "share", "loss", "wait", "network"):
        table.add_column(heading, justify="right")
    # Working nodes first, and not a long list of those that left.
    rows = sorted(status.nodes, key=lambda node: node.state == "gone")
    for node in rows[:NODES_SHOWN]:
        loss = f"{node.loss:.4f}" if node.loss is not None else "-"
        style = "dim" if node.state == "gone" else ""
        table.add_row(
            _word(node.name), _word(node.device), node.state, f"{node.batches_per_second:,.1f}",
            f"{node.share:.0%}", loss, f"{node.waiting:.0%}", f"{_bytes(node.network_per_second)}/s",
            style=style,
        )  # fmt: skip
    if len(rows) > NODES_SHOWN:
        table.add_row(f"… {len(rows) - NODES_SHOWN} more", *[""] * 7)
    return table


def _word(text: str) -> Text:
    """Text from a node for a table, which would interpret markup in a plain string."""
    return Text(harmless(str(text)))


def _reach(host: str) -> str:
    if host in ("127.0.0.1", "localhost", "::1"):
        return "  (only this machine can join; --host 0.0.0.0 opens it to others)"
    return ""


def _count(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)


def _bytes(number: float) -> str:
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


def duration_text(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
