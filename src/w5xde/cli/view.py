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
from rich.table import Table
from rich.text import Text

import w5xde
from w5xde.api import CLEAR_TEXT, Result, Watcher
from w5xde.cli.panels import node_table, plain_text, progress, rates
from w5xde.cli.units import bytes_text, count_text, duration_text, number_text
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
EVENTS_SHOWN, VIOLATIONS_SHOWN = 6, 20


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
            f"{status.mode}, {step_text(settings, status.round_rate)}, seed {settings.seed}, "
            f"{count_text(status.parameters)} parameters",
            markup=True,
        )
        if status.scaling:
            self.say(f"scaled for {settings.step_batches} batches a step: {status.scaling}")
        if settings.staleness is not None and settings.mode == "sync":
            self.say("staleness has no effect in sync mode, where no update is late")
        self.say(f"listening on {status.address}" + _reach(settings.host))
        if coordinator.gatekeeper.is_exposed:
            self.say(f"[bold red]{CLEAR_TEXT}[/]", markup=True)
        if coordinator.gatekeeper.ticket is not None:
            # The only place that shows the secret, to the user who started the run.
            self.say(f"  to join:  {join_line(coordinator.gatekeeper.ticket, job_name)}")
            if settings.resume is not None and not settings.nodes:
                self.say("this run starts no nodes of its own: join with the line above, or use --nodes 2")
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
        self._started_at = self._worked_at = self._loop.time()
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
        waiting = self._waiting_text(status)
        speed = Text(waiting, style="yellow") if waiting else Text(rates(status), style="dim")
        parts: list[Text | Table] = [progress(status), speed]
        if status.gradient_noise_batches is not None:
            parts.append(Text(status.gradient_noise, style="dim"))
        if status.nodes:
            parts.append(node_table(status))
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

    def _waiting_text(self, status: RunStatus) -> str:
        """How long the run has waited for nodes; empty if it does not."""
        if status.working or self._coordinator is None or self._coordinator.is_over:
            self._worked_at = self._loop.time()
            return ""
        waited = self._loop.time() - self._worked_at
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
        waiting = self._waiting_text(status)
        if waiting and not status.step:
            return waiting
        total = f"/{status.steps_total}" if status.steps_total else ""
        parts = [f"step {status.step}{total} ({status.durable_steps} safe)"]
        parts.append(f"epoch {status.epoch}" + (f"/{status.epochs_total}" if status.epochs_total else ""))
        if status.loss is not None:
            parts.append(f"loss {status.loss:.4f}")
        parts += [f"{key} {value:.4g}" for key, value in status.evaluation.items()]
        if waiting:
            return ", ".join([*parts, waiting])
        parts.append(rates(status))
        if status.gradient_noise_batches is not None:
            parts.append(f"noise of about {status.gradient_noise_batches:.2g} batches")
        parts.append(number_text(status.working, "node"))
        if status.seconds_left is not None:
            parts.append(f"{duration_text(status.seconds_left)} left")
        return ", ".join(parts)

    def show_result(self, result: Result) -> None:
        """Print the summary of a run that ended in order."""
        if self._is_silent:
            return
        s = result.summary
        took = f"{duration_text(s['seconds'])} ({escape(result.reason)})"
        self.say(
            f"[bold green]done[/]  run [bold]{s['run']}[/]  "
            f"{number_text(s['epochs'], 'epoch')}, {number_text(s['steps'], 'step')}, "
            f"{number_text(s['samples'], 'sample')} in {took}",
            markup=True,
        )
        if s["loss_first"] is not None:
            measured = "".join(f"   {key} {value:.4g}" for key, value in s["metrics"].items())
            average = f" (average {s['loss_average']:.4f})"
            self.say(f"  loss {s['loss_first']:.4f} → {s['loss_last']:.4f}{average}{measured}")
        self.say(
            f"  {number_text(len(s['nodes']), 'node')}, {number_text(s['batches'], 'batch')}, "
            f"{s['batches_relent']} of them lent again; "
            f"{bytes_text(s['bytes_sent'])} out, {bytes_text(s['bytes_received'])} in"
        )
        if s["robust"] != "off":
            short = f"{s['degraded_steps']:,} of the steps had fewer nodes than that takes"
            self.say(f"  robust {s['robust']}: {short}; the weights depend on who computed what")
        if s["verified_batches"] or s["unverified_batches"]:
            self.say(
                f"  {s['verified_batches']:,} batches verified, {s['unverified_batches']:,} could not be"
            )
        if s["gradient_noise_batches"] is not None:
            self.say(f"  {s['gradient_noise']}")
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
            f"({bytes_text(written['bytes'])}, sha256 of weights {written['weights_sha256'][:16]}…)"
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


def step_text(settings: Settings, round_rate: float = 1.0) -> str:
    """How many samples make a step, and how that number comes about."""
    lengths, rounds = settings.round_lengths, ""
    if lengths is not None:
        steps = f"{lengths.at(0)} to {lengths.most}" if lengths.growth else f"{lengths.most}"
        most = " (or what the link needs)" if settings.local_steps == "auto" else ""
        rounds = f", rounds of {steps} steps{most}, learning rate × {round_rate:g}"
    if settings.step_batches == 1:
        return f"{settings.batch_size} samples a step{rounds}"
    samples = settings.batch_size * settings.step_batches
    return f"{settings.batch_size} × {settings.step_batches} = {samples:,} samples a step{rounds}"


def _reach(host: str) -> str:
    if host in ("127.0.0.1", "localhost", "::1"):
        return "  (only this machine can join; --host 0.0.0.0 opens it to others)"
    return ""
