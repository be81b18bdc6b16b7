"""The coordinator: fills the ports of the update pipeline with sockets, threads and tensors, and runs it.

Starts and ends a run, ticks, evaluates, and tells views and callbacks. Decides nothing: the core does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from w5xde.callbacks import Callback
from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.control.membership import TICK_SECONDS
from w5xde.control.pool.members import BEAT_SECONDS
from w5xde.errors import TrainingError
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.model.device import use_threads
from w5xde.runtime.coordinator import setup as begin
from w5xde.runtime.coordinator.ending import HURRIED_PARTING_SECONDS, STOP_NOW_SECONDS, Ending
from w5xde.runtime.coordinator.evaluator import Evaluator
from w5xde.runtime.coordinator.loader import Loader
from w5xde.runtime.coordinator.parameters import ParameterEncoder
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
from w5xde.runtime.telemetry.meters import Meters
from w5xde.runtime.telemetry.sampler import Sampler
from w5xde.runtime.telemetry.status import RunStatus

METRICS_SECONDS = 1.0
EVENTS_KEPT = 200


class Coordinator:
    """One run, from the first connection to the last."""

    def __init__(
        self,
        prepared: Prepared,
        settings: Settings,
        recorder: RunFolder,
        keeper: Journal,
        restored: Restored | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self._settings = settings
        self._prepared = prepared
        self._learner = prepared.learner
        self._recorder = recorder
        self._audience = CallbackRunner(callbacks, lambda text: self._say("callback failed", text))
        self._keeper = keeper
        self._restored = restored
        cut = restored.cut if restored is not None else None
        self._core = begin.build_core(prepared, settings, keeper.life, cut)
        self._view = self._core.view
        self._loader = Loader(prepared.source, settings, begin.start_of(self._view.plan))
        self._reader = begin.build_reader(self._learner, settings)
        self._peers = begin.open_reception(self, prepared, settings, recorder, keeper.life, self._reader)
        self.entry = self._peers.entry
        self._parameters = sum(tensor.numel() for tensor in self._learner.flat.module.parameters())
        recorder.watch(self._storage_note)
        self.meters = Meters()
        if restored is not None:
            self.meters.resume(restored)
        # The newest events, for views: (the loop's time, kind, sentence).
        self.recent_events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_KEPT)
        self.address = ""
        self._finish: ev.Finish | None = None
        self._seconds = 0.0
        # What --json prints; empty until the run is over.
        self.summary: dict[str, Any] = {}

    # --- life -------------------------------------------------------------------------------------

    async def run(self, opened: Callable[[str, int], None]) -> None:
        """Listen, train and end; cancelled, stop now. `opened(host, port)` is called once nodes may join."""
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._loop.set_exception_handler(self._our_bug)
        self._assemble()
        self._next_beat = self._next_row = self._loop.time()
        # Nobody who dials now is heard before we wait for something again.
        before = self._recorder.facts.get("port")
        listener = await begin.listen_again(self._peers, self._settings, before, self._storage_note)
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        try:
            host, port = listener.address
            begin.open_ledger(self._keeper, self._recorder, self._settings, self._core, self._restored)
            # After the ledger: a life in the manifest that the ledger does not know proves a loss.
            self._recorder.manifest({"port": port, "life": self._keeper.life})
            for kind, text in begin.words_of(self._prepared, self._restored, self._core, self._keeper.life):
                self._say(kind, text)
            self.address = f"{host}:{port}"
            self._loader.start(
                read_seconds=self._prepared.read_seconds,
                discovered=lambda epoch, samples: self.dispatch(ev.Discovered(epoch, samples)),
                failed=self._broke,
            )
            self._audience.tell(lambda callback: callback.on_start(self.status()))
            opened(host, port)
            await self._over.wait()
            await self._actor.drain()  # what was decided before the end is still applied
            await self._part(listener, PARTING_SECONDS)
            await self._conclude()
        except BaseException:
            await self._stop_now(listener)
            raise
        finally:
            self._stop_threads()
        if self._error:
            raise TrainingError.because(self._error, self.summary)

    def _assemble(self) -> None:
        """Fill the ports, and everything around the pipeline."""
        self._actor = Actor(
            "w5xde-learner",
            self.learner_broke,
            inline=self._learner.route.is_inline,
            prepare=lambda: use_threads(self._settings.threads),
        )
        self._recheck = Recheck(
            self._prepared,
            self._settings,
            lambda lease: self._view.lease(lease) is not None,
            self._broke,
            self.dispatch,
        )
        parameters = ParameterEncoder(self._learner, self._settings.directions.down, self._loop.time)
        ports = Ports(
            clock=self._loop.time,
            tasks=self._actor,
            peers=self._peers,
            batches=self._loader,
            model=ModelPorts(self._learner, self._prepared.sums, self._reader, parameters),
            verifier=self._recheck,
        )
        budget_bytes = available_bytes() * ARRIVING_PART
        self._pipeline = Pipeline(self._core, self._keeper, ports, self.meters, self, budget_bytes)
        self._writer = Actor("w5xde-keeper", self._broke, inline=False)
        self._sampler = Sampler(self.meters, self._peers.traffic, self._writer, lambda: self._view.progress)
        self._ending = Ending(
            self._learner, self._keeper, self._recorder, self._writer, self._settings, self._storage_note
        )
        self._evaluator = Evaluator(self._prepared, self.meters, self._say, self._evaluated)
        self._keeper.start(self._actor, self._writer, self.dispatch, self._storage_note)

    def dispatch(self, event: ev.Event) -> None:
        self._pipeline.dispatch(event)

    @property
    def updates(self) -> Updates:
        return self._pipeline.updates

    # --- the end ----------------------------------------------------------------------------------

    async def _part(self, listener: Listener, seconds: float) -> None:
        """Lend nothing more, and say goodbye to the nodes, who get this long to hang up."""
        listener.stop_accepting()
        self._ticker.cancel()
        self._seconds = self.seconds()
        self._sampler.count(self._loop.time())
        await self._peers.close(self.reason or "stopped", seconds)
        listener.close()

    async def _conclude(self) -> None:
        """Save the newest good weights, evaluate them, and sum up."""
        self._evaluator.forget()
        # Saved first: whatever the evaluation does, what was learned is kept.
        cut = self._view.cut(self._loop.time())
        saved = await self._ending.save(cut, self.meters)
        if saved.is_durable:
            self.dispatch(ev.Saved(cut.progress.steps))
        if saved.weights_step is not None:
            await self._evaluator.measure_last(self._settings.threads)
        status = self.status()
        self.summary = self.meters.summary(status, self._view.accounts.aside) | saved.facts()
        await self._ending.close(status.row(), self.reason, self._error, self.summary)
        self._audience.tell(lambda callback: callback.on_end(status, self.summary))

    async def _stop_now(self, listener: Listener) -> None:
        """Save nothing more, and leave what is on the disk as it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_NOW_SECONDS):
                await self._part(listener, HURRIED_PARTING_SECONDS)
                if self.address:
                    await self._ending.abandon(self._actor, self.reason, self._error)

    def _stop_threads(self) -> None:
        for owner in (self._loader, self._actor, self._recheck, self._evaluator):
            owner.stop()
        if self.address:
            # Behind whatever is still being written: until then nobody else may have the run.
            self._writer.call(self._recorder.close)
        self._writer.stop(cancels=False)

    def stop(self, reason: str) -> None:
        """Finish politely."""
        self.dispatch(ev.Stop(reason))

    def give_up(self, reason: str) -> None:
        """Training cannot go on."""
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
            self._peers.hurry(now)
        self._keeper.tick(now)
        self._sampler.count(now)
        self._sampler.weigh(now)
        if now >= self._next_row and self._view.has_started:
            self._next_row = now + METRICS_SECONDS
            self._recorder.metrics(self.status().row())

    # --- peers ------------------------------------------------------------------------------------

    def joined(self, peer: Peer) -> None:
        meter = self.meters.node(peer.name)
        meter.device, meter.state = peer.device, "working"
        slots = peer.cores // self._settings.threads
        self.dispatch(ev.Joined(peer.name, peer.machine, slots, peer.guess_seconds))
        self._audience.tell(lambda callback: callback.on_node_join(self.status(), peer.name))

    def left(self, peer: Peer, reason: str) -> None:
        self.meters.node(peer.name).state = "gone"
        self.dispatch(ev.Left(peer.name, reason))
        self._audience.tell(lambda callback: callback.on_node_leave(self.status(), peer.name, reason))

    def close(self, effect: ev.Close) -> None:
        # A node that was only silent is not told to go: it may wake up, and will come back.
        peer = self._peers.get(effect.node)
        if peer is not None:
            self._peers.evict(peer, effect.reason, abruptly=not effect.for_good)

    def ban(self, effect: ev.Ban) -> None:
        self._peers.ban(effect.node, effect.reason)

    # --- steps ------------------------------------------------------------------------------------

    def stepped(self, applied: list[Applied]) -> None:
        self._audience.steps([(each.step.version, each.losses) for each in applied], self.status)

    def evaluate(self, effect: ev.Evaluate) -> None:
        self._evaluator.measure(self._actor)

    def _evaluated(self, found: dict[str, float]) -> None:
        self._audience.tell(lambda callback: callback.on_evaluate(self.status(), found))

    def _our_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception nobody expected: stop loudly rather than train on with who knows what."""
        if self.is_over:
            return
        loop.default_exception_handler(context)
        self._broke(context.get("exception") or RuntimeError(context["message"]))

    def learner_broke(self, error: BaseException) -> None:
        reason = f"{begin.words_for(error)}; {self._keeper.store.last_good}"
        # Decided before the end, applied after it: the run did not end in order after all.
        if self._finish is not None and not self._finish.error:
            self._finish = ev.Finish("", reason)
        self.dispatch(ev.Broke(reason))

    def _broke(self, error: BaseException) -> None:
        self.dispatch(ev.Broke(begin.words_for(error)))

    # --- telling ----------------------------------------------------------------------------------

    def note(self, effect: ev.Note) -> None:
        self.recent_events.append((time.monotonic(), effect.kind, effect.text))

    def _say(self, kind: str, text: str, **facts: Any) -> None:
        """A note of our own: the core's are in the ledger already."""
        self.note(ev.Note(kind, text))
        self._keeper.record({"kind": kind, "text": text, **facts})

    def _storage_note(self, text: str) -> None:
        self._say("storage", text)

    def finish(self, effect: ev.Finish) -> None:
        self._finish = effect
        self._over.set()
        self.note(ev.Note("finished", f"training ended: {effect.error or effect.reason}"))

    def seconds(self) -> float:
        """How long training has gone on, since the first batch was lent, in all lives."""
        return self._seconds or self._view.seconds(self._loop.time())

    def say(self, kind: str, text: str, node: str) -> None:
        self._say(kind, text, node=node)

    def status(self) -> RunStatus:
        return self.meters.status(
            run=self._recorder.name,
            address=self.address,
            parameters=self._parameters,
            settings=self._settings,
            progress=self._view.progress,
            steps_total=self._view.plan.steps_total,
            seconds=self.seconds(),
            batches_relent=self._view.batches_relent,
        )
