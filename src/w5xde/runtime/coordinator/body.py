"""The coordinator: fills the ports of the update pipeline with sockets, threads and tensors, and runs it.

Starts and ends a run, ticks, evaluates, and reports to views and callbacks. Decides nothing: the core does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.nn import Module

from w5xde.callbacks import Callback
from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.control.membership import TICK_SECONDS
from w5xde.control.pool.members import BEAT_SECONDS
from w5xde.control.step_decisions import ROUND_LENGTHS
from w5xde.errors import TrainingError
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.model.device import use_threads
from w5xde.runtime.coordinator import setup
from w5xde.runtime.coordinator.ending import HURRIED_PARTING_SECONDS, STOP_NOW_SECONDS, Ending
from w5xde.runtime.coordinator.evaluator import Evaluator
from w5xde.runtime.coordinator.loader import Loader
from w5xde.runtime.coordinator.peers import PARTING_SECONDS
from w5xde.runtime.coordinator.recheck import Recheck
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.resume import Restored
from w5xde.runtime.durable.run_folder import RunFolder
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
from w5xde.runtime.telemetry.status import RunStatus

# How often a row of metrics is written: a long run's file stays small enough to plot.
METRICS_SECONDS = 1.0
KEEPS_NONE = "keeps no samples (no room, or no cache folder), so every epoch is sent to it"
# More than any view shows at a time.
EVENTS_KEPT = 200

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
        self._callbacks = CallbackRunner(callbacks, lambda text: self._log("callback failed", text))
        self._journal = journal
        self._restored = restored
        cut = restored.cut if restored is not None else None
        self._core = setup.build_core(prepared, settings, journal.life, cut)
        self._view = self._core.view
        self._reader = setup.build_reader(self._learner, settings)
        self._peers = setup.build_peers(self, prepared, settings, run_folder, journal.life, self._reader)
        self._samples = setup.build_known_samples(prepared, settings, self._peers, self._broke)
        is_wanted = self._samples.is_wanted if self._samples is not None else None
        start = setup.reading_start(self._view.plan)
        self._loader = Loader(prepared.source, settings, start, is_wanted)
        self.gatekeeper = self._peers.gatekeeper
        self._parameters = sum(tensor.numel() for tensor in self._learner.flat.module.parameters())
        run_folder.watch(self._storage_note)
        self.meters = Meters(GradientNoise.of(settings, is_large=self._learner.route.is_large))
        if restored is not None:
            self.meters.resume(restored)
        # The newest events, for views: (monotonic time, kind, sentence).
        self.recent_events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_KEPT)
        self.address = ""
        self._finish: ev.Finish | None = None
        self._seconds = 0.0
        # The facts that --json prints; empty until the run is over.
        self.summary: dict[str, Any] = {}

    # --- life -------------------------------------------------------------------------------------

    async def run(self, opened: Callable[[str, int], None]) -> None:
        """Listen, train and save; if cancelled, stop at once. `opened(host, port)`: nodes may join now."""
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._loop.set_exception_handler(self._on_unexpected_error)
        self._assemble()
        self._next_beat = self._next_row = self._loop.time()
        # Connections are served at the first `await` after `listen`: by then the ledger is open.
        before = self._run_folder.facts.get("port")
        listener = await setup.listen(self._peers, self._settings, before, self._storage_note)
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        try:
            host, port = listener.address
            setup.open_ledger(self._journal, self._run_folder, self._settings, self._core, self._restored)
            # After the ledger: a life in the manifest that the ledger does not know proves a loss.
            self._run_folder.manifest(setup.facts_of_life(port, self._journal.life, self._core))
            for kind, text in setup.opening_notes(
                self._prepared, self._restored, self._core, self._journal.life
            ):
                self._log(kind, text)
            self.address = f"{host}:{port}"
            self._loader.start(
                read_seconds=self._prepared.read_seconds,
                discovered=lambda epoch, samples: self.dispatch(ev.Discovered(epoch, samples)),
                failed=self._broke,
            )
            self._callbacks.tell(lambda callback: callback.on_start(self.status()))
            opened(host, port)
            await self._over.wait()
            await self._actor.drain()  # steps that were decided before the end are still applied
            await self._close_connections(listener, PARTING_SECONDS)
            await self._conclude()
        except BaseException:
            await self._stop_now(listener)
            raise
        finally:
            self._stop_threads()
        if self._error:
            raise TrainingError.because(self._error, self.summary)

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
        parameters = setup.build_parameters(self._prepared, self._settings, self._loop.time)
        ports = Ports(
            clock=self._loop.time,
            tasks=self._actor,
            peers=self._peers,
            batches=self._loader,
            model=ModelPorts(self._learner, self._prepared.sums, self._reader, parameters),
            verifier=self._recheck,
            samples=self._samples,
        )
        budget_bytes = available_bytes() * ARRIVING_PART
        self._pipeline = Pipeline(self._core, self._journal, ports, self.meters, self, budget_bytes)
        self._writer = Actor("w5xde-writer", self._broke, inline=False)
        self._sampler = Sampler(self.meters, self._peers.traffic, self._writer, lambda: self._view.progress)
        self._ending = Ending(
            self._learner, self._journal, self._run_folder, self._writer, self._settings, self._storage_note
        )
        self._evaluator = Evaluator(self._prepared, self.meters, self._log, self._evaluated)
        self._journal.start(self._actor, self._writer, self.dispatch, self._storage_note)

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
        await self._peers.close(self.reason or "stopped", seconds)
        listener.close()

    async def _conclude(self) -> None:
        """Save the newest good weights, evaluate them, and write the summary."""
        self._evaluator.forget()
        # Saved first, so that an evaluation that fails cannot lose the weights.
        cut = self._view.cut(self._loop.time())
        saved = await self._ending.save(cut, self.meters)
        if saved.is_durable:
            self.dispatch(ev.Saved(cut.progress.steps))
        if saved.weights_step is not None:
            await self._evaluator.measure_last(self._settings.threads)
        status = self.status()
        scaled = {"scaled_for_batch": scaling.facts() if (scaling := self._prepared.scaling) else None}
        self.summary = {**self.meters.summary(status, self._view.accounts.aside), **scaled, **saved.facts()}
        await self._ending.close(status.row(), self.reason, self._error, self.summary)
        self._callbacks.tell(lambda callback: callback.on_end(status, self.summary))

    async def _stop_now(self, listener: Listener) -> None:
        """Stop without saving: the files stay as they are."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_NOW_SECONDS):
                await self._close_connections(listener, HURRIED_PARTING_SECONDS)
                if self.address:
                    await self._ending.abandon(self._actor, self.reason, self._error)

    def _stop_threads(self) -> None:
        for owner in (self._loader, self._actor, self._recheck, self._evaluator):
            owner.stop()
        if self.address:
            # After all that is still being written: closing unlocks the run for another process.
            self._writer.call(self._run_folder.close)
        self._writer.stop(cancels=False)

    def stop(self, reason: str) -> None:
        """End the run in order, as the first Ctrl-C does."""
        self.dispatch(ev.Stop(reason))

    def give_up(self, reason: str) -> None:
        """End the run with an error."""
        self.dispatch(ev.Broke(reason))

    @property
    def is_over(self) -> bool:
        return self._finish is not None

    @property
    def connected(self) -> dict[str, bool]:
        """Every connected node that has a name, and whether it is ready."""
        return {peer.name: peer.is_ready for peer in self._peers}

    @property
    def reason(self) -> str:
        """Why the run ended."""
        return (self._finish.error or self._finish.reason) if self._finish is not None else ""

    @property
    def _error(self) -> str:
        return self._finish.error if self._finish is not None else "interrupted"

    def _tick(self) -> None:
        now = self._loop.time()
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        heard = self._peers.take_heard()
        self.dispatch(ev.Ticked(self._sampler.machine, self._sampler.load(now), heard))
        self._peers.tick(now)
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._peers.beat()
            self._peers.close_slow_peers(now)
        self._journal.tick(now)
        self._sampler.count(now)
        self._sampler.weigh(now)
        if now >= self._next_row and self._view.has_started:
            self._next_row = now + METRICS_SECONDS
            self._run_folder.metrics(self.status().row())

    # --- peers ------------------------------------------------------------------------------------

    def joined(self, peer: Peer) -> None:
        meter = self.meters.node(peer.name)
        meter.device, meter.state = peer.device, "working"
        if self._samples is not None:
            self._samples.joined(peer)
            if peer.samples is None and self._settings.data == "cached":
                self._log("no cache", f"{peer.name} {KEEPS_NONE}")
        slots = peer.cores // self._settings.threads
        self.dispatch(ev.Joined(peer.name, peer.machine, slots, peer.guess_seconds))
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

    def look(self, read: Callable[[Module], T], found: Callable[[T], None]) -> None:
        """Call `read(model)` between two steps; `found` gets what it returns, on the event loop."""
        self._actor.call(lambda: read(self._learner.flat.module), found)

    def evaluate(self, effect: ev.Evaluate) -> None:
        self._evaluator.measure(self._actor)

    def _evaluated(self, found: dict[str, float]) -> None:
        self._callbacks.tell(lambda callback: callback.on_evaluate(self.status(), found))

    def _on_unexpected_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run after an exception that nothing handled: its state may be wrong."""
        if self.is_over:
            return
        loop.default_exception_handler(context)
        self._broke(context.get("exception") or RuntimeError(context["message"]))

    def learner_broke(self, error: BaseException) -> None:
        reason = f"{setup.describe_failure(error)}; {self._journal.store.last_good}"
        # A step that was decided before the end failed after it: so the run did not end in order.
        if self._finish is not None and not self._finish.error:
            self._finish = ev.Finish("", reason)
        self.dispatch(ev.Broke(reason))

    def _broke(self, error: BaseException) -> None:
        self.dispatch(ev.Broke(setup.describe_failure(error)))

    # --- notes and status -------------------------------------------------------------------------

    def note(self, effect: ev.Note) -> None:
        self.recent_events.append((time.monotonic(), effect.kind, effect.text))
        if effect.kind == ROUND_LENGTHS:
            self._run_folder.manifest(effect.facts)

    def _log(self, kind: str, text: str, **facts: Any) -> None:
        """Show a note that is not from the core, and write it to the ledger."""
        self.note(ev.Note(kind, text))
        self._journal.record({"kind": kind, "text": text, **facts})

    def _storage_note(self, text: str) -> None:
        self._log("storage", text)

    def finish(self, effect: ev.Finish) -> None:
        self._finish = effect
        self._over.set()
        self.note(ev.Note("finished", f"training ended: {effect.error or effect.reason}"))

    def seconds(self) -> float:
        """How long the run has trained in all its lives, each from its first lease."""
        return self._seconds or self._view.seconds(self._loop.time())

    def say(self, kind: str, text: str, node: str) -> None:
        self._log(kind, text, node=node)

    def status(self) -> RunStatus:
        return self.meters.status(
            run=self._run_folder.name,
            address=self.address,
            parameters=self._parameters,
            settings=self._settings,
            view=self._view,
            seconds=self.seconds(),
            scaling=self._prepared.scaling.text if self._prepared.scaling is not None else "",
            round_rate=self._prepared.rounds.rate if self._prepared.rounds is not None else 1.0,
        )
