"""The coordinator: fills the ports of the update pipeline with sockets, threads and tensors, and runs it.

Starts and ends a run, ticks, evaluates, and reports to views and callbacks. Decides nothing: the core does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.nn import Module

from w5xde.callbacks import Callback
from w5xde.callbacks.status import RunStatus
from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.control.membership import TICK_SECONDS
from w5xde.control.pool.machine_share import CPU
from w5xde.control.pool.members import BEAT_SECONDS
from w5xde.control.step_decisions import ROUND_LENGTHS
from w5xde.errors import TrainingError
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.model.device import use_threads
from w5xde.runtime.coordinator import setup
from w5xde.runtime.coordinator.ending import (
    STOP_NOW_PARTING_SECONDS,
    STOP_NOW_SECONDS,
    Ending,
    RunEnd,
)
from w5xde.runtime.coordinator.opening import begin_life
from w5xde.runtime.coordinator.recheck import Recheck
from w5xde.runtime.coordinator.recorder import Recorder
from w5xde.runtime.coordinator.run_log import RunLog
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.resume import Restored
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.runtime.evaluation.evaluations import Evaluations
from w5xde.runtime.net.listener import Listener
from w5xde.runtime.pipeline.peer import Peer
from w5xde.runtime.pipeline.pipeline import Pipeline
from w5xde.runtime.pipeline.ports import ModelPorts, Ports
from w5xde.runtime.pipeline.steps import Applied
from w5xde.runtime.pipeline.updates import ARRIVING_PART, Updates
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.system.memory import available_bytes
from w5xde.runtime.telemetry.callback_runner import CallbackRunner
from w5xde.runtime.telemetry.gradient_noise import GradientNoise
from w5xde.runtime.telemetry.meters import Meters
from w5xde.runtime.telemetry.sampler import Sampler

KEEPS_NONE = "keeps no samples (no room, or no cache folder), so every epoch is sent to it"

T = TypeVar("T")


class Coordinator:
    """The coordinator of one run, in one process: one life of it, if the run is resumed."""

    def __init__(
        self,
        prepared: Prepared,
        settings: Settings,
        run_folder: RunFolder,
        journal: Journal,
        restored: Restored | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self._settings = settings
        self._prepared = prepared
        self._learner = prepared.learner
        self._run_folder = run_folder
        self._log = RunLog(journal)
        self.log, self.recent_events = self._log.log, self._log.events
        self._callbacks = CallbackRunner(callbacks, lambda text: self.log("callback failed", text))
        self._callbacks.require_metrics(prepared.metrics)
        self._evaluations = Evaluations(self, prepared, run_folder, journal, self._callbacks)
        self._journal = journal
        self._restored = restored
        cut = restored.cut if restored is not None else None
        self._core = setup.build_core(prepared, settings, journal.life, cut, decides=self._callbacks.decide)
        self._view = self._core.view
        weighs = prepared.rules.weight_unit > 0
        self._reader = setup.build_reader(self._learner, settings, weighs=weighs)
        self._peers = setup.build_peers(self, prepared, settings, run_folder, journal.life, self._reader)
        self._samples = setup.build_known_samples(prepared, settings, self._peers, self._broke)
        is_wanted = self._samples.is_wanted if self._samples is not None else None
        start = setup.reading_start(self._view.plan)
        self._loader = setup.build_loader(prepared, settings, start, is_wanted)
        self.gatekeeper = self._peers.gatekeeper
        self.job_offer = prepared.offer
        self._parameters = sum(tensor.numel() for tensor in self._learner.flat.module.parameters())
        run_folder.watch(self._log.storage)
        self.meters = Meters(GradientNoise.of(settings, is_large=self._learner.route.is_large, weighs=weighs))
        self.meters.learning_rates = self._learner.learning_rates
        if restored is not None:
            self.meters.resume(restored)
        self.address = ""
        self.end = RunEnd()
        self._seconds = 0.0
        # The facts that --json prints; empty until the run is over.
        self.summary: dict[str, Any] = {}
        if restored is not None:
            self._callbacks.resume(restored.callbacks)

    # --- life -------------------------------------------------------------------------------------

    async def run(self, opened: Callable[[str, int], None]) -> None:
        """Listen, train and save; if cancelled, stop at once. `opened(host, port)`: nodes may join now."""
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._loop.set_exception_handler(self._on_unexpected_error)
        self._assemble()
        self._next_beat = self._loop.time()
        # Connections are served at the first `await` after `listen`: by then the ledger is open.
        before = self._run_folder.facts.get("port")
        listener = await setup.listen(self._peers, self._settings, before, self._log.storage)
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        try:
            host, port = listener.address
            books = (self._journal, self._run_folder)
            for note in begin_life(port, books, self._prepared, self._core, self._restored):
                self.log(note.kind, note.text, **note.facts)
            self.address = f"{host}:{port}"
            self._loader.start(
                read_seconds=self._prepared.read_seconds,
                discovered=lambda epoch, sizes: self.dispatch(ev.Discovered(epoch, sizes)),
                failed=self._broke,
            )
            self._callbacks.tell(lambda callback: callback.on_start(self.status()))
            opened(host, port)
            await self._over.wait()
            await self._actor.drain()  # steps that were decided before the end are still applied
            await self._close_connections(listener, self.end.parting_seconds)
            await self._conclude()
        except BaseException:
            await self._stop_now(listener)
            raise
        finally:
            self._stop_threads()
        if self.end.error:
            raise TrainingError.because(self.end.error, self.summary)

    def _assemble(self) -> None:
        """Build the pipeline with its ports, and the threads and meters around it."""
        self._actor = Actor(
            "w5xde-learner",
            self.learner_broke,
            inline=not self._learner.route.is_large,
            prepare=lambda: use_threads(self._settings.threads),
        )
        self._recheck = Recheck(
            self._prepared,
            self._settings,
            lambda lease: self._view.lease(lease) is not None,
            self._broke,
            self.dispatch,
        )
        self._writer = Actor("w5xde-writer", self._broke, inline=False)
        self.recorder = Recorder(self._view, self.meters, self._peers.get, self._run_folder, self._callbacks)
        self._evaluations.start(self._actor, self._writer, self._view, self._settings.threads)
        parameters = setup.build_parameters(self._prepared, self._settings, self._loop.time)
        ports = Ports(
            clock=self._loop.time,
            tasks=self._actor,
            peers=self._peers,
            batches=self._loader,
            model=ModelPorts(self._learner, self._prepared.sums, self._reader, parameters),
            verifier=self._recheck,
            samples=self._samples,
            validation=self._evaluations.lent,
        )
        budget_bytes = available_bytes() * ARRIVING_PART
        self._pipeline = Pipeline(self._core, self._journal, ports, self.meters, self, budget_bytes)
        self._sampler = Sampler(self.meters, self._peers.traffic, self._writer, lambda: self._view.progress)
        self._ending = Ending(
            self._learner, self._journal, self._run_folder, self._writer, self._settings, self._log.storage
        )
        self._journal.start(self._actor, self._writer, self.dispatch, self._log.storage)

    def dispatch(self, event: ev.Event) -> None:
        self._pipeline.dispatch(event)

    @property
    def updates(self) -> Updates:
        return self._pipeline.updates

    # --- the end ----------------------------------------------------------------------------------

    async def _close_connections(self, listener: Listener, seconds: float) -> None:
        """Accept no more nodes, and close all connections; nodes get this long to close their side first."""
        listener.stop_accepting()
        self._ticker.cancel()
        self._seconds = self.seconds()
        self._sampler.count(self._loop.time())
        await self._peers.close(self.end.reason or "stopped", seconds, stopped=not self.end.is_complete)
        listener.close()

    async def _conclude(self) -> None:
        """Save the newest good weights, evaluate them, and write the summary."""
        # Saved first, so that an evaluation that fails cannot lose the weights.
        cut = self._view.cut(self._loop.time())
        saved = await self._ending.save(cut, self.kept_facts())
        if saved.is_durable:
            self.dispatch(ev.Saved(cut.progress.steps))
        evaluated = await self._evaluations.conclude(saved.weights_step, saved.weights_epoch, self.end)
        status = self.status()
        scaling = self._prepared.scaling
        self.summary = {
            **self.meters.summary(status, self._view.accounts.aside),
            "reason": self.end.reason,
            "over": self.end.is_complete,
            "scaled_for_batch": scaling.facts() if scaling is not None else None,
            **evaluated,
            **saved.facts(),
        }
        self.recorder.write(status)
        await self._ending.close(self.end, self.summary)
        self._callbacks.end(status, self.summary)

    async def _stop_now(self, listener: Listener) -> None:
        """Stop without saving: the files stay as they are."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_NOW_SECONDS):
                await self._close_connections(listener, STOP_NOW_PARTING_SECONDS)
                if self.address:
                    await self._ending.abandon(self._actor, self.end)

    def _stop_threads(self) -> None:
        for owner in (self._loader, self._actor, self._recheck, self._evaluations):
            owner.stop()
        if self.address:
            # After all that is still being written: closing unlocks the run for another process.
            self._writer.call(self._run_folder.close)
        self._writer.stop(cancels=False)

    def stop(self, reason: str) -> None:
        """End the run in order: it is over, although more steps were planned."""
        self.dispatch(ev.Stop(reason))

    def interrupt(self, reason: str, *, hurries: bool = False) -> None:
        """Stop the run in order before it is over, as the first Ctrl-C does; in a hurry as SIGTERM does."""
        if hurries:
            self.end.hurry(reason)
        self.dispatch(ev.Stop(reason, interrupts=True, hurries=hurries))

    def give_up(self, reason: str) -> None:
        """End the run with an error."""
        self.dispatch(ev.Broke(reason))

    @property
    def is_over(self) -> bool:
        return self.end.has_come

    @property
    def connected(self) -> dict[str, bool]:
        """Every connected node that has a name, and whether it is ready."""
        return {peer.name: peer.is_ready for peer in self._peers}

    def _tick(self) -> None:
        now = self._loop.time()
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        load = self._sampler.load(now)
        self.dispatch(ev.Ticked(self._sampler.machine, load, self._peers.take_heard()))
        self._peers.tick(now)
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._peers.beat()
            self._peers.close_slow_peers(now)
        self._journal.tick(now)
        self._sampler.count(now)
        self._sampler.weigh(now)
        self.recorder.tick(now, load, self._loader.data_ahead, self.status)

    # --- peers ------------------------------------------------------------------------------------

    def joined(self, peer: Peer) -> None:
        meter = self.meters.node(peer.name)
        meter.device, meter.machine, meter.state = peer.device, peer.machine, "working"
        peer.count_by(meter)
        if self._samples is not None:
            self._samples.joined(peer)
            if peer.samples is None and self._settings.data == "cached":
                self.log("no cache", f"{peer.name} {KEEPS_NONE}")
        slots = peer.cores // self._settings.threads
        # A node that computes on a GPU takes no turns on the machine's cores.
        machine = peer.machine if peer.device == CPU else ""
        self.dispatch(ev.Joined(peer.name, machine, slots, peer.guess_seconds))
        self._callbacks.tell(lambda callback: callback.on_node_join(self.status(), peer.name))

    def left(self, peer: Peer, reason: str) -> None:
        self.meters.node(peer.name).state = "gone"
        self.dispatch(ev.Left(peer.name, reason))
        self._callbacks.tell(lambda callback: callback.on_node_leave(self.status(), peer.name, reason))

    def close(self, effect: ev.Close) -> None:
        # A silent node is not told to leave: it may wake up, and then reconnects.
        if (peer := self._peers.get(effect.node)) is not None:
            self._peers.evict(peer, effect.reason, abruptly=not effect.for_good)

    def ban(self, effect: ev.Ban) -> None:
        self._peers.ban(effect.node, effect.reason)

    # --- steps ------------------------------------------------------------------------------------

    def stepped(self, applied: list[Applied]) -> None:
        self._callbacks.steps([(each.step.version, each.losses) for each in applied], self.status)

    def given_up(self, effect: ev.SetAside) -> None:
        """Only pools give steps up."""

    def look(self, read: Callable[[Module], T], found: Callable[[T], None]) -> None:
        """Call `read(model)` between two steps; `found` gets what it returns, on the event loop."""
        self._actor.call(lambda: read(self._learner.flat.module), found)

    def evaluate(self, effect: ev.Evaluate) -> None:
        self._evaluations.measure()

    def _on_unexpected_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run after an exception that nothing handled: its state may be wrong."""
        if self.is_over:
            return
        loop.default_exception_handler(context)
        self._broke(context.get("exception") or RuntimeError(context["message"]))

    def learner_broke(self, error: BaseException) -> None:
        reason = f"{setup.describe_failure(error)}; {self._journal.store.last_good}"
        self.end.spoil(reason)
        self.dispatch(ev.Broke(reason))

    def _broke(self, error: BaseException) -> None:
        self.dispatch(ev.Broke(setup.describe_failure(error)))

    # --- notes and status -------------------------------------------------------------------------

    def note(self, effect: ev.Note) -> None:
        self._log.show(effect)
        if effect.kind == ROUND_LENGTHS:
            self._run_folder.manifest(effect.facts)

    def finish(self, effect: ev.Finish) -> None:
        self.end.come(effect)
        self._over.set()
        self.note(ev.Note("finished", f"training ended: {effect.error or effect.reason}"))

    def seconds(self) -> float:
        """How long the run has trained in all its lives, each from its first lease."""
        return self._seconds or self._view.seconds(self._loop.time())

    def say(self, kind: str, text: str, node: str) -> None:
        self.log(kind, text, node=node)

    def kept_facts(self) -> dict[str, Any]:
        return self.meters.kept() | {"callbacks": self._callbacks.kept()}

    def status(self) -> RunStatus:
        status = self.meters.status(
            run=self._run_folder.name,
            address=self.address,
            parameters=self._parameters,
            settings=self._settings,
            view=self._view,
            seconds=self.seconds(),
            scaling=self._prepared.scaling.text if self._prepared.scaling is not None else "",
            round_rate=self._prepared.rounds.rate if self._prepared.rounds is not None else 1.0,
        )
        status.control, status.best = self._evaluations.control, self._evaluations.best
        return status
