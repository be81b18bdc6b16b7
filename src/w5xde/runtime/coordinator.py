"""The coordinator's body: sockets, learner and loader around the core that decides.

    for effect in core.handle(event, now): perform(effect)

Small models are folded and stepped right here on the loop; large ones on a thread of their own, in the
same order. Holds no rule: what is lent, admitted or given up is `control`'s to say.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from w5xde.callbacks import Callback
from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.control.coordinator import TICK_SECONDS, CoordinatorCore, CoreSettings
from w5xde.control.members import BEAT_SECONDS
from w5xde.control.plan import Plan
from w5xde.errors import TrainingError, W5xdeError
from w5xde.learn.device import use_threads
from w5xde.learn.job import describe
from w5xde.learn.learner import Contribution
from w5xde.learn.prepare import Prepared
from w5xde.messages import Answer, Rejected, Update
from w5xde.runtime.actor import Actor
from w5xde.runtime.desk import LendingDesk
from w5xde.runtime.evaluator import Evaluator
from w5xde.runtime.loader import Loader
from w5xde.runtime.metrics import Meters, sane_seconds
from w5xde.runtime.reception import Peer, Reception
from w5xde.runtime.recorder import Recorder
from w5xde.runtime.status import RunStatus
from w5xde.runtime.transport import listen

# Below this an update is folded on the loop: it costs less than handing it to a thread.
INLINE_VECTOR_BYTES = 256 * 1024
METRICS_SECONDS = 1.0
EVENTS_KEPT = 200


class Coordinator:
    """One run, from the first connection to the last."""

    def __init__(
        self, prepared: Prepared, settings: Settings, recorder: Recorder, callbacks: Iterable[Callback] = ()
    ) -> None:
        self._settings = settings
        self._prepared = prepared
        self._learner = prepared.learner
        self._recorder = recorder
        self._callbacks = list(callbacks)
        self._loader = Loader(prepared.source, settings)
        self._plan = Plan(
            step_batches=settings.step_batches,
            epoch_limit=settings.epoch_limit,
            step_limit=settings.steps,
            samples=prepared.source.samples,
            batch_size=settings.batch_size,
        )
        self._core = CoordinatorCore(
            self._plan,
            CoreSettings(
                mode=settings.mode,
                staleness=settings.staleness,
                seconds=settings.seconds,
                evaluate_every=settings.evaluate_every,
                evaluates=prepared.evaluate is not None,
            ),
        )
        self._reception = Reception(
            self,
            run=recorder.name,
            layout=self._learner.flat.blueprint.layout,
            rules=prepared.rules,
            vector_bytes=self._learner.vector_bytes,
        )
        self._parameters = sum(tensor.numel() for tensor in self._learner.flat.module.parameters())
        recorder.watch(lambda text: self.recent_events.append((self._loop.time(), "storage", text)))
        self.meters = Meters()
        # The newest events, for views: (the loop's time, kind, sentence).
        self.recent_events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_KEPT)
        self.address = ""
        self._incoming: dict[int, Contribution] = {}
        self._events: deque[ev.Event] = deque()
        self._is_dispatching = False
        self._finish: ev.Finish | None = None
        self._seconds = 0.0
        self._evaluator: Evaluator | None = None
        self._perform: dict[type, Callable[[Any], None]] = {
            ev.Assign: lambda effect: self._desk.lend(effect.node, effect.leases),
            ev.Cancel: lambda effect: self._desk.cancel(effect.node, effect.leases),
            ev.Reject: self._reject,
            ev.Fold: self._fold,
            ev.Step: self._step,
            ev.Evaluate: self._evaluate,
            ev.Close: self._close,
            ev.Note: self._note,
            ev.Finish: self._finished,
        }

    # --- life -------------------------------------------------------------------------------------

    async def run(self, opened: Callable[[str, int], None]) -> None:
        """Listen, train, and part with everybody. `opened(host, port)` is called once nodes may join."""
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._loop.set_exception_handler(self._our_bug)
        inline = self._learner.vector_bytes <= INLINE_VECTOR_BYTES
        self._actor = Actor(
            "w5xde-learner", self._broke, inline=inline, prepare=lambda: use_threads(self._settings.threads)
        )
        self._desk = LendingDesk(
            self._reception,
            self._loader,
            self._learner,
            self._actor,
            self._core.leases,
            dropped=lambda node, lease: self.dispatch(ev.Dropped(node, lease)),
        )
        if self._prepared.evaluate is not None:
            self._evaluator = Evaluator(
                self._prepared.evaluate,
                self._prepared.copy_model,
                self._learner.flat.blueprint.layout,
                self._evaluated,
                self._evaluation_failed,
            )
        self._next_beat = self._next_row = self._loop.time()
        server = await listen(self._reception.make_connection, self._settings.host, self._settings.port)
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        try:
            host, port = server.sockets[0].getsockname()[:2]
            self.address = f"{host}:{port}"
            self._loader.start(
                read_seconds=self._prepared.read_seconds,
                discovered=lambda epoch, samples: self.dispatch(ev.Discovered(epoch, samples)),
                failed=self._broke,
            )
            self._tell(lambda callback: callback.on_start(self.status()))
            opened(host, port)
            await self._over.wait()
        finally:
            server.close()
            self._ticker.cancel()
            self._seconds = self.seconds()
            self._count(self._loop.time())
            await self._reception.close(self.reason or "stopped")
            self._stop_helpers()
        if self._finish is not None and self._finish.error:
            raise TrainingError.because(self._finish.error)

    def _stop_helpers(self) -> None:
        self._loader.stop()
        self._actor.stop()
        if self._evaluator is not None:
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
    def has_nodes(self) -> bool:
        return len(self._reception) > 0

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
                for effect in self._core.handle(self._events.popleft(), self._loop.time()):
                    self._perform[type(effect)](effect)
        finally:
            self._is_dispatching = False

    def _tick(self) -> None:
        now = self._loop.time()
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        self.dispatch(ev.Ticked())
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._reception.beat()
            self._reception.hurry(now)
        self._count(now)
        if now >= self._next_row and self._core.started_at is not None:
            self._next_row = now + METRICS_SECONDS
            self._recorder.metrics(self.status().row())

    def _count(self, now: float) -> None:
        reception = self._reception
        self.meters.sample(now, self._core.progress, reception.bytes_sent, reception.bytes_received)

    # --- peers ------------------------------------------------------------------------------------

    def joined(self, peer: Peer) -> None:
        meter = self.meters.node(peer.name)
        meter.device, meter.state = peer.device, "working"
        self.dispatch(ev.Joined(peer.name))
        self._tell(lambda callback: callback.on_node_join(self.status(), peer.name))

    def heard_from(self, peer: Peer) -> None:
        self._core.members.heard(peer.name, self._loop.time())

    def left(self, peer: Peer, reason: str) -> None:
        self.meters.node(peer.name).state = "gone"
        self.dispatch(ev.Left(peer.name, reason))
        self._tell(lambda callback: callback.on_node_leave(self.status(), peer.name, reason))

    def _close(self, effect: ev.Close) -> None:
        # A node that was only silent is not told to go: it may wake up, and will come back.
        peer = self._reception.get(effect.node)
        if peer is not None:
            self._reception.turn_out(peer, effect.reason, abruptly=not effect.for_good)

    # --- answers in -------------------------------------------------------------------------------

    def updated(self, peer: Peer, update: Update, body: bytearray) -> None:
        vector_bytes = self._learner.vector_bytes
        vectors = [answer for answer in update.answers if not answer.dropped and not answer.failure]
        expected = [answer.lease for answer in update.answers]
        if not peer.works or peer.works[0][0] != expected or len(body) != len(vectors) * vector_bytes:
            self._reception.turn_out(peer, "its answer does not fit what it was lent", abruptly=True)
            return
        now = self._loop.time()
        _, batches, sent_at = peer.works.popleft()
        # Two answers may be read in one go, the second in no time: then what the node itself measured counts.
        computed = sum(sane_seconds(answer.seconds) for answer in update.answers)
        batch_seconds = max(1e-6, computed, now - max(sent_at, peer.answered_at)) / batches
        peer.answered_at = now
        meter = self.meters.node(peer.name)
        meter.seconds_waiting += sane_seconds(update.waited_seconds)
        offset = 0
        for answer in update.answers:
            meter.seconds_busy += sane_seconds(answer.seconds)
            if answer.dropped:
                self.dispatch(ev.Dropped(peer.name, answer.lease))
            elif answer.failure:
                self.dispatch(ev.Failed(peer.name, answer.lease, answer.failure))
            else:
                self._check(peer, answer, body, offset, (batch_seconds, computed / batches))
                offset += vector_bytes

    def _check(
        self, peer: Peer, answer: Answer, body: bytearray, offset: int, took: tuple[float, float]
    ) -> None:
        vector = self._learner.vector(body, offset)
        self._incoming[answer.lease] = Contribution(vector, frozenset(answer.absent), answer.loss_sum)

        def checked(is_finite: bool) -> None:
            if is_finite and math.isfinite(answer.loss_sum):
                self.dispatch(ev.Answered(peer.name, answer.lease, *took))
            else:
                self.dispatch(ev.Failed(peer.name, answer.lease, "its gradient is not finite"))

        self._actor.call(lambda: self._learner.is_finite(vector), checked)

    def _reject(self, effect: ev.Reject) -> None:
        self._incoming.pop(effect.lease, None)
        peer = self._reception.get(effect.node)
        if peer is not None:
            peer.connection.send(Rejected(effect.lease, effect.reason[:4000]))

    def _fold(self, effect: ev.Fold) -> None:
        lease = effect.lease
        contribution = self._incoming.pop(lease.id)
        meter = self.meters.node(lease.node)
        meter.batches += lease.span.count
        meter.samples += lease.samples
        meter.loss = contribution.loss_sum / lease.samples
        step = lease.step
        self._actor.call(lambda: self._learner.fold(step.index, step.count, lease.span, contribution))

    def _step(self, effect: ev.Step) -> None:
        plan = effect.plan

        def stepped(loss_sum: float) -> None:
            keys = [(plan.epoch, plan.first + i) for i in range(plan.count)]
            self._loader.release(keys)
            loss = loss_sum / plan.samples
            self.meters.stepped(loss)
            self.dispatch(ev.Stepped(plan.index))
            if self._callbacks:
                status = self.status()
                self._tell(lambda callback: callback.on_step(status, status.step, loss))

        self._actor.call(lambda: self._learner.step(plan.index), stepped)

    def _our_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception nobody expected: stop loudly rather than train on with who knows what."""
        if self.is_over:
            return
        loop.default_exception_handler(context)
        self._broke(context.get("exception") or RuntimeError(context["message"]))

    def _broke(self, error: BaseException) -> None:
        self.dispatch(ev.Broke(error.what if isinstance(error, W5xdeError) else describe(error)))

    # --- evaluation -------------------------------------------------------------------------------

    def _evaluate(self, effect: ev.Evaluate) -> None:
        # One that takes longer than an epoch is not queued up: the next one sees a newer model.
        evaluator = self._evaluator
        if evaluator is not None and not evaluator.is_busy:
            evaluator.is_busy = True
            self._actor.call(lambda: self._learner.snapshot(whole=True), evaluator.measure)

    def _evaluated(self, found: dict[str, float]) -> None:
        self.meters.evaluation = found
        shown = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        self._note(ev.Note("evaluated", f"evaluation: {shown}", {"metrics": found}))
        self._tell(lambda callback: callback.on_evaluate(self.status(), found))

    def _evaluation_failed(self, error: BaseException) -> None:
        self._note(ev.Note("evaluation failed", f"the evaluation failed: {describe(error)}"))

    # --- telling ----------------------------------------------------------------------------------

    def _note(self, effect: ev.Note) -> None:
        self.recent_events.append((self._loop.time(), effect.kind, effect.text))
        self._recorder.event(effect.kind, effect.text, effect.facts)

    def _finished(self, effect: ev.Finish) -> None:
        self._finish = effect
        self._over.set()
        self._note(ev.Note("finished", f"training ended: {effect.error or effect.reason}"))

    def _tell(self, call: Callable[[Callback], None]) -> None:
        for callback in list(self._callbacks):
            try:
                call(callback)
            except Exception as error:
                # A callback must not end a training: it is dropped, and the user told.
                self._callbacks.remove(callback)
                self._note(
                    ev.Note(
                        "callback failed", f"a callback failed and is not called again: {describe(error)}"
                    )
                )

    def seconds(self) -> float:
        """How long training has gone on, since the first batch was lent."""
        if self._seconds or self._core.started_at is None:
            return self._seconds
        return self._loop.time() - self._core.started_at

    def note(self, kind: str, text: str, node: str) -> None:
        self._note(ev.Note(kind, text, {"node": node}))

    def status(self) -> RunStatus:
        return self.meters.status(
            run=self._recorder.name,
            address=self.address,
            parameters=self._parameters,
            settings=self._settings,
            progress=self._core.progress,
            steps_total=self._plan.steps_total,
            seconds=self.seconds(),
            batches_relent=self._core.mode.batches_relent,
        )

    # --- the end ----------------------------------------------------------------------------------

    def conclude(self) -> dict[str, Any]:
        """Evaluate a last time, save the model, and sum up."""
        # Saved first: whatever the evaluation does, what was learned is kept.
        self._recorder.save(self._learner.save_model)
        if self._prepared.evaluate is not None and self.is_over:
            try:
                self._evaluated(self._prepared.evaluate(self._learner.flat.module))
            except Exception as error:
                self._evaluation_failed(error)
            self._learner.flat.module.train()
        status = self.status()
        summary = self.meters.summary(status, self._learner.weights_sha256())
        self._recorder.metrics(status.row())
        self._recorder.manifest({"reason": self.reason, "result": summary})
        self._tell(lambda callback: callback.on_end(status, summary))
        return summary
