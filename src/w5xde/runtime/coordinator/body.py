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
from w5xde.control.coordinator import TICK_SECONDS
from w5xde.control.pool.members import BEAT_SECONDS
from w5xde.errors import TrainingError
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.job.job import describe
from w5xde.learn.model.device import use_threads
from w5xde.learn.step.checkpoint import model_file
from w5xde.runtime.coordinator import setup as begin
from w5xde.runtime.coordinator.ending import keep_last
from w5xde.runtime.coordinator.evaluator import Evaluator
from w5xde.runtime.coordinator.loader import Loader
from w5xde.runtime.coordinator.parameters import ParameterEncoder
from w5xde.runtime.coordinator.peer import Peer
from w5xde.runtime.coordinator.pipeline import Pipeline
from w5xde.runtime.coordinator.ports import ModelPorts, Ports
from w5xde.runtime.coordinator.recheck import Recheck
from w5xde.runtime.coordinator.steps import Applied
from w5xde.runtime.coordinator.updates import ARRIVING_PART, Updates
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.resume import Restored
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.runtime.net.listener import Door
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.system.memory import available_bytes
from w5xde.runtime.telemetry.callback_runner import CallbackRunner
from w5xde.runtime.telemetry.meters import Meters
from w5xde.runtime.telemetry.sampler import Sampler
from w5xde.runtime.telemetry.status import RunStatus

METRICS_SECONDS = 1.0
EVENTS_KEPT = 200
# How long a second Ctrl-C waits for a checkpoint that is being written.
IMPATIENCE_SECONDS = 3.0


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
        self._is_whole = True
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

    # --- life -------------------------------------------------------------------------------------

    async def run(self, opened: Callable[[str, int], None]) -> None:
        """Listen, train, and part with everybody. `opened(host, port)` is called once nodes may join."""
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._loop.set_exception_handler(self._our_bug)
        self._assemble()
        self._next_beat = self._next_row = self._loop.time()
        # Nobody who dials now is heard before we wait for something again.
        before = self._recorder.facts.get("port")
        door = await begin.listen_again(self._peers, self._settings, before, self._storage_note)
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        try:
            host, port = door.address
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
            await self._actor.drain()
        finally:
            await self._part(door)
        if self._finish is not None and self._finish.error:
            raise TrainingError.because(self._finish.error)

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
        self._accountant = Sampler(
            self.meters, self._peers.traffic, self._writer, lambda: self._view.progress
        )
        self._evaluator = Evaluator(self._prepared, self._evaluated, self._evaluation_failed)
        self._keeper.start(self._actor, self._writer, self.dispatch, self._storage_note)

    def dispatch(self, event: ev.Event) -> None:
        self._pipeline.dispatch(event)

    @property
    def updates(self) -> Updates:
        return self._pipeline.updates

    async def _part(self, door: Door) -> None:
        # Nothing else writes when the end is written; but one who wants to stop now is not kept waiting.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._writer.drain(), None if self.is_over else IMPATIENCE_SECONDS)
        door.stop_accepting()
        self._ticker.cancel()
        self._seconds = self.seconds()
        self._accountant.count(self._loop.time())
        await self._peers.close(self.reason or "stopped")
        door.close()
        self._loader.stop()
        self._actor.stop()
        self._recheck.stop()
        self._writer.stop()
        self._evaluator.stop()

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

    def _tick(self) -> None:
        now = self._loop.time()
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        heard = self._peers.take_heard()
        self.dispatch(ev.Ticked(self._accountant.machine, self._accountant.load(now), heard))
        self._peers.tick(now)
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._peers.beat()
            self._peers.hurry(now)
        self._keeper.tick(now)
        self._accountant.count(now)
        self._accountant.weigh(now)
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

    def _our_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception nobody expected: stop loudly rather than train on with who knows what."""
        if self.is_over:
            return
        loop.default_exception_handler(context)
        self._broke(context.get("exception") or RuntimeError(context["message"]))

    def learner_broke(self, error: BaseException) -> None:
        # Half a step may have been applied: what the learner holds now is not to be kept.
        self._is_whole = False
        self.dispatch(ev.Broke(f"{begin.words_for(error)}; {self._keeper.store.last_good}"))

    def _broke(self, error: BaseException) -> None:
        self.dispatch(ev.Broke(begin.words_for(error)))

    # --- evaluation -------------------------------------------------------------------------------

    def _evaluated(self, found: dict[str, float]) -> None:
        self.meters.evaluation = found
        shown = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        self._say("evaluated", f"evaluation: {shown}", metrics=found)
        self._audience.tell(lambda callback: callback.on_evaluate(self.status(), found))

    def _evaluation_failed(self, error: BaseException) -> None:
        self._say("evaluation failed", f"the evaluation failed: {describe(error)}")

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

    # --- the end ----------------------------------------------------------------------------------

    def conclude(self) -> dict[str, Any]:
        """Evaluate a last time, save the model, and sum up."""
        # Saved first: whatever the evaluation does, what was learned is kept.
        self._recorder.save_model(model_file(self._learner.flat.module))
        if self.is_over and self._is_whole and self._settings.checkpoint_every != "off":
            told = keep_last(self._keeper, self._core, self._learner.version, self.meters, self._loop.time())
            if told:
                self._storage_note(told)
        if self.is_over:
            self._evaluator.measure_last()
        status = self.status()
        summary = self.meters.summary(status, self._learner.weights_sha256(), self._view.accounts.aside)
        self._recorder.metrics(status.row())
        wrong = self._finish.error if self._finish is not None else "interrupted"
        self._keeper.stop({"kind": "stop", "reason": self.reason, "error": wrong})
        self._recorder.manifest({"reason": self.reason, "result": summary, "ledger": self._keeper.head})
        self._audience.tell(lambda callback: callback.on_end(status, summary))
        return summary
