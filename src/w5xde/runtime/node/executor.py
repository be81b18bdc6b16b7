"""The executor of a node: loads parameters and computes work on the trainer's thread, and sends the answers.

Quick batches are computed on the loop, slow ones on the thread, so that heartbeats go on. Knows no addresses,
tickets or greetings, and does not decide what is next: `control/node.py` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from w5xde.callbacks.status import NodeReport
from w5xde.learn.job.node_setup import NodeParts
from w5xde.learn.model.buffers import Buffers
from w5xde.learn.model.device import use_threads
from w5xde.messages import Answer, Difference, Message, Params, Update, Work
from w5xde.protocol.wire import Body, Stream
from w5xde.runtime.net.connection import Connection
from w5xde.runtime.node.limits import Discard, NodeLimits
from w5xde.runtime.node.readers import BatchReaders
from w5xde.runtime.node.sample_cache import SampleCache
from w5xde.runtime.node.worker import Computed, NodeWorker
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.system.memory import available_bytes, keep_freed_memory
from w5xde.runtime.telemetry.callback_runner import CallbackRunner

# Work that takes longer than this is computed on the thread, so that the loop keeps beating; only work that
# is clearly shorter returns to the loop, because one wait for a core does not make a process slow.
INLINE_WORK_SECONDS = 0.1
INLINE_AGAIN_SECONDS = 0.02


class WorkExecutor:
    """Executes what the coordinator sends to one node. Calls `finished` after each message."""

    def __init__(
        self,
        report: NodeReport,
        callbacks: CallbackRunner,
        failed: Callable[[BaseException], None],
        finished: Callable[[], None],
        is_cancelled: Callable[[int], bool],
        loader_workers: int | None = None,
    ) -> None:
        """`loader_workers`: how many processes read batches, if the node has data; None: the job says."""
        keep_freed_memory()
        self.actor = Actor("w5xde-trainer", failed, inline=False)
        self.worker: NodeWorker | None = None
        self._report = report
        self._callbacks = callbacks
        self._finished = finished
        self._is_cancelled = is_cancelled
        self._loader_workers = loader_workers
        self._loop = asyncio.get_running_loop()
        self._buffers = Buffers()
        # Both belong to a connection on which the model was checked.
        self._connection: Connection | None = None
        self._limits: NodeLimits | None = None
        self._idle_since = 0.0
        # Batches of earlier connections that counted.
        self._counted_before = 0
        # Seconds of transfer on this connection that were reported to the coordinator.
        self._network_seconds_told = 0.0

    def begin(self, parts: NodeParts, cache: SampleCache | None, connection: Connection | None) -> None:
        """The model is checked: accept work on this connection, if it is still open."""
        if self.worker is None or self.worker.parts is not parts:
            self.stop_readers()
            self.worker = NodeWorker(parts, self._loop.time, self._is_cancelled)
            descriptor = connection.descriptor if connection is not None else None
            self.worker.readers = BatchReaders.start(parts.source, self._loader_workers, descriptor)
        self.worker.cache = cache
        use_threads(parts.welcome.rules.threads)
        if connection is not None:
            self._limits = NodeLimits(
                parts.trainer.blueprint, available_bytes(), parts.welcome.rules.sample_bytes, parts.columns
            )
            self._connection, connection.limits = connection, self._limits.frame
            self._network_seconds_told = 0.0

    def note_counted(self, batches: int) -> None:
        """So many batches that were computed on this connection are in steps of the model."""
        self._report.counted = self._counted_before + batches

    def stop_readers(self) -> None:
        """End the processes that read batches."""
        if self.worker is not None and self.worker.readers is not None:
            self.worker.readers.close()

    def become_idle(self) -> None:
        """Count the time from now on as waiting for work."""
        self._idle_since = self._loop.time()

    def disconnect(self) -> None:
        self._connection = self._limits = None
        self._counted_before = self._report.counted

    # --- receiving --------------------------------------------------------------------------------

    def check_size(self, message: Message, body_bytes: int) -> None:
        """Raise before the body is received, if this node does not accept it."""
        if self._limits is not None:
            self._limits.check_size(message, body_bytes)

    def place(self, message: Message, body_bytes: int, *, is_idle: bool) -> Body | Stream:
        """Return memory for a body. Parameters may go straight into a model that is not in use."""
        if self._limits is not None and not self._limits.fits(message, body_bytes):
            return Discard()
        memory = None
        if isinstance(message, Params) and self.worker is not None and is_idle:
            memory = self.worker.place(message, body_bytes)
        return memory if memory is not None else self._buffers.take(body_bytes)

    def take(self, message: Params | Difference | Work, body: Body) -> Body | None:
        """Check a message that has arrived; returns its body, or DISCARDED if this node cannot hold it.

        Returns None if the model was not checked on this connection: then the message must be ignored.
        """
        if self._limits is None:
            return None
        if isinstance(message, Work):
            self.note_counted(message.counted)
        kept = self._limits.take(message, body)
        if isinstance(message, Work) and self.worker is not None:
            self.worker.read_ahead(message, kept)
        return kept

    # --- executing --------------------------------------------------------------------------------

    def execute(self, message: Params | Difference | Work, body: Body) -> None:
        worker, body_bytes = self.worker, len(body)
        if worker is None:
            return
        if not isinstance(message, Work):
            params = message
            self.actor.call(lambda: worker.load(params, body), lambda _: self._done(params, body_bytes))
            return
        waited = max(0.0, self._loop.time() - self._idle_since)
        connection = self._connection

        def answer(computed: Computed) -> None:
            self._count(message, computed, waited)
            # Leases of a connection that broke or ended meanwhile are void, and so is their answer.
            if (
                connection is not None
                and connection is self._connection
                and connection.session.may_say(Update)
            ):
                self._send(connection, worker, message, computed, waited)
            else:
                worker.recycle(computed)
            self.become_idle()
            self._done(message, body_bytes)

        self.actor.call(lambda: worker.compute(message, body), answer)

    def _done(self, message: Params | Difference | Work, body_bytes: int) -> None:
        if self._limits is not None:
            self._limits.done(message, body_bytes)
        self._finished()

    def _send(
        self, connection: Connection, worker: NodeWorker, work: Work, computed: Computed, waited: float
    ) -> None:
        codec_seconds = worker.take_codec_seconds()
        transferring = connection.seconds_sending + connection.seconds_receiving
        network_seconds = transferring - self._network_seconds_told
        self._network_seconds_told = transferring
        self._report.seconds_codec += codec_seconds
        self._report.seconds_network += network_seconds
        update = Update(
            work.version,
            computed.answers,
            waited,
            computed.core_seconds,
            codec_seconds,
            network_seconds,
            connection.reported_link,
            computed.stored,
            computed.squares,
            computed.differs,
            computed.weights,
        )
        connection.send(update, computed.pieces, lambda: worker.recycle(computed))

    def _count(self, work: Work, computed: Computed, waited: float) -> None:
        report, seconds = self._report, computed.compute_seconds
        if seconds:
            # A thread is only worth its switches if the work is long.
            self.actor.inline = seconds < (INLINE_WORK_SECONDS if self.actor.inline else INLINE_AGAIN_SECONDS)
        report.seconds_busy += seconds
        report.seconds_waiting += waited
        for number, (loan, answer) in enumerate(zip(work.loans, computed.answers, strict=True)):
            # What is only measured trains nothing.
            if _is_computed(answer) and not loan.validates:
                report.batches += len(loan.batches)
                counted = sum(batch.samples for batch in loan.batches)
                # A mean of batches that weigh nothing is 0.
                over = (computed.weights[number] or 1.0) if computed.weights else counted
                loss = report.loss = answer.loss_sum / over
                self._callbacks.worked(report, len(loan.batches), loss)


def _is_computed(answer: Answer) -> bool:
    return not answer.dropped and not answer.failure
