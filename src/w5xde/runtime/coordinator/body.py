"""The coordinator's body: sockets, learner and loader around the core that decides.

    for effect in core.handle(event, now): perform(effect)

Small models are folded and stepped right here on the loop; large ones on a thread of their own, in the
same order. Holds no rule: what is lent, admitted or given up is `control`'s to say.
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
from w5xde.runtime.coordinator.lending import LendingDesk
from w5xde.runtime.coordinator.loader import Loader
from w5xde.runtime.coordinator.parameters import Snapshots
from w5xde.runtime.coordinator.peer import Peer
from w5xde.runtime.coordinator.recheck import Verifier
from w5xde.runtime.coordinator.steps import Applied, StepOwner, Stepping
from w5xde.runtime.coordinator.updates import Intake
from w5xde.runtime.durable.journal import Keeper
from w5xde.runtime.durable.resume import Restored
from w5xde.runtime.durable.run_folder import Recorder
from w5xde.runtime.net.listener import Listener
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.telemetry.callback_runner import Audience
from w5xde.runtime.telemetry.meters import Meters
from w5xde.runtime.telemetry.sampler import Accountant
from w5xde.runtime.telemetry.status import RunStatus

# Below this an update is folded on the loop: it costs less than handing it to a thread.
INLINE_VECTOR_BYTES = 256 * 1024
METRICS_SECONDS = 1.0
# What is decided for the learner, and done together if it comes together.
LEARNERS = (ev.Fold, ev.Step, ev.SetAside, ev.Reopen)
EVENTS_KEPT = 200
# How long a second Ctrl-C waits for a checkpoint that is being written.
IMPATIENCE_SECONDS = 3.0


class Coordinator:
    """One run, from the first connection to the last."""

    def __init__(
        self,
        prepared: Prepared,
        settings: Settings,
        recorder: Recorder,
        keeper: Keeper,
        restored: Restored | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self._settings = settings
        self._prepared = prepared
        self._learner = prepared.learner
        self._recorder = recorder
        self._audience = Audience(callbacks, lambda text: self._say("callback failed", text))
        self._keeper = keeper
        self._restored = restored
        self._is_whole = True
        cut = restored.cut if restored is not None else None
        self._core = begin.build_core(prepared, settings, keeper.life, cut)
        self._loader = Loader(prepared.source, settings, begin.start_of(self._core.plan))
        self._receiver = begin.receiver_of(self._learner, settings)
        self._reception = begin.open_reception(
            self, prepared, settings, recorder, keeper.life, self._receiver
        )
        self.entry = self._reception.entry
        self._parameters = sum(tensor.numel() for tensor in self._learner.flat.module.parameters())
        recorder.watch(self._storage_note)
        self.meters = Meters()
        if restored is not None:
            self.meters.resume(restored)
        # The newest events, for views: (the loop's time, kind, sentence).
        self.recent_events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_KEPT)
        self.address = ""
        self._events: deque[ev.Event] = deque()
        self._is_dispatching = False
        self._untold: deque[list[Applied]] = deque()
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
        door = await begin.listen_again(self._reception, self._settings, before, self._storage_note)
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        try:
            host, port = door.address
            self._recorder.manifest({"port": port})
            begin.open_ledger(self._keeper, self._recorder, self._settings, self._core, self._restored)
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
        """Everybody who works for us, and who performs which effect."""
        inline = self._learner.vector_bytes <= INLINE_VECTOR_BYTES
        self._actor = Actor(
            "w5xde-learner",
            self._learner_broke,
            inline=inline,
            prepare=lambda: use_threads(self._settings.threads),
        )
        self._verifier = Verifier(
            self._prepared, self._settings, self._actor, self._core.leases.holds, self._broke, self.dispatch
        )
        self._desk = LendingDesk(
            self._reception,
            self._loader,
            Snapshots(self._learner, self._settings.directions.down, self._loop.time),
            self._actor,
            self._core.leases,
            self.meters,
            dropped=lambda node, lease: self.dispatch(ev.Dropped(node, lease)),
            sent=self._verifier.sent,
        )
        owner = StepOwner(
            cut=lambda: self._core.cut(self._loop.time()),
            applied=self._applied,
            undone=self.dispatch,
            reopened=self._reopened,
            failed=self._learner_broke,
        )
        self._stepping = Stepping(
            self._learner, self._actor, self._keeper, self._loader, self.meters, owner, self._prepared.robust
        )
        self.intake = Intake(
            self._core,
            self._reception,
            self._learner,
            self._actor,
            self.meters,
            self.dispatch,
            self._receiver,
            self._stepping,
        )
        self._writer = Actor("w5xde-keeper", self._broke, inline=False)
        self._accountant = Accountant(self.meters, self._reception, self._writer, lambda: self._core.progress)
        self._evaluator = Evaluator(self._prepared, self._evaluated, self._evaluation_failed)
        self._keeper.start(self._actor, self._writer, self.dispatch, self._storage_note)
        self._perform: dict[type, Callable[[Any], None]] = {
            ev.Assign: lambda effect: self._desk.lend(effect.node, effect.leases, effect.verify),
            ev.Verify: lambda effect: self._verifier.verify(effect, self._stepping.answer_to),
            ev.Cancel: lambda effect: self._desk.cancel(effect.node, effect.leases),
            ev.Expire: lambda effect: None,
            ev.Reject: self.intake.reject,
            ev.Fold: self._stepping.fold,
            ev.SetAside: self._stepping.set_aside,
            ev.Step: self._stepping.step,
            ev.Reopen: self._stepping.reopen,
            ev.Save: self._save,
            ev.Evaluate: lambda effect: self._evaluator.measure(self._actor),
            ev.Close: self._close,
            ev.Ban: lambda effect: self._reception.ban(effect.node, effect.reason),
            ev.Note: self._note,
            ev.Finish: self._finished,
        }

    async def _part(self, door: Listener) -> None:
        # Nothing else writes when the end is written; but one who wants to stop now is not kept waiting.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._writer.drain(), None if self.is_over else IMPATIENCE_SECONDS)
        door.stop_accepting()
        self._ticker.cancel()
        self._seconds = self.seconds()
        self._accountant.count(self._loop.time())
        await self._reception.close(self.reason or "stopped")
        door.close()
        self._loader.stop()
        self._actor.stop()
        self._verifier.stop()
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
        return {peer.name: peer.is_ready for peer in self._reception}

    @property
    def reason(self) -> str:
        """Why the run ended."""
        return (self._finish.error or self._finish.reason) if self._finish is not None else ""

    def dispatch(self, event: ev.Event) -> None:
        """The whole main loop: decide, then do. What doing causes waits for its turn."""
        self._events.append(event)
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._events:
                event = self._events.popleft()
                effects = self._core.handle(event, self._loop.time())
                # Written down before it is done.
                self._keeper.saw(event, effects)
                for effect in effects:
                    if type(effect) not in LEARNERS:
                        self._stepping.flush()
                    self._perform[type(effect)](effect)
                self._stepping.flush()
                if isinstance(event, ev.Stepped):
                    # Now that they count: whoever is told may ask how far we are.
                    self._audience.steps(self._untold.popleft(), self.status)
        finally:
            self._is_dispatching = False

    def _tick(self) -> None:
        now = self._loop.time()
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        self.dispatch(ev.Ticked(self._accountant.machine, self._accountant.load(now)))
        self._reception.tick(now)
        self.intake.arrivals.tick()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._reception.beat()
            self._reception.hurry(now)
        self._keeper.tick(now)
        self._accountant.count(now)
        self._accountant.weigh(now)
        if now >= self._next_row and self._core.started_at is not None:
            self._next_row = now + METRICS_SECONDS
            self._recorder.metrics(self.status().row())

    # --- peers ------------------------------------------------------------------------------------

    def joined(self, peer: Peer) -> None:
        meter = self.meters.node(peer.name)
        meter.device, meter.state = peer.device, "working"
        slots = peer.cores // self._settings.threads
        self.dispatch(ev.Joined(peer.name, peer.machine, slots, peer.guess_seconds))
        self._audience.tell(lambda callback: callback.on_node_join(self.status(), peer.name))

    def heard_from(self, peer: Peer) -> None:
        self._core.members.heard(peer.name, self._loop.time())

    def left(self, peer: Peer, reason: str) -> None:
        self.meters.node(peer.name).state = "gone"
        self.dispatch(ev.Left(peer.name, reason))
        self._audience.tell(lambda callback: callback.on_node_leave(self.status(), peer.name, reason))

    def _close(self, effect: ev.Close) -> None:
        # A node that was only silent is not told to go: it may wake up, and will come back.
        peer = self._reception.get(effect.node)
        if peer is not None:
            self._reception.turn_out(peer, effect.reason, abruptly=not effect.for_good)

    # --- steps ------------------------------------------------------------------------------------

    def _applied(self, applied: list[Applied]) -> None:
        self._untold.append(applied)
        steps = [each.step.plan.index for each in applied]
        self.dispatch(ev.Stepped(steps, durable=all(each.is_durable for each in applied)))

    def _reopened(self, step: int) -> None:
        self._desk.rewind()
        self.intake.arrivals.reopened(step)

    def _save(self, effect: ev.Save) -> None:
        self._keeper.save(effect.cut, self.meters.kept(), self._loop.time())

    def _our_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception nobody expected: stop loudly rather than train on with who knows what."""
        if self.is_over:
            return
        loop.default_exception_handler(context)
        self._broke(context.get("exception") or RuntimeError(context["message"]))

    def _learner_broke(self, error: BaseException) -> None:
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

    def _note(self, effect: ev.Note) -> None:
        self.recent_events.append((time.monotonic(), effect.kind, effect.text))

    def _say(self, kind: str, text: str, **facts: Any) -> None:
        """A note of our own: the core's are in the ledger already."""
        self._note(ev.Note(kind, text))
        self._keeper.record({"kind": kind, "text": text, **facts})

    def _storage_note(self, text: str) -> None:
        self._say("storage", text)

    def _finished(self, effect: ev.Finish) -> None:
        self._finish = effect
        self._over.set()
        self._note(ev.Note("finished", f"training ended: {effect.error or effect.reason}"))

    def seconds(self) -> float:
        """How long training has gone on, since the first batch was lent, in all lives."""
        return self._seconds or self._core.seconds(self._loop.time())

    def note(self, kind: str, text: str, node: str) -> None:
        self._say(kind, text, node=node)

    def status(self) -> RunStatus:
        return self.meters.status(
            run=self._recorder.name,
            address=self.address,
            parameters=self._parameters,
            settings=self._settings,
            progress=self._core.progress,
            steps_total=self._core.plan.steps_total,
            seconds=self.seconds(),
            batches_relent=self._core.mode.batches_relent,
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
        summary = self.meters.summary(status, self._learner.weights_sha256(), self._core.accounts.aside)
        self._recorder.metrics(status.row())
        wrong = self._finish.error if self._finish is not None else "interrupted"
        self._keeper.stop({"kind": "stop", "reason": self.reason, "error": wrong})
        self._recorder.manifest({"reason": self.reason, "result": summary, "ledger": self._keeper.head})
        self._audience.tell(lambda callback: callback.on_end(status, summary))
        return summary
