"""The Python interface: `train`, `serve` and `join`, which the command line calls too.

Each function takes a `Job` (or where to find one), the settings of its command as keyword arguments, and
callbacks; it returns when the run is over. Settings also come from the environment and `w5xde.toml`. This
module starts and interrupts runs; it knows nothing of how they train.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from w5xde.callbacks import Callback
from w5xde.config import Settings
from w5xde.errors import JoinError, StorageError, UsageError
from w5xde.learn.job.job import Job, load_job
from w5xde.setting_sources import resolve
from w5xde.ticket import Ticket, read_ticket

if TYPE_CHECKING:
    from torch.nn import Module

    from w5xde.learn.step.learner import Learner
    from w5xde.runtime.coordinator.body import Coordinator
    from w5xde.runtime.durable.journal import Journal
    from w5xde.runtime.durable.resume import Restored
    from w5xde.runtime.durable.run_folder import RunFolder
    from w5xde.runtime.node.body import Node
    from w5xde.runtime.node.fork_server import ForkServer
    from w5xde.runtime.telemetry.status import NodeReport


# Shown to the user of the coordinator and of each node if the run was started with --insecure.
CLEAR_TEXT = (
    "INSECURE: this run is in clear text. Whoever is on the way can read and change the model, the data and "
    "the tickets; leave out --insecure to encrypt it"
)
# How late an interrupt of a notebook's run may be noticed: too short to feel, and waking up costs nothing.
WAKE_SECONDS = 0.1


@dataclass(slots=True)
class Result:
    """The result of a run: the trained model, and everything that --json prints."""

    model: Module
    summary: dict[str, Any]
    folder: Path
    reason: str

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.summary["metrics"])


class Watcher:
    """The methods that a view of a run or of a node implements; these do nothing."""

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        """The coordinator listens."""

    def ended(self) -> None:
        """The coordinator, or the node, has stopped."""

    def node_started(self, node: Node) -> None:
        """The node begins to look for its coordinator."""

    def node_note(self, kind: str, text: str) -> None:
        """The node has something to tell its user."""


@dataclass(slots=True)
class _NamedJob:
    """A job, and its names: as the user wrote it, in the run's name, and from any folder."""

    job: Job
    reference: str
    stem: str = field(init=False)
    place: str = field(init=False)

    def __post_init__(self) -> None:
        place = self.reference.rpartition(":")[0] or self.reference
        self.stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2].lower()
        name = self.reference.removeprefix(place)
        self.place = f"{Path(place).absolute()}{name}" if place.endswith(".py") else self.reference


def _load(job: Job | str, name: str = "JOB") -> _NamedJob:
    return _NamedJob(job, name) if isinstance(job, Job) else _NamedJob(load_job(job), job)


def _resolve(command: str, arguments: dict[str, Any]) -> Settings:
    return resolve(command, arguments, environment=os.environ, folder=Path.cwd())


def train(
    job: Job | str, nodes: int | None = None, *, callbacks: Iterable[Callback] = (), **settings: Any
) -> Result:
    """Train on this machine with `nodes` processes (default: 2); other machines may join."""
    return run_coordinator(job, _resolve("train", {"nodes": nodes, **settings}), callbacks)


def serve(job: Job | str, *, callbacks: Iterable[Callback] = (), **settings: Any) -> Result:
    """Own the model and the data, and wait for nodes to join."""
    return run_coordinator(job, _resolve("serve", settings), callbacks)


def join(
    ticket: str | Ticket | None, job: Job | str, *, callbacks: Iterable[Callback] = (), **settings: Any
) -> NodeReport:
    """Work for the coordinator of this ticket (None: the one in W5XDE_TICKET) until its run is over."""
    found = ticket if isinstance(ticket, Ticket) else find_ticket(ticket)
    return run_node(found, job, _resolve("join", settings), callbacks)


# --- the coordinator ------------------------------------------------------------------------------


def run_coordinator(
    job: Job | str,
    settings: Settings,
    callbacks: Iterable[Callback] = (),
    watcher: Watcher | None = None,
    name: str = "JOB",
) -> Result:
    """Run a coordinator with checked settings until the run is over; `name` is the name of a `Job` object."""
    named = _load(job, name)
    from w5xde.learn.model.device import choose_device, threads
    from w5xde.runtime.node.fork_server import ForkServer
    from w5xde.runtime.system.capacity import require_capacity

    choose_device(settings.device)
    require_capacity(settings.nodes)
    with threads(settings.threads):
        # Forked first: a fork after torch has started threads, or sockets are open, would copy them.
        fork_server = ForkServer(named.job, settings) if settings.nodes else None
        with fork_server or contextlib.nullcontext():
            return _run_prepared(named, settings, callbacks, watcher or Watcher(), fork_server)


def _run_prepared(
    named: _NamedJob,
    settings: Settings,
    callbacks: Iterable[Callback],
    watcher: Watcher,
    fork_server: ForkServer | None,
) -> Result:
    from w5xde.learn.job.coordinator_setup import prepare
    from w5xde.runtime.coordinator.body import Coordinator
    from w5xde.runtime.coordinator.local_memory import LocalMemory
    from w5xde.runtime.coordinator.local_nodes import LocalNodes

    memory = LocalMemory(settings)
    prepared = prepare(named.job, settings, memory.place_state)
    run_folder = _open_folder(named, settings)
    try:
        _require_same_data(run_folder, prepared.source.samples)
        journal, restored = _open_journal(prepared.learner, run_folder, settings)
        coordinator = Coordinator(prepared, settings, run_folder, journal, restored, callbacks)
    except OSError as error:
        run_folder.discard()
        raise _folder_error(run_folder.folder, error) from error
    except BaseException:
        run_folder.discard()
        raise
    run_folder.facts["settings"] |= prepared.settled
    run_folder.facts.update(
        {
            "job": named.reference,
            "job_place": named.place,
            "samples": prepared.source.samples,
            "model": msgspec.to_builtins(prepared.learner.flat.blueprint.layout.entries),
            "scaled_for_batch": prepared.scaling.facts() if prepared.scaling is not None else None,
        }
    )

    def opened(host: str, port: int) -> None:
        watcher.started(coordinator, settings, named.reference)
        if fork_server is not None:
            LocalNodes(fork_server, coordinator, settings.nodes, (host, port), memory).start()

    try:
        _run(coordinator.run(opened), coordinator.stop)
    finally:
        watcher.ended()
        if not coordinator.address:
            run_folder.discard()
    return Result(prepared.learner.flat.module, coordinator.summary, run_folder.folder, coordinator.reason)


def _open_folder(named: _NamedJob, settings: Settings) -> RunFolder:
    from w5xde.runtime.durable.run_folder import RunFolder

    try:
        return RunFolder(settings, named.stem)
    except OSError as error:
        raise _folder_error(Path(settings.runs), error) from error


def _folder_error(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the run folder {folder} cannot be used: {error.strerror or error}",
        code="W5-404",
        fix="make room there, or choose another folder with --runs",
    )


def _require_same_data(run_folder: RunFolder, samples: int | None) -> None:
    """Refuse to resume with another number of samples: some would count twice, and some never."""
    before = run_folder.facts.get("samples", samples)
    if before != samples:
        raise StorageError(
            f"the data set has {samples} samples, run {run_folder.name} began with {before}",
            code="W5-405",
            fix="resume with the data the run was started with (mended, not shortened), or start a new run",
        )


def _open_journal(
    learner: Learner, run_folder: RunFolder, settings: Settings
) -> tuple[Journal, Restored | None]:
    """Open the run's journal; if the run is resumed, restore the learner from its newest checkpoint."""
    from w5xde.learn.step.checkpoint import capture, refuse_unkeepable
    from w5xde.learn.step.checkpoint import restore as restore_learner
    from w5xde.runtime.durable.journal import Journal
    from w5xde.runtime.durable.ledger import Ledger
    from w5xde.runtime.durable.resume import restore

    if settings.checkpoint_every != "off":
        refuse_unkeepable(learner)
    journal = Journal(
        Ledger(run_folder.disk, time.time),
        lambda: capture(learner),
        keep=settings.keep_checkpoints,
        logs_steps=settings.durability == "step",
    )
    if not run_folder.is_resumed:
        return journal, None
    restored = restore(
        journal,
        lambda files: restore_learner(learner, files),
        lambda step, record, body: learner.replay(
            step, body, frozenset(record["absent"]), record["loss_sum"]
        ),
        run_folder.name,
        run_folder.ledger_extent,
    )
    _require_epochs(restored, settings, run_folder.name)
    return journal, restored


def _require_epochs(restored: Restored, settings: Settings, run: str) -> None:
    """Refuse an epoch limit that the resumed run has passed already."""
    limit, cut = settings.epoch_limit, restored.cut
    if limit is None or cut is None:
        return
    begun = max([cut.cursor.epoch + (cut.cursor.first > 0), *(step.epoch + 1 for step in cut.undone)])
    if begun > limit:
        raise UsageError(
            f"run {run} is in epoch {begun} already, so --epochs {limit} is too late",
            code="W5-211",
            fix=f"give at least --epochs {begun}, or leave it out",
        )


class _Interruptible:
    """Runs `work` on an event loop: the first interrupt calls `stop`, the second cancels `work`."""

    def __init__(self, work: Coroutine[Any, Any, None], stop: Callable[[str], None]) -> None:
        self._work = work
        self._stop = stop
        self._is_stopping = False

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._work)
        if threading.current_thread() is threading.main_thread():
            # Where event loops have no signal handlers (Windows), Ctrl-C stops at once.
            with contextlib.suppress(NotImplementedError):
                for number in (signal.SIGINT, signal.SIGTERM):
                    self._loop.add_signal_handler(number, self._interrupt)
        try:
            await self._task
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def _interrupt(self) -> None:
        if self._is_stopping:
            self._task.cancel()
            return
        self._is_stopping = True
        print("finishing what is begun; once more stops now", file=sys.stderr, flush=True)
        self._stop("interrupted")

    def interrupt_from_outside(self, number: int, frame: object) -> None:
        """A signal handler for a thread that does not run the event loop."""
        # The event loop may not run yet, or may have ended.
        with contextlib.suppress(AttributeError, RuntimeError):
            self._loop.call_soon_threadsafe(self._interrupt)


def _run(work: Coroutine[Any, Any, None], stop: Callable[[str], None]) -> None:
    """Run `work` to its end; on another thread if this one runs an event loop already, as notebooks do."""
    running = _Interruptible(work, stop)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(running.run())
        return
    is_main = threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(max_workers=1) as threads:
        before = signal.signal(signal.SIGINT, running.interrupt_from_outside) if is_main else None
        try:
            done = threads.submit(asyncio.run, running.run())
            # With a timeout, because Python runs signal handlers only when this thread wakes up.
            while not done.done():
                wait([done], timeout=WAKE_SECONDS)
            done.result()
        finally:
            if is_main:
                signal.signal(signal.SIGINT, before or signal.SIG_DFL)


# --- nodes ----------------------------------------------------------------------------------------


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 host may be in brackets."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{address!r} is not an address",
            code="W5-111",
            fix="give host and port, for example 192.168.1.20:5555",
        )
    return host, int(port)


def find_ticket(said: str | None) -> Ticket:
    """The ticket that the user gave, or the one in the environment; an address is refused with advice."""
    try:
        return read_ticket(said, os.environ, sys.stdin)
    except JoinError as damaged:
        try:
            parse_address(said or "")
        except UsageError:
            raise damaged from None
        raise UsageError(
            f"{said} is an address, and joining needs a ticket",
            code="W5-111",
            why="the ticket says where to go, whom to trust there, and that you may come",
            fix="copy the line that w5xde serve prints, or make one there:  w5xde ticket new latest",
        ) from None


def run_node(
    ticket: Ticket,
    job: Job | str,
    settings: Settings,
    callbacks: Iterable[Callback] = (),
    watcher: Watcher | None = None,
    *,
    keeps: bool = True,
) -> NodeReport:
    """Run a node with checked settings until its run is over; it `keeps` its credential, to rejoin by it."""
    named = _load(job)
    from w5xde.runtime.admission.node_pass import NodePass
    from w5xde.runtime.net.sockets import is_here
    from w5xde.runtime.node.body import Node

    watch = watcher or Watcher()
    node_pass = NodePass(ticket, keeps=keeps)
    node = Node(named.job, node_pass, settings, watch.node_note, callbacks)
    if ticket.is_clear and not all(is_here(host) for host, _ in ticket.addresses):
        watch.node_note("insecure", CLEAR_TEXT)
    report: list[NodeReport] = []

    async def work() -> None:
        watch.node_started(node)
        report.append(await node.run())

    try:
        _run(work(), lambda reason: node.leave())
    finally:
        node_pass.close()
        watch.ended()
    return report[0]
