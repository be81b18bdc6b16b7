"""The same from Python: `train`, `serve` and `join`.

Each takes a `Job` (or the name of one), the settings of its command as keyword arguments, and callbacks;
it returns when the run is over. Environment and `w5xde.toml` count here as on the command line.
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
from concurrent.futures import ThreadPoolExecutor
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
    from w5xde.runtime.node.fork_server import Nursery
    from w5xde.runtime.telemetry.status import NodeReport


# Said at both ends of a run that was started with --insecure.
CLEAR_TEXT = (
    "INSECURE: this run is in clear text. Whoever is on the way can read and change the model, the data and "
    "the tickets; leave out --insecure to encrypt it"
)


@dataclass(slots=True)
class Result:
    """What a run gave: the trained model, and everything that --json prints."""

    model: Module
    summary: dict[str, Any]
    folder: Path
    reason: str

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.summary["metrics"])


class Watcher:
    """What a view is told of; the default watches nothing."""

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        """The coordinator listens."""

    def ended(self) -> None:
        """It has stopped."""

    def node_started(self, node: Node) -> None:
        """A node of ours begins to look for its coordinator."""

    def node_note(self, kind: str, text: str) -> None:
        """A node of ours has something to say."""


@dataclass(slots=True)
class _Named:
    """A job and what it is called in names and join lines."""

    job: Job
    reference: str
    stem: str = field(init=False)
    # Where it is found from any folder.
    place: str = field(init=False)

    def __post_init__(self) -> None:
        place = self.reference.rpartition(":")[0] or self.reference
        self.stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2].lower()
        name = self.reference.removeprefix(place)
        self.place = f"{Path(place).absolute()}{name}" if place.endswith(".py") else self.reference


def _find(job: Job | str, name: str = "JOB") -> _Named:
    if isinstance(job, Job):
        return _Named(job, name)
    return _Named(load_job(job), job)


def _resolve(command: str, arguments: dict[str, Any]) -> Settings:
    return resolve(command, arguments, environment=os.environ, folder=Path.cwd())


def train(
    job: Job | str, nodes: int | None = None, *, callbacks: Iterable[Callback] = (), **settings: Any
) -> Result:
    """Train on this machine with `nodes` processes (2 if nobody says otherwise); others may join too."""
    return run_coordinator(job, _resolve("train", {"nodes": nodes, **settings}), callbacks)


def serve(job: Job | str, *, callbacks: Iterable[Callback] = (), **settings: Any) -> Result:
    """Own the model and the data, and wait for nodes to join."""
    return run_coordinator(job, _resolve("serve", settings), callbacks)


def join(
    ticket: str | Ticket | None, job: Job | str, *, callbacks: Iterable[Callback] = (), **settings: Any
) -> NodeReport:
    """Work for the coordinator of this ticket until its run is over. None: the ticket in W5XDE_TICKET."""
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
    """A whole run, with settings that are already checked. `name` is what a job without a file is called."""
    named = _find(job, name)
    from w5xde.learn.model.device import choose_device, threads
    from w5xde.runtime.node.fork_server import Nursery

    choose_device(settings.device)
    with threads(settings.threads):
        # Forked first: a fork after torch has started threads, or sockets are open, would copy them.
        nursery = Nursery(named.job, settings) if settings.nodes else None
        is_over = False
        try:
            result = _run_prepared(named, settings, callbacks, watcher or Watcher(), nursery)
            is_over = True
            return result
        finally:
            if nursery is not None:
                nursery.close(now=not is_over)


def _run_prepared(
    named: _Named,
    settings: Settings,
    callbacks: Iterable[Callback],
    watcher: Watcher,
    nursery: Nursery | None,
) -> Result:
    from w5xde.learn.job.coordinator_setup import prepare
    from w5xde.runtime.coordinator.body import Coordinator
    from w5xde.runtime.coordinator.local_nodes import LocalNodes

    prepared = prepare(named.job, settings)
    recorder = _open_folder(named, settings)
    try:
        _require_same_data(recorder, prepared.source.samples)
        keeper, restored = _open_books(prepared.learner, recorder, settings)
        coordinator = Coordinator(prepared, settings, recorder, keeper, restored, callbacks)
    except OSError as error:
        recorder.discard()
        raise _folder_trouble(recorder.folder, error) from error
    except BaseException:
        recorder.discard()
        raise
    layout = prepared.learner.flat.blueprint.layout
    recorder.facts.update(
        {
            "job": named.reference,
            "job_place": named.place,
            "samples": prepared.source.samples,
            "model": [msgspec.to_builtins(entry) for entry in layout.entries],
        }
    )

    def opened(host: str, port: int) -> None:
        watcher.started(coordinator, settings, named.reference)
        if nursery is not None:
            LocalNodes(nursery, coordinator, settings.nodes, host, port).start()

    try:
        _run(coordinator.run(opened), coordinator.stop)
    finally:
        watcher.ended()
        if coordinator.address:
            try:
                summary = coordinator.conclude()
            finally:
                recorder.close()
        else:
            recorder.discard()
    return Result(prepared.learner.flat.module, summary, recorder.folder, coordinator.reason)


def _open_folder(named: _Named, settings: Settings) -> RunFolder:
    from w5xde.runtime.durable.run_folder import RunFolder

    try:
        return RunFolder(settings, named.stem)
    except OSError as error:
        raise _folder_trouble(Path(settings.runs), error) from error


def _folder_trouble(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the run folder {folder} cannot be used: {error.strerror or error}",
        code="W5-404",
        fix="make room there, or choose another folder with --runs",
    )


def _require_same_data(recorder: RunFolder, samples: int | None) -> None:
    """Another number of samples is another order of samples: some would count twice, some never."""
    before = recorder.facts.get("samples", samples)
    if before != samples:
        raise StorageError(
            f"the data set has {samples} samples, run {recorder.name} began with {before}",
            code="W5-405",
            fix="resume with the data the run was started with (mended, not shortened), or start a new run",
        )


def _open_books(learner: Learner, recorder: RunFolder, settings: Settings) -> tuple[Journal, Restored | None]:
    """What keeps the run's memory; if it is resumed, the learner is brought to where it goes on."""
    from w5xde.learn.step.checkpoint import capture, refuse_unkeepable
    from w5xde.learn.step.checkpoint import restore as restore_learner
    from w5xde.runtime.durable.journal import Journal
    from w5xde.runtime.durable.ledger import Ledger
    from w5xde.runtime.durable.resume import restore

    if settings.checkpoint_every != "off":
        refuse_unkeepable(learner)
    keeper = Journal(
        Ledger(recorder.disk, time.time),
        lambda: capture(learner),
        keep=settings.keep_checkpoints,
        logs_steps=settings.durability == "step",
    )
    if not recorder.is_resumed:
        return keeper, None
    restored = restore(
        keeper,
        lambda files: restore_learner(learner, files),
        lambda step, record, body: learner.replay(
            step.plan.count, body, frozenset(record["absent"]), record["loss_sum"]
        ),
        recorder.name,
        recorder.ledger_extent,
    )
    _require_epochs(restored, settings, recorder.name)
    return keeper, restored


def _require_epochs(restored: Restored, settings: Settings, run: str) -> None:
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


def _run(work: Coroutine[Any, Any, None], stop: Callable[[str], None]) -> None:
    """Run to the end; in a notebook, whose own loop runs already, on a thread beside it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(_with_signals(work, stop))
        return
    loops: list[asyncio.AbstractEventLoop] = []

    async def beside() -> None:
        loops.append(asyncio.get_running_loop())
        await work

    with ThreadPoolExecutor(max_workers=1) as threads:
        running = threads.submit(asyncio.run, beside())
        try:
            running.result()
        except KeyboardInterrupt:
            loops[0].call_soon_threadsafe(stop, "interrupted")
            running.result()


async def _with_signals(work: Coroutine[Any, Any, None], stop: Callable[[str], None]) -> None:
    """The first Ctrl-C (or SIGTERM) stops politely, the second at once."""
    running = asyncio.ensure_future(work)
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        asked = False

        def interrupted() -> None:
            nonlocal asked
            if asked:
                running.cancel()
            else:
                asked = True
                print("finishing what is begun; once more stops now", file=sys.stderr, flush=True)
                stop("interrupted")

        # Where a loop cannot have handlers (Windows), Ctrl-C stops at once.
        with contextlib.suppress(NotImplementedError):
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, interrupted)
    try:
        await running
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


# --- nodes ----------------------------------------------------------------------------------------


def parse_address(address: str) -> tuple[str, int]:
    """`host:port`, also with an IPv6 host in brackets."""
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
    """The ticket that a person means by what was said instead of it, if anything was."""
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
    """One node, with settings that are already checked; it `keeps` what lets it come back by itself."""
    named = _find(job)
    from w5xde.runtime.admission.node_pass import Pass
    from w5xde.runtime.net.sockets import is_here
    from w5xde.runtime.node.body import Node

    watch = watcher or Watcher()
    entrance = Pass(ticket, keeps=keeps)
    node = Node(named.job, entrance, settings, watch.node_note, callbacks)
    if ticket.is_clear and not all(is_here(host) for host, _ in ticket.addresses):
        watch.node_note("insecure", CLEAR_TEXT)
    report: list[NodeReport] = []

    async def work() -> None:
        watch.node_started(node)
        report.append(await node.run())

    try:
        _run(work(), lambda reason: node.leave())
    finally:
        entrance.close()
        watch.ended()
    return report[0]
