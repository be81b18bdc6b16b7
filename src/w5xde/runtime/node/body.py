"""The node's body: one connection and one trainer around the core that decides.

Quick batches are computed right here on the loop; slow ones on a thread, so that heartbeats go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from w5xde.callbacks import Callback
from w5xde.config import Settings
from w5xde.control import node as nd
from w5xde.errors import JoinError, TrainingError, W5xdeError
from w5xde.learn.job.job import Job, describe
from w5xde.learn.job.node_setup import NodeParts, prepare_node
from w5xde.learn.model.buffers import Buffers
from w5xde.learn.model.device import choose_device, use_threads
from w5xde.messages import (
    Answer,
    Beat,
    Bye,
    Cancel,
    Leave,
    Message,
    Params,
    Ready,
    Refuse,
    Rejected,
    Update,
    Welcome,
    Work,
)
from w5xde.protocol.session import NODE
from w5xde.protocol.wire import Body
from w5xde.runtime.admission.node_pass import Pass
from w5xde.runtime.net.connection import Connection, Owner
from w5xde.runtime.net.dialer import Dialer
from w5xde.runtime.net.sockets import configure
from w5xde.runtime.node.limits import WELCOME_LIMITS, Expected
from w5xde.runtime.node.worker import Done, Workbench
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.system.machine import host_name
from w5xde.runtime.system.memory import available_bytes
from w5xde.runtime.telemetry.callback_runner import Audience
from w5xde.runtime.telemetry.status import NodeReport

# Work that takes longer than this is done on a thread, so that the loop keeps beating; back on the loop only
# what is clearly shorter, because a process that had to wait for a core once is not slow.
INLINE_WORK_SECONDS = 0.1
INLINE_AGAIN_SECONDS = 0.02
# What we cannot take, however often it is sent.
TOO_LARGE = "W5-121"
# How long our goodbye may take.
PARTING_SECONDS = 1.0
# A reason must fit into a greeting's limit even if each character takes four bytes.
REASON_CHARACTERS = 900


class Node:
    """One node, from the first greeting to the last."""

    def __init__(
        self,
        job: Job,
        entrance: Pass,
        settings: Settings,
        note: Callable[[str, str], None] = lambda kind, text: None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self._job = job
        self._pass = entrance
        self._route = Dialer(entrance.ticket, settings)
        self._settings = settings
        self._device = choose_device(settings.device)
        self._note = note
        self._audience = Audience(callbacks, lambda text: note("callback failed", text))
        # Asked for at every greeting: the name that was given instead may be free the next time.
        self._wanted_name = settings.node_name or host_name()
        self.report = NodeReport(name=self._wanted_name)
        self._core = nd.NodeCore(random.Random(), settings.wait)
        self._connection: Connection | None = None
        self._bench: Workbench | None = None
        self._buffers = Buffers()
        # Of the coordinator, once our model is the run's.
        self._expected: Expected | None = None
        # Seconds of transfer of this connection that the coordinator knows of.
        self._network_told = 0.0
        self._welcome: tuple[Welcome, Body] | None = None
        self._refusal: W5xdeError | None = None
        self._dial_error: W5xdeError | None = None
        self._idle_since = 0.0

    async def run(self) -> NodeReport:
        """Work until the run is over; errors say why this node could not."""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[nd.Exit] = self._loop.create_future()
        self._parted = asyncio.Event()
        self._loop.set_exception_handler(self._our_bug)
        self._actor = Actor("w5xde-trainer", self._broke, inline=False)
        self._ticker = self._loop.call_later(nd.TICK_SECONDS, self._tick)
        try:
            self._perform(self._core.start(self._loop.time()))
            over = await self._over
        finally:
            self._ticker.cancel()
            self._actor.stop()
            await self._part()
        self.report.reason = over.reason
        if self._refusal is not None:
            raise self._refusal
        if over.error:
            raise self._dial_error or JoinError(
                over.error, code="W5-102", fix="check that a w5xde coordinator listens there, and its log"
            )
        return self.report

    async def _part(self) -> None:
        connection = self._connection
        if connection is None:
            return
        if connection.session.may_say(Leave):
            connection.send(Leave(str(self._refusal or "")[:REASON_CHARACTERS]))
            # The coordinator hangs up when it has read this. Hanging up first, with its next message unread,
            # would reset the connection and our goodbye with it.
            await self._wait_for_parting()
        connection.close()
        await self._wait_for_parting()

    async def _wait_for_parting(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._parted.wait(), PARTING_SECONDS)

    def leave(self) -> None:
        """Go, after the work in hand."""
        self._dispatch(nd.LeaveAsked())

    def _dispatch(self, event: nd.Event) -> None:
        self._perform(self._core.handle(event, self._loop.time()))

    def _perform(self, effects: list[nd.Effect]) -> None:
        for effect in effects:
            match effect:
                case nd.Dial():
                    self._loop.call_later(effect.after_seconds, self._start_dialling)
                case nd.Greet():
                    self._greet()
                case nd.Check():
                    self._actor.call(self._check, self._checked)
                case nd.Handle():
                    self._handle(effect.item)
                case nd.SayReady() if self._bench is not None:
                    self._say_ready(self._bench.parts)
                    self._idle_since = self._loop.time()
                    self._note("joined", f"joined {self.report.run} as {self.report.name} on {self._device}")
                case nd.SayBeat():
                    self._say(Beat())
                case nd.Hang() if self._connection is not None:
                    self._note("lost", effect.reason)
                    self._connection.abort()
                case nd.Exit():
                    if not self._over.done():
                        self._over.set_result(effect)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(nd.TICK_SECONDS, self._tick)
        self._dispatch(nd.Ticked())

    # --- connection -------------------------------------------------------------------------------

    def _start_dialling(self) -> None:
        if not self._core.is_over:
            self._dialling = self._loop.create_task(self._dial())
            # What nobody expected ends this node loudly: nobody else waits for a task.
            self._dialling.add_done_callback(lambda done: done.cancelled() or done.result())

    async def _dial(self) -> None:
        def make() -> Connection:
            owner = Owner(
                opened=self._opened,
                heard=self._heard,
                lost=self._lost,
                alive=lambda: self._core.heard(self._loop.time()),
                configure=lambda sock: configure(sock, self._settings),
                place=self._place,
                admit=self._admit,
            )
            return Connection(NODE, owner, WELCOME_LIMITS)

        try:
            await self._route.dial(make)
        except JoinError as error:
            self._dial_error = error
            self._dispatch(nd.DialFailed(error.what))
        except W5xdeError as error:
            # Our user's, for example a file that is no certificate: trying again would not help.
            self._refusal = error
            self._dispatch(nd.Parted(error.what, finished=False))

    def _place(self, message: Message, count: int) -> Body:
        """Memory for what arrives: parameters may go straight into a model that is not being used."""
        memory = None
        if isinstance(message, Params) and self._bench is not None and self._core.is_idle:
            memory = self._bench.place(message, count)
        return memory if memory is not None else self._buffers.take(count)

    def _admit(self, connection: Connection, message: Message, count: int) -> bool:
        if self._expected is not None:
            self._expected.check_size(message, count)
        return True

    def _opened(self, connection: Connection) -> None:
        self._connection = connection
        self._network_told = 0.0
        self._parted.clear()
        self._dispatch(nd.Opened())

    def _lost(self, connection: Connection, reason: str) -> None:
        self._connection = self._expected = None
        self._parted.set()
        self.report.bytes_sent += connection.bytes_sent
        self.report.bytes_received += connection.bytes_received
        if connection.fault:
            self._dial_error = JoinError(reason, code=connection.fault)
        if connection.fault == TOO_LARGE and self._core.has_joined:
            # It would be sent the same again.
            self._refusal = JoinError(reason, code=TOO_LARGE, fix="use smaller batches, or a larger machine")
            self._dispatch(nd.Parted(reason, finished=False))
        if not self._core.is_over and self._core.has_joined:
            self._note("lost", f"lost the coordinator ({reason}); trying again")
        self._dispatch(nd.Lost(reason))

    def _say(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _say_ready(self, parts: NodeParts) -> None:
        connection, proof = self._connection, parts.proof
        if connection is None:
            return
        if proof is None:
            connection.send(Ready(parts.layout_digest))
        else:
            connection.send(Ready(parts.layout_digest, proof.seconds, connection.link), [proof.body])

    def _greet(self) -> None:
        self._say(self._pass.greeting(self._wanted_name, self.report.run, self._device))

    def _heard(self, connection: Connection, message: Message, body: Body) -> None:
        match message:
            case Work() | Params() if self._expected is not None:
                self._expected.take(message, len(body))
                leases = [loan.lease for loan in message.loans] if isinstance(message, Work) else []
                self._dispatch(nd.Given((message, body), leases))
            case Cancel():
                self._dispatch(nd.Cancelled(message.leases))
            case Rejected():
                self.report.rejected += 1
                self._note("rejected", f"an answer was refused: {message.reason}")
            case Welcome():
                trouble = self._pass.granted(message.credential)
                if trouble:
                    self._note("storage", f"what lets this node come back could not be kept: {trouble}")
                self._welcome = msgspec.structs.replace(message, credential=b""), body
                self.report.run, self.report.name = message.run, message.name
                self._dispatch(nd.Welcomed())
            case Refuse() if self._pass.falls_back(message.code):
                self._note("lost", "the coordinator does not know this node any more; trying the ticket")
            case Refuse():
                self._refusal = JoinError(message.what, code=message.code, why=message.why, fix=message.fix)
                self._dispatch(nd.Parted(message.what, finished=False))
            case Bye():
                if not message.finished:
                    self._refusal = JoinError(
                        f"the coordinator turned this node out: {message.reason}", code="W5-112"
                    )
                self._dispatch(nd.Parted(message.reason, finished=message.finished))

    # --- checking ---------------------------------------------------------------------------------

    def _check(self) -> NodeParts | W5xdeError:
        if self._welcome is None:
            raise ValueError("nothing to check against")
        (welcome, body), bench = self._welcome, self._bench
        try:
            is_fit = bench is not None and bench.parts.fits(welcome)
            parts = bench.parts if bench and is_fit else prepare_node(self._job, welcome, self._device)
            parts.prove(welcome, body)
        except W5xdeError as error:
            return error
        return parts

    def _checked(self, parts: NodeParts | W5xdeError) -> None:
        if isinstance(parts, W5xdeError):
            self._refusal = parts
            self._dispatch(nd.Parted(parts.what, finished=False))
        else:
            if self._bench is None or self._bench.parts is not parts:
                self._bench = Workbench(parts, self._loop.time, lambda lease: lease in self._core.cancelled)
            use_threads(parts.welcome.rules.threads)
            if self._connection is not None:
                self._expected = Expected(parts.trainer.blueprint, available_bytes())
                self._connection.limits = self._expected.limits
            self._dispatch(nd.Checked())

    def _our_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        self._broke(context.get("exception") or RuntimeError(context["message"]))

    def _broke(self, error: BaseException) -> None:
        what = f"this node cannot go on: {describe(error)}"
        self._refusal = error if isinstance(error, W5xdeError) else TrainingError(what, code="W5-302")
        self._dispatch(nd.Parted(str(error), finished=False))

    # --- work -------------------------------------------------------------------------------------

    def _handle(self, item: tuple[Params | Work, Body]) -> None:
        message, body = item
        bench, count = self._bench, len(body)
        if bench is None:
            return
        if isinstance(message, Params):
            params = message
            self._actor.call(lambda: bench.load(params, body), lambda _: self._handled(params, count))
            return
        waited = max(0.0, self._loop.time() - self._idle_since)
        connection = self._connection
        self._actor.call(
            lambda: bench.compute(message, body),
            lambda done: self._answer(connection, message, done, waited, count),
        )

    def _handled(self, message: Params | Work, count: int) -> None:
        if self._expected is not None:
            self._expected.done(message, count)
        self._dispatch(nd.Finished())

    def _answer(
        self, connection: Connection | None, work: Work, done: Done, waited: float, count: int
    ) -> None:
        bench = self._bench
        seconds = done.compute_seconds
        self._count(work, done.answers, seconds, waited)
        # A thread is only worth its switches if the work is long.
        self._actor.inline = seconds < (INLINE_WORK_SECONDS if self._actor.inline else INLINE_AGAIN_SECONDS)
        # Leases of a connection that broke meanwhile are void, and so is their answer.
        is_heard = connection is not None and connection is self._connection
        if connection is not None and is_heard and bench is not None and connection.session.may_say(Update):

            def sent() -> None:
                for vector in done.lent:
                    bench.parts.trainer.recycle(vector)

            codec_seconds = bench.take_codec_seconds()
            network_seconds = self._take_network_seconds(connection)
            self.report.seconds_codec += codec_seconds
            self.report.seconds_network += network_seconds
            update = Update(
                work.version,
                done.answers,
                waited,
                done.core_seconds,
                codec_seconds,
                network_seconds,
                connection.link,
            )
            connection.send(update, done.pieces, sent)
        self._idle_since = self._loop.time()
        self._handled(work, count)

    def _take_network_seconds(self, connection: Connection) -> float:
        """Time of transfers on this connection since the last answer."""
        total = connection.seconds_sending + connection.seconds_receiving
        before, self._network_told = self._network_told, total
        return total - before

    def _count(self, work: Work, answers: list[Answer], seconds: float, waited: float) -> None:
        self.report.seconds_busy += seconds
        self.report.seconds_waiting += waited
        for loan, answer in zip(work.loans, answers, strict=True):
            if not answer.dropped and not answer.failure:
                self.report.batches += loan.stop - loan.start
                loss = self.report.loss = answer.loss_sum / sum(batch.samples for batch in loan.batches)
                self._audience.worked(self.report, loan.stop - loan.start, loss)
