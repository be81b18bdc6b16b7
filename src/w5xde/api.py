"""The Python interface: `train`, `serve` and `join`, which the command line calls too.

Each function takes a `Job` (or where to find one), the settings of its command as keyword arguments, and
callbacks; it returns when the run is over. Settings also come from the environment, `w5xde.toml` and the job.
This module starts runs; it knows nothing of how they train.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from w5xde.callbacks import Callback
from w5xde.callbacks.ready import checked_callbacks
from w5xde.config import Settings
from w5xde.errors import UsageError
from w5xde.learn.job.job import Job, call, refuse_while_loading
from w5xde.learn.job.named_job import FROM_PYTHON, NamedJob, load_named, settle
from w5xde.runtime.admission.ticket_source import Locate, TicketSource, first_found, source_of
from w5xde.runtime.durable.again import RunClaim, claim_run, folder_error
from w5xde.runtime.system.parent import ending_with_parent
from w5xde.runtime.telemetry.result import Result
from w5xde.setting_sources import SettingSources
from w5xde.specs.engine_settings import LOCAL
from w5xde.specs.setting_help import describe_settings
from w5xde.specs.typed_settings import JoinSettings, ServeSettings, TrainSettings
from w5xde.ticket import Ticket

if TYPE_CHECKING:
    from w5xde.callbacks.status import NodeReport
    from w5xde.cli.view import View
    from w5xde.runtime.coordinator.body import Coordinator
    from w5xde.runtime.node.body import Node
    from w5xde.runtime.node.consent import Ask
    from w5xde.runtime.node.crew import Crew
    from w5xde.runtime.node.fork_server import ForkServer
    from w5xde.runtime.system.capacity import NodePlan


# Shown to the user of the coordinator and of each node if the run was started with --insecure.
CLEAR_TEXT = (
    "INSECURE: this run is in clear text. Whoever is on the way can read and change the model, the data and "
    "the tickets; leave out --insecure to encrypt it"
)


class Reporting(Protocol):
    """A node, or all nodes of a crew: it has totals."""

    @property
    def report(self) -> NodeReport: ...


class Watcher:
    """The methods that a view of a run or of a node implements; these do nothing."""

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        """The coordinator listens."""

    def ended(self) -> None:
        """The coordinator, or the node, has stopped."""

    def page_started(self, address: str) -> None:
        """The page of the run can be opened; without an address, it could not be started."""

    def node_started(self, node: Reporting) -> None:
        """The node, or the crew, begins to look for its coordinator."""

    def node_note(self, kind: str, text: str) -> None:
        """The node has something to tell its user."""


def _sources(command: str, arguments: dict[str, Any]) -> SettingSources:
    return SettingSources(command, arguments, os.environ, Path.cwd(), in_python=True)


def train(
    job: Job | str,
    nodes: int | str | None = None,
    *,
    callbacks: Iterable[Callback] = (),
    progress: bool = True,
    **settings: Unpack[TrainSettings],
) -> Result:
    """Train on this machine with `nodes` processes; other machines may join by the ticket that is printed.

    Ctrl-C ends the run in order, and the `is_over` of its result is False then. `progress=False` prints
    nothing. Settings that are not given come from W5XDE_* variables, then from w5xde.toml, then from the job,
    then they have these defaults.
    """
    refuse_while_loading("w5xde.train")
    sources = _sources("train", {"nodes": nodes, **settings})
    if (found := sources.resolve()).engine != LOCAL:
        from w5xde.engines.from_python import train_elsewhere

        return train_elsewhere(job, sources, callbacks, _view(found), is_shown=progress)
    return _coordinate(job, sources, callbacks, progress=progress)


def serve(
    job: Job | str,
    *,
    callbacks: Iterable[Callback] = (),
    progress: bool = True,
    **settings: Unpack[ServeSettings],
) -> Result:
    """Own the model and the data, and wait for nodes to join by the ticket that is printed.

    Ctrl-C ends the run in order, and the `is_over` of its result is False then. `progress=False` prints
    nothing. Settings that are not given come from W5XDE_* variables, then from w5xde.toml, then from the job,
    then they have these defaults.
    """
    refuse_while_loading("w5xde.serve")
    return _coordinate(job, _sources("serve", {**settings}), callbacks, progress=progress)


def join(
    ticket: str | Ticket | None = None,
    job: Job | str | None = None,
    *,
    locate: Locate | None = None,
    callbacks: Iterable[Callback] = (),
    progress: bool = True,
    **settings: Unpack[JoinSettings],
) -> NodeReport:
    """Work for the coordinator of this ticket (None: the one in W5XDE_TICKET) until its run is over.

    A ticket of "@FILE" is read again at every dial, because a coordinator that was restarted elsewhere has
    another address. So is `locate` called, on a thread of its own, if it is given instead of a ticket: it
    returns a ticket, its text, or None while it knows none. What it raises is shown, and it is called again.

    Without a job the coordinator's own is run, if `accept_code` is its sha256 or it was accepted before.
    `progress=False` prints nothing. Settings that are not given come from W5XDE_* variables, then from
    w5xde.toml, then they have these defaults.
    """
    refuse_while_loading("w5xde.join")
    callbacks = checked_callbacks(callbacks)
    resolved = _sources("join", {**settings}).resolve()
    source = source_of(ticket, locate)
    view = _view(resolved) if progress else None
    with ending_with_parent(resolved.with_parent):
        report = run_crew(source, job, resolved, callbacks, view)
    if view is not None:
        view.show_report(report)
    return report


for _function in (train, serve, join):
    _function.__doc__ = f"{_function.__doc__}\n{describe_settings(_function.__name__)}\n"


def _view(settings: Settings) -> View:
    from w5xde.cli.view import make_view

    return make_view(settings)


# --- the coordinator ------------------------------------------------------------------------------


def _coordinate(
    job: Job | str, sources: SettingSources, callbacks: Iterable[Callback], *, progress: bool
) -> Result:
    callbacks, settings = checked_callbacks(callbacks), sources.resolve()
    view = _view(settings) if progress else None
    tell: Callable[[str], None] = view.say if view is not None else lambda text: None
    with ending_with_parent(settings.with_parent), claim_run(sources, tell) as claim:
        if (finished := claim.finished) is not None:
            model = finished.load_model(load_named(job).job, sources.resolve().seed)
            result = Result(model, finished.summary, finished.folder, finished.reason)
        else:
            named, sources = settle(sources, job)
            settings = sources.resolve()
            view = _view(settings) if progress else None
            result = run_coordinator(named.job, settings, callbacks, view, named.reference, claim)
    if view is not None:
        view.show_result(result)
    return result


def run_coordinator(
    job: Job | str,
    settings: Settings,
    callbacks: Iterable[Callback] = (),
    watcher: Watcher | None = None,
    name: str = FROM_PYTHON,
    claim: RunClaim | None = None,
) -> Result:
    """Run a coordinator with checked settings until the run is over; `name` is the name of a `Job` object.

    The settings that the job brings along are not read here: `settle` does that. `claim` has the run's lock.
    """
    named = load_named(job, name)
    from w5xde.learn.model.device import threads
    from w5xde.runtime.node.fork_server import ForkServer
    from w5xde.runtime.node.local_node import run_local_node
    from w5xde.runtime.system.capacity import plan_nodes, require_capacity
    from w5xde.runtime.system.devices import machine_devices

    plan = plan_nodes(machine_devices(settings.devices), settings.threads, settings.node_count)
    require_capacity(len(plan.devices))
    with threads(settings.threads):
        # Forked first: a fork after torch has started threads, or sockets are open, would copy them.
        fork_server = ForkServer(named.job, settings, run_local_node) if plan.devices else None
        with fork_server or contextlib.nullcontext():
            return _run_prepared(named, settings, callbacks, watcher or Watcher(), (fork_server, plan), claim)


def _run_prepared(
    named: NamedJob,
    settings: Settings,
    callbacks: Iterable[Callback],
    watcher: Watcher,
    local: tuple[ForkServer | None, NodePlan],
    claim: RunClaim | None,
) -> Result:
    from w5xde.learn.job.code.offer import offer_of
    from w5xde.learn.job.coordinator_setup import prepare
    from w5xde.runtime.coordinator.body import Coordinator
    from w5xde.runtime.coordinator.local.memory import LocalMemory
    from w5xde.runtime.coordinator.local.nodes import LocalNodes
    from w5xde.runtime.coordinator.opening import job_facts, open_folder, open_journal
    from w5xde.runtime.system.interrupts import run_interruptibly

    fork_server, plan = local
    memory = LocalMemory(settings)
    # At once: the files must be those that were just loaded.
    offer = offer_of(named, settings.ship, reads_data=settings.data == "local")
    prepared = prepare(named.job, settings, memory.place_state)
    # With what the job says about its data.
    settings = prepared.settings
    prepared.offer = offer
    run_folder = open_folder(settings, named.stem, claim)
    try:
        run_folder.require_same_data(prepared.source.samples, prepared.source.order_digest)
        journal, restored = open_journal(prepared.learner, run_folder, settings)
        own = _own_callbacks(named.job)
        coordinator = Coordinator(prepared, settings, run_folder, journal, restored, [*own, *callbacks])
    except OSError as error:
        run_folder.discard()
        raise folder_error(run_folder.folder, error) from error
    except BaseException:
        run_folder.discard()
        raise
    run_folder.facts["settings"] |= prepared.settled
    run_folder.facts.update(job_facts(named, prepared))

    def opened(host: str, port: int) -> None:
        watcher.started(coordinator, settings, named.reference)
        if settings.page:
            from w5xde.page.child import start_page_of_loop

            start_page_of_loop(run_folder.folder, watcher.page_started)
        if fork_server is not None:
            LocalNodes(fork_server, coordinator, plan, (host, port), memory).start()

    try:
        run_interruptibly(coordinator.run(opened), coordinator.interrupt)
        if coordinator.end.hurries and fork_server is not None:
            # Its nodes had their goodbye.
            fork_server.close(now=True)
    finally:
        watcher.ended()
        if not coordinator.address:
            run_folder.discard()
    ticket = coordinator.gatekeeper.ticket
    return Result(
        prepared.learner.flat.module,
        coordinator.summary,
        run_folder.folder,
        coordinator.end.reason,
        ticket.to_text() if ticket is not None else "",
    )


def _own_callbacks(job: Job) -> list[Callback]:
    """The callbacks that a job brings along."""
    return [] if job.callbacks is None else checked_callbacks(call("callbacks()", job.callbacks))


# --- nodes ----------------------------------------------------------------------------------------


def _load_received(source: TicketSource, settings: Settings, ask: Ask | None, watch: Watcher) -> NamedJob:
    """Load the coordinator's own job, if the user agrees to run it."""
    from w5xde.runtime.node.code_request import CodeRequest
    from w5xde.runtime.node.consent import load_if_accepted
    from w5xde.runtime.system.interrupts import run_interruptibly

    request = CodeRequest(source, settings)
    run_interruptibly(request.run(), request.stop)
    return load_if_accepted(request.answer, source.ticket, settings.accept_code, ask, watch.node_note)


def run_node(
    ticket: Ticket | TicketSource,
    job: Job | str | None,
    settings: Settings,
    callbacks: Iterable[Callback] = (),
    watcher: Watcher | None = None,
    *,
    keeps: bool = True,
    ask: Ask | None = None,
) -> NodeReport:
    """Run a node with checked settings until its run is over; it `keeps` its credential, to rejoin by it."""
    watch = watcher or Watcher()
    source = first_found(ticket, settings.wait_seconds, watch.node_note)
    named = load_named(job) if job is not None else _load_received(source, settings, ask, watch)
    return _run_alone(source, named, settings, callbacks, watch, keeps=keeps)


def _run_alone(
    source: TicketSource,
    named: NamedJob,
    settings: Settings,
    callbacks: Iterable[Callback],
    watch: Watcher,
    *,
    keeps: bool = True,
) -> NodeReport:
    from w5xde.runtime.admission.node_pass import NodePass
    from w5xde.runtime.node.body import Node

    with contextlib.closing(NodePass(source, keeps=keeps)) as node_pass:
        node = Node(named.job, node_pass, settings, watch.node_note, callbacks)
        node.origin = named.origin
        return _work(node, source.ticket, watch)


def run_crew(
    ticket: Ticket | TicketSource,
    job: Job | str | None,
    settings: Settings,
    callbacks: Iterable[Callback] = (),
    watcher: Watcher | None = None,
    *,
    ask: Ask | None = None,
) -> NodeReport:
    """Run as many nodes as the settings say until their run is over; one alone runs in this process.

    Without a job the coordinator's own is run, if `ask` or the settings agree to it: once for all nodes.
    """
    from w5xde.runtime.node.crew import Crew
    from w5xde.runtime.node.crew_node import run_crew_node
    from w5xde.runtime.node.fork_server import ForkServer
    from w5xde.runtime.system.capacity import plan_nodes, require_capacity
    from w5xde.runtime.system.devices import machine_devices

    if settings.nodes == 0:
        raise UsageError("joining takes at least one node", code="W5-210", fix="leave out --nodes 0")
    watch = watcher or Watcher()
    loaded: list[NamedJob] = []

    def load() -> None:
        if job is not None and not loaded:
            loaded.append(load_named(job))

    # A node that waits for its ticket has torch and the job when it comes.
    source = first_found(ticket, settings.wait_seconds, watch.node_note, load)
    load()
    named = loaded[0] if loaded else _load_received(source, settings, ask, watch)
    devices = machine_devices(settings.devices)
    # The run says how many threads a node has; with fewer nodes than cores, some of these are not started.
    wanted = len(plan_nodes(devices, 1, settings.node_count).devices)
    if wanted == 1 or (settings.nodes == "auto" and not hasattr(os, "fork")):
        return _run_alone(source, named, settings, callbacks, watch)
    require_capacity(wanted)
    run_one = partial(run_crew_node, named.origin, source.may_change)
    with (server := ForkServer(named.job, settings, run_one)):
        crew = Crew(server, devices, source, settings, watch.node_note, callbacks)
        return _work(crew, source.ticket, watch)


def _work(worker: Node | Crew, ticket: Ticket, watch: Watcher) -> NodeReport:
    """Run a node or a crew until its run is over, or the user interrupts it."""
    from w5xde.runtime.net.sockets import is_here
    from w5xde.runtime.system.interrupts import run_interruptibly

    if ticket.is_clear and not all(is_here(host) for host, _ in ticket.addresses):
        watch.node_note("insecure", CLEAR_TEXT)
    report: list[NodeReport] = []

    async def work() -> None:
        watch.node_started(worker)
        report.append(await worker.run())

    def leave(reason: str, *, hurries: bool) -> None:
        worker.leave(hurries=hurries)

    try:
        run_interruptibly(work(), leave)
    finally:
        watch.ended()
    return report[0]
