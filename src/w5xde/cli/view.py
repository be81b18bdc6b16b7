"""The view: a live display on a terminal, one line in a notebook, a log elsewhere, and a summary at the end.

Reads the status of the run a few times a second and draws it; changes nothing. A stream that can no longer
be written ends the view, never the training.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import w5xde
from w5xde.api import CLEAR_TEXT, Reporting, Watcher
from w5xde.cli.panels import (
    NODES_SHOWN,
    evaluation_text,
    exported_text,
    from_here,
    learned_lines,
    machine_table,
    page_text,
    progress,
    rates,
    reach_text,
    resume_line,
    step_text,
)
from w5xde.cli.screen.answers import RunAnswers
from w5xde.cli.screen.line_pace import LinePace
from w5xde.cli.screen.live import CLOSED, LivePanel
from w5xde.cli.screen.machines import machine_count
from w5xde.cli.screen.notebook import OneLine, in_notebook
from w5xde.cli.units import bytes_text, count_text, duration_text, number_text
from w5xde.config import Settings
from w5xde.control.trust.failures import SECOND_OPINION
from w5xde.runtime.durable.again import FinishedRun
from w5xde.runtime.telemetry.result import Result
from w5xde.sanitize import harmless
from w5xde.ticket import join_line

if TYPE_CHECKING:
    from w5xde.callbacks.status import NodeReport, RunStatus
    from w5xde.learn.job.code.offer import JobOffer
    from w5xde.runtime.coordinator.body import Coordinator

# Often enough to look alive, and seldom enough to cost nothing.
REFRESH_SECONDS = 0.25
# The newest events, if the terminal has room for them.
EVENTS_SHOWN = 6
# Lines that are printed again when the terminal changes its size.
LINES_KEPT = 20
# Lines of the display besides machines and events: progress, rates, noise, headings, and four that are free.
LINES_BESIDES = 8
ROWS_MIN = 2
ANSWERS_HEIGHT_MIN = 20


def make_view(settings: Settings) -> View:
    """A view on stdout; with --json on stderr, because stdout is for the result."""
    return View(settings, sys.stderr if settings.json else sys.stdout)


class View(Watcher):
    """Shows a run, or one node's work for a run."""

    def __init__(self, settings: Settings, stream: IO[str]) -> None:
        self._settings = settings
        # In a notebook rich would print HTML.
        self._console = Console(file=stream, highlight=False, soft_wrap=True, force_jupyter=False)
        self._is_silent = settings.log == "silent"
        self._is_live = self._console.is_terminal and not self._is_silent
        self._live: LivePanel | None = None
        # What was said, as `say` takes it.
        self._said: deque[tuple[str, bool, bool]] = deque(maxlen=LINES_KEPT)
        self._line_pace = LinePace()
        self._one_line = OneLine(stream) if in_notebook() and not self._is_silent else None
        self._timer: asyncio.TimerHandle | None = None
        self._coordinator: Coordinator | None = None
        self._answers = RunAnswers(settings)
        self._node: Reporting | None = None
        self._shown_events = 0.0
        self._job_name = ""

    # --- a coordinator ------------------------------------------------------------------------

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        if self._is_silent:
            return
        self._coordinator, self._job_name = coordinator, job_name
        coordinator.recorder.followers.append(self._answers.add)
        status = coordinator.status()
        # Two short lines on a terminal, one in a log.
        between = "\n  " if self._is_live else "  "
        self.say(
            f"[bold]w5xde {w5xde.__version__}[/]  run [bold]{status.run}[/]{between}"
            f"{status.mode}, {step_text(settings, status.round_rate)}, seed {settings.seed}, "
            f"{count_text(status.parameters)} parameters",
            markup=True,
        )
        if status.scaling:
            self.say(f"scaled for {settings.step_batches} batches a step: {status.scaling}")
        if settings.staleness is not None and settings.mode == "sync":
            self.say("staleness has no effect in sync mode, where no update is late")
        self.say(f"listening on {status.address}" + reach_text(settings.host))
        if coordinator.gatekeeper.is_exposed:
            self.say(f"[bold red]{CLEAR_TEXT}[/]", markup=True)
        if coordinator.gatekeeper.ticket is not None:
            # The only place that shows the secret, to the user who started the run.
            ticket = coordinator.gatekeeper.ticket_shown
            for line in join_lines(ticket, coordinator.job_offer, job_name):
                self.say(line, whole=True)
            if settings.goes_on and not settings.nodes:
                self.say("this run starts no nodes of its own: join with the line above, or use --nodes 2")
        self._begin()

    def page_started(self, address: str) -> None:
        self.say(page_text(address), whole=True)

    def ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._live is not None:
            self._draw(self._live)
            self._live.close()
            self._live = None
        if self._one_line is not None:
            self._one_line.close()
        if not self._is_live:
            self._print_events()

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_at = self._worked_at = self._loop.time()
        if self._is_live:
            self._live = LivePanel(self._console, self._repeat)
        self._refresh()

    def _refresh(self) -> None:
        self._timer = self._loop.call_later(REFRESH_SECONDS, self._refresh)
        if self._is_silent:
            return
        if self._live is not None:
            self._draw(self._live)
            return
        self._print_events()
        if self._one_line is not None:
            self._one_line.show(self._line())
        elif self._line_pace.is_due(self._loop.time() - self._started_at):
            self.say(self._line())

    def _draw(self, live: LivePanel) -> None:
        try:
            live.draw(lambda: self.display(*self._console.size))
        except CLOSED:
            self._is_silent = True

    def _repeat(self) -> None:
        """Print again what was said, on a terminal that was wiped."""
        for text, markup, whole in list(self._said):
            self._print(text, markup=markup, whole=whole)

    def display(self, width: int, height: int) -> Group:
        """What is drawn on a terminal of this size: nothing is wrapped, and nothing needs more lines."""
        # Also at the end: there the terminal shows what is typed, for example ^C.
        free = Text("")
        if self._node is not None:
            hint = _line_of("Ctrl-C lets this machine leave", "dim")
            return Group(free, _line_of(self._node_line(self._node)), hint, free)
        status = self._status()
        waiting = self._waiting_text(status)
        speed = _line_of(waiting, "yellow") if waiting else _line_of(rates(status, width), "dim")
        parts: list[Text | Table] = [free, progress(status, width), speed]
        if status.gradient_noise_batches is not None:
            parts.append(_line_of(status.gradient_noise, "dim"))
        # On a terminal that is too low for them, machines and events come first.
        answers = self._answers.lines(width) if height >= ANSWERS_HEIGHT_MIN else []
        parts += answers
        # The lines above stay on the terminal, if it has room for them and for two machines.
        lines = [line for text, _, _ in self._said for line in text.split("\n")]
        above = sum(1 + len(line) // max(1, width) for line in lines)
        room = max(2 * ROWS_MIN, height - above - LINES_BESIDES - len(answers))
        events = self._events_after(0.0)[-min(EVENTS_SHOWN, room - ROWS_MIN) :]
        if status.nodes:
            rows = min(NODES_SHOWN, room - len(events))
            is_verbose = self._settings.log == "verbose"
            parts += [free, machine_table(status, width, rows_max=rows, each_node=is_verbose)]
        parts.append(free)
        parts += [_line_of(f"  {text}", _EVENT_STYLES.get(kind, "dim")) for kind, text in events]
        return Group(*parts, *([free] if events else []))

    def _status(self) -> RunStatus:
        if self._coordinator is None:
            raise RuntimeError("the view was started without a coordinator")
        return self._coordinator.status()

    def _waiting_text(self, status: RunStatus) -> str:
        """For what the run waits, and how long it has waited for nodes; empty if it does not."""
        if status.waits_for_evaluation and status.working:
            self._worked_at = self._loop.time()
            return "waiting for an evaluation"
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
        parts = [f"step {status.step}{total} ({status.durable_steps} saved)"]
        parts.append(f"epoch {status.epoch}" + (f"/{status.epochs_total}" if status.epochs_total else ""))
        if status.loss is not None:
            parts.append(f"loss {status.loss:.4f}")
        if status.evaluation:
            parts.append(evaluation_text(status.evaluation))
        if waiting:
            return ", ".join([*parts, waiting])
        parts.append(rates(status))
        if status.gradient_noise_batches is not None:
            parts.append(f"noise of about {status.gradient_noise_batches:.2g} batches")
        machines = machine_count(status.nodes)
        on_machines = f" on {machines} machines" if machines > 1 else ""
        parts.append(number_text(status.working, "node") + on_machines)
        if status.seconds_left is not None:
            parts.append(f"{duration_text(status.seconds_left)} left")
        return ", ".join(parts)

    def show_result(self, result: Result | FinishedRun) -> None:
        """Print the summary of a run that ended in order, because it is over or was interrupted."""
        if self._is_silent:
            return
        s = result.summary
        ending = "[bold green]done[/]" if result.is_over else "[bold yellow]stopped[/]"
        took = f"{duration_text(s['seconds'])} ({escape(result.reason)})"
        self.say(
            f"{ending}  run [bold]{s['run']}[/]  "
            f"{number_text(s['epochs'], 'epoch')}, {number_text(s['steps'], 'step')}, "
            f"{number_text(s['samples'], 'sample')} in {took}",
            markup=True,
        )
        for line in learned_lines(s, result.folder):
            self.say(line)
        self.say(
            f"  {number_text(len(s['nodes']), 'node')}, {number_text(s['batches'], 'batch')}, "
            f"{s['batches_relent']} of them lent again; "
            f"{bytes_text(s['bytes_sent'])} out, {bytes_text(s['bytes_received'])} in"
        )
        if s["bad_batches"]:
            self.say(
                f"  {number_text(len(s['bad_batches']), 'batch')} set aside, without counting: w5xde audit"
            )
        if s["robust"] != "off":
            short = f"{s['degraded_steps']:,} of the steps had fewer nodes than that takes"
            self.say(f"  robust {s['robust']}: {short}; the weights depend on who computed what")
        if s["verified_batches"] or s["unverified_batches"]:
            verified = number_text(s["verified_batches"], "batch")
            self.say(f"  {verified} verified, {s['unverified_batches']:,} could not be")
        if s["gradient_noise_batches"] is not None:
            self.say(f"  {s['gradient_noise']}")
        file = from_here(result.folder / "model.safetensors")
        self.say(f"  weights sha256 {s['weights_sha256'][:16]}…  in  {file}")
        if not result.is_over:
            self.say(resume_line(result.folder, self._job_name), whole=True)

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def show_export(self, written: dict[str, Any]) -> None:
        for damage in written["damaged"]:
            self.say(f"a damaged checkpoint is passed over: {damage}")
        self.say(exported_text(written))

    # --- a node ----------------------------------------------------------------------------------

    def node_started(self, node: Reporting) -> None:
        if not self._is_silent:
            self._node = node
            self._begin()

    def node_note(self, kind: str, text: str) -> None:
        if self._is_silent or (kind in _QUIET_EVENTS and self._settings.log != "verbose"):
            return
        self.say(text)

    def _node_line(self, node: Reporting) -> str:
        report = node.report
        if not report.run:
            return "looking for the coordinator"
        spent = (report.seconds_busy + report.seconds_waiting) or 1.0
        rate = report.batches / (self._loop.time() - self._started_at + 1e-9)
        loss = f", loss {report.loss:.4f}" if report.loss is not None else ""
        name = f"{report.title}: " if report.title != report.name else ""
        return (
            f"{name}{report.batches:,} batches, {rate:.1f}/s{loss}, "
            f"compute {report.seconds_busy / spent:.0%}, wait {report.seconds_waiting / spent:.0%}"
        )

    def show_report(self, report: NodeReport) -> None:
        if self._is_silent:
            return
        self.say(
            f"[bold green]done[/]  {report.title}: {number_text(report.batches, 'batch')} of {report.run} "
            f"computed, busy for {duration_text(report.seconds_busy)}, {report.counted:,} counted"
            f"{'' if report.over else ' so far'} ({escape(harmless(report.reason))})",
            markup=True,
        )

    def say(self, text: str, *, markup: bool = False, whole: bool = False) -> None:
        """Print a sentence. Only our own text may have markup; text from nodes and jobs is shown as it is.

        On a terminal long sentences are wrapped between words, but for those that are to be copied `whole`.
        """
        if self._is_silent:
            return
        self._said.append((text, markup, whole))
        self._print(text, markup=markup, whole=whole)

    def _print(self, text: str, *, markup: bool, whole: bool) -> None:
        try:
            shown = "\n".join(harmless(line) for line in text.split("\n"))
            wraps = self._is_live and not whole
            if self._one_line is not None:
                self._one_line.clear()
            self._console.print(shown, markup=markup, emoji=False, soft_wrap=not wraps)
        except CLOSED:
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
# Events that only --log verbose shows: frequent ones, and failed callbacks, whose errors are printed anyway.
_QUIET_EVENTS = {"epoch", "rejected", "evaluated", SECOND_OPINION, "callback failed"}


def _line_of(text: str, style: str = "") -> Text:
    """A line that is cut at the edge of the terminal."""
    return Text(harmless(text), style=style, overflow="ellipsis", no_wrap=True)


def join_lines(ticket: str, offer: JobOffer, job_name: str) -> list[str]:
    """How to join, and the code that nodes are sent; they name the job themselves if none is."""
    if offer.code is None:
        return [f"  to join:  {join_line(ticket, job_name)}"]
    files, size = number_text(len(offer.code.files), "file"), bytes_text(len(offer.code.body))
    lines = [f"  to join:  {join_line(ticket)}", f"  its code: {files}, {size}, sha256 {offer.sha256}"]
    if offer.left_behind:
        left = ",".join(offer.left_behind)
        lines.append(f"nodes that join without a copy also need {left}: send that with --ship {left}")
    return lines
