"""The body of a node: one connection to the coordinator, and what `NodeCore` decides to do on it.

Greets, checks the model against the coordinator's, beats, and ends. Knows no tensors: the executor computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from w5xde.callbacks import Callback
from w5xde.callbacks.status import NodeReport
from w5xde.config import Settings
from w5xde.control import node as nd
from w5xde.errors import JoinError, TrainingError, W5xdeError
from w5xde.learn.job.code.origin import JobOrigin
from w5xde.learn.job.job import Job, describe
from w5xde.learn.job.node_setup import NodeParts, prepare_node
from w5xde.learn.model.device import choose_device
from w5xde.learn.model.route import VectorRoute
from w5xde.messages import (
    Beat,
    Bye,
    Cancel,
    Difference,
    Leave,
    Message,
    Params,
    Ready,
    Refuse,
    Rejected,
    Welcome,
    Work,
)
from w5xde.protocol.session import NODE
from w5xde.protocol.wire import Body
from w5xde.runtime.admission.node_pass import OTHER_RUN, NodePass
from w5xde.runtime.net.connection import Connection, Owner
from w5xde.runtime.net.dialer import Dialer
from w5xde.runtime.net.sockets import configure
from w5xde.runtime.node.executor import WorkExecutor
from w5xde.runtime.node.limits import DISCARDED, WELCOME_LIMITS
from w5xde.runtime.node.sample_cache import CacheKey, SampleCache, Unusable, open_cache
from w5xde.runtime.node.worker import NodeWorker
from w5xde.runtime.system.machine import host_name
from w5xde.runtime.system.memory import return_freed
from w5xde.runtime.system.shared_memory import NodeRegions
from w5xde.runtime.telemetry.callback_runner import CallbackRunner

# More than this machine holds: the coordinator would send the same again.
TOO_LARGE = "W5-121"
# How long the node waits for the coordinator to read its goodbye.
PARTING_SECONDS = 1.0
# A reason must fit into a greeting's limit even if each character takes four bytes.
REASON_CHARACTERS = 900


class Node:
    """One node, from the first greeting to the last."""

    def __init__(
        self,
        job: Job,
        node_pass: NodePass,
        settings: Settings,
        note: Callable[[str, str], None] = lambda kind, text: None,
        callbacks: Iterable[Callback] = (),
        share: NodeRegions | None = None,
    ) -> None:
        """`share` is the memory that this node shares with the coordinator that started it."""
        self._job = job
        self._share = share
        self._pass = node_pass
        self._route = Dialer(node_pass.ticket, settings)
        self._settings = settings
        self._device = choose_device(settings.devices)
        self._note = note
        self._callbacks = CallbackRunner(callbacks, lambda text: note("callback failed", text))
        # Asked for in every greeting; the coordinator decides which name the node has in the run.
        self._wanted_name = settings.node_name or host_name()
        self.report = NodeReport(name=self._wanted_name)
        # The threads that the node computes with, and the bytes of its model; zeros before they are known.
        self.model_load = (0, 0)
        self._core = nd.NodeCore(random.Random(), settings.wait_seconds)
        self._connection: Connection | None = None
        self._welcome: tuple[Welcome, Body] | None = None
        self._refusal: W5xdeError | None = None
        self._dial_error: W5xdeError | None = None
        # The cache whose trouble was told.
        self._troubled: SampleCache | None = None
        # Where the job comes from; callers set it for nodes that join from outside.
        self.origin = JobOrigin()

    async def run(self) -> NodeReport:
        """Work until the run is over. Raises the error that keeps this node from it."""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[nd.Exit] = self._loop.create_future()
        self._parted = asyncio.Event()
        self._loop.set_exception_handler(self._on_unexpected_error)
        self._executor = WorkExecutor(
            self.report,
            self._callbacks,
            failed=self._broke,
            finished=self._finished,
            is_cancelled=lambda lease: lease in self._core.cancelled,
            loader_workers=self._settings.loader_workers,
        )
        self._ticker = self._loop.call_later(nd.TICK_SECONDS, self._tick)
        try:
            self._perform(self._core.start(self._loop.time()))
            over = await self._over
        finally:
            self._ticker.cancel()
            self._executor.actor.stop()
            self._executor.stop_readers()
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
            # The coordinator closes the connection when it has read this. If the node closed it first, with
            # a message unread, that would reset the connection and lose the goodbye.
            await self._wait_for_parting()
        connection.close()
        await self._wait_for_parting()

    async def _wait_for_parting(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._parted.wait(), PARTING_SECONDS)

    def leave(self, *, hurries: bool = False) -> None:
        """Leave the run after the message in progress; in a hurry also without it, if it takes long."""
        self._dispatch(nd.LeaveRequested(hurries))

    def _finished(self) -> None:
        worker = self._executor.worker
        cache = worker.cache if worker is not None else None
        for kind, text in worker.take_notes() if worker is not None else ():
            self._note(kind, text)
        if cache is not None and cache.trouble and cache is not self._troubled:
            self._troubled = cache
            self._note("no cache", f"no more samples can be kept here: {cache.trouble}")
        self._dispatch(nd.Finished())

    def _dispatch(self, event: nd.Event) -> None:
        self._perform(self._core.handle(event, self._loop.time()))

    def _perform(self, effects: list[nd.Effect]) -> None:
        for effect in effects:
            match effect:
                case nd.Dial():
                    self._loop.call_later(effect.after_seconds, self._start_dialling)
                case nd.Greet():
                    self._greet()
                case nd.CheckModel():
                    self._executor.actor.call(self._check, self._checked)
                case nd.Handle():
                    self._executor.execute(*effect.item)
                case nd.SayReady() if self._executor.worker is not None:
                    if self._connection is not None:
                        _say_ready(self._connection, self._executor.worker, self.origin.differing)
                    self._executor.become_idle()
                    self._note("joined", f"joined {self.report.run} as {self.report.name} on {self._device}")
                case nd.SayBeat():
                    self._say(Beat())
                case nd.HangUp() if self._connection is not None:
                    self._note("lost", effect.reason)
                    self._connection.abort()
                case nd.Exit():
                    if not self._over.done():
                        self._over.set_result(effect)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(nd.TICK_SECONDS, self._tick)
        self._dispatch(nd.TimePassed())

    # --- connection -------------------------------------------------------------------------------

    def _start_dialling(self) -> None:
        if not self._core.is_over:
            self._dialling = self._loop.create_task(self._dial())
            # An unexpected error must end this node: nothing else awaits the task.
            self._dialling.add_done_callback(lambda done: done.cancelled() or done.result())

    async def _dial(self) -> None:
        def make() -> Connection:
            owner = Owner(
                opened=self._opened,
                heard=self._heard,
                lost=self._lost,
                alive=lambda: self._core.heard(self._loop.time()),
                configure=lambda sock: configure(sock, self._settings),
                place=lambda message, count: self._executor.place(message, count, is_idle=self._core.is_idle),
                admit=self._admit,
            )
            connection = Connection(NODE, owner, WELCOME_LIMITS)
            if self._share is not None:
                connection.share(self._share)
            return connection

        try:
            self._route.follow(await self._pass.renew(was_welcome=bool(self.report.run)))
            await self._route.dial(make)
        except JoinError as error:
            if error.code == OTHER_RUN:
                self._refuse(error)
                return
            self._dial_error = error
            self._dispatch(nd.Lost(error.what))
        except W5xdeError as error:
            # The user's error, for example a file that is no certificate: trying again would not help.
            self._refuse(error)

    def _admit(self, connection: Connection, message: Message, count: int) -> bool:
        self._executor.check_size(message, count)
        return True

    def _opened(self, connection: Connection) -> None:
        self._connection = connection
        self._parted.clear()
        self._dispatch(nd.Opened())

    def _lost(self, connection: Connection, reason: str) -> None:
        self._connection = None
        self._executor.disconnect()
        self._parted.set()
        self.report.bytes_sent += connection.bytes_sent
        self.report.bytes_received += connection.bytes_received
        if connection.fault:
            self._dial_error = JoinError(reason, code=connection.fault)
        if connection.fault == TOO_LARGE and self._core.has_joined:
            self._refuse(JoinError(reason, code=TOO_LARGE, fix="use smaller batches, or a larger machine"))
        if not self._core.is_over and self._core.has_joined:
            self._note("lost", f"lost the coordinator ({reason}); trying again")
        self._dispatch(nd.Lost(reason))

    def _say(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _greet(self) -> None:
        shares = self._share is not None
        self._say(self._pass.greeting(self._wanted_name, self.report.run, self._device, shares=shares))

    def _heard(self, connection: Connection, message: Message, body: Body) -> None:
        match message:
            case Work() | Params() | Difference():
                kept = self._executor.take(message, body)
                if kept is None:
                    return
                if kept is DISCARDED:
                    self._note("little memory", "a lease does not fit into memory; asking for a smaller one")
                leases = [loan.lease for loan in message.loans] if isinstance(message, Work) else []
                self._dispatch(nd.Given((message, kept), leases))
            case Cancel():
                self._dispatch(nd.Cancelled(message.leases))
            case Rejected():
                self.report.rejected += 1
                self._note("rejected", f"an answer was refused: {message.reason}")
            case Welcome():
                trouble = self._pass.keep(message.credential)
                if trouble:
                    self._note("storage", f"what lets this node come back could not be kept: {trouble}")
                self._welcome = msgspec.structs.replace(message, credential=b""), body
                self.report.run, self.report.name = message.run, message.name
                self._welcomed(message)
            case Refuse() if self._pass.falls_back(message.code):
                self._note("lost", "the coordinator does not know this node any more; trying the ticket")
            case Refuse():
                refusal = JoinError(message.what, code=message.code, why=message.why, fix=message.fix)
                if not self._pass.awaits_another(refusal):
                    self._refuse(refusal)
                    return
                self._dial_error = refusal
                self._note("ticket", f"{message.what}; waiting for another one")
            case Bye():
                self._executor.note_counted(message.counted)
                self.report.over = message.finished and not message.stopped
                if not message.finished:
                    self._refusal = JoinError(
                        f"the coordinator turned this node out: {message.reason}", code="W5-112"
                    )
                self._dispatch(nd.Parted(message.reason, finished=message.finished))

    # --- checking ---------------------------------------------------------------------------------

    def _welcomed(self, welcome: Welcome) -> None:
        try:
            if news := self.origin.compare(welcome, self._device.type):
                self._note("versions", news)
        except JoinError as error:
            self._refuse(error)
        else:
            self._dispatch(nd.Welcomed())

    def _check(self) -> tuple[NodeParts, SampleCache | None] | W5xdeError:
        if self._welcome is None:
            raise ValueError("nothing to check against")
        (welcome, body), worker = self._welcome, self._executor.worker
        try:
            is_fit = worker is not None and worker.parts.fits(welcome)
            parts = (
                worker.parts
                if worker and is_fit
                else prepare_node(self._job, welcome, self._device, self._share)
            )
            parts.prove(welcome, body)
        except W5xdeError as error:
            return error
        if VectorRoute(parts.trainer.blueprint.moving_bytes).is_large:
            return_freed()
        tell = partial(self._loop.call_soon_threadsafe, partial(self._note, "no cache"))
        return parts, _open_cache(welcome, self._settings, tell)

    def _checked(self, checked: tuple[NodeParts, SampleCache | None] | W5xdeError) -> None:
        if isinstance(checked, W5xdeError):
            self._refuse(checked)
        else:
            parts, _ = checked
            self.model_load = parts.welcome.rules.threads, parts.trainer.blueprint.whole_bytes
            self._executor.begin(*checked, self._connection)
            self._dispatch(nd.Checked())

    def _refuse(self, error: W5xdeError) -> None:
        """This node cannot take part."""
        self._refusal = error
        self._dispatch(nd.Parted(error.what, finished=False))

    def _on_unexpected_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        self._broke(context.get("exception") or RuntimeError(context["message"]))

    def _broke(self, error: BaseException) -> None:
        what = f"this node cannot go on: {describe(error)}"
        self._refusal = error if isinstance(error, W5xdeError) else TrainingError(what, code="W5-302")
        self._dispatch(nd.Parted(str(error), finished=False))


def _open_cache(welcome: Welcome, settings: Settings, tell: Callable[[str], object]) -> SampleCache | None:
    """Open the file in which a node keeps samples; None if it keeps none."""
    rules = welcome.rules
    # With `auto`, the nodes that the coordinator's own command started get samples again: that costs less
    # than looking after them.
    if rules.data != "cached" or settings.data == "auto" or not settings.cache_bytes:
        return None
    key = CacheKey(welcome.run, rules.data_digest, rules.data_samples, rules.sample_bytes)
    try:
        return open_cache(key, settings.cache_bytes)
    except Unusable as error:
        tell(f"samples are not kept: {error}")
        return None


def _say_ready(connection: Connection, worker: NodeWorker, differing: dict[str, str]) -> None:
    """Tell the coordinator that model and data match, with what the canary gave and what the cache holds."""
    parts, cache = worker.parts, worker.cache
    proof, columns = parts.proof, parts.columns
    proved = (proof.seconds, connection.reported_link) if proof is not None else (0.0, 0.0)
    kept = (cache.id, cache.slots) if cache is not None else (b"", 0)
    pieces = [proof.body if proof is not None else b"", cache.held() if cache is not None else b""]
    known = (columns.version, columns.digest) if columns is not None and columns.is_whole else (0, b"")
    ready = Ready(parts.layout_digest, *proved, *kept, *known, versions=differing)
    connection.send(ready, [piece for piece in pieces if piece])
