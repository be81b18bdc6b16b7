"""Light nodes: many connections in one process that use the real protocol and compute nothing.

Each greets as a node does, and answers every Work at once with real gradients that were computed beforehand.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

import torch

import w5xde
from w5xde.bench import jobs
from w5xde.bench.measure.processes import Line
from w5xde.config import Settings
from w5xde.control.pool.connection_limits import UNAUTHENTICATED_HERE_MAX
from w5xde.control.pool.members import BEAT_SECONDS
from w5xde.errors import TrainingError
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.train.trainer import Task
from w5xde.messages import (
    PROTOCOL_VERSION,
    Answer,
    Beat,
    Bye,
    Hello,
    Message,
    Ready,
    Refuse,
    Rejected,
    Update,
    Welcome,
    Work,
)
from w5xde.protocol.session import NODE
from w5xde.protocol.wire import Body, Limits
from w5xde.runtime.net.connection import Connection, Owner
from w5xde.runtime.net.dialer import Dialer
from w5xde.ticket import Ticket, parse
from w5xde.tree import Span

# Half of the greetings that a coordinator allows at a time from its own machine: closing connections count
# for a while too.
WAVE = UNAUTHENTICATED_HERE_MAX // 2
GRADIENTS_CAPTURED = 16
# Generous: the coordinator is our own.
LIMITS = Limits(meta_bytes_max=2**26, body_bytes_max=2**36)


class CapturedGradients:
    """Gradients of real batches, as they travel, with their losses."""

    def __init__(self, welcome: Welcome, body: Body) -> None:
        parts = prepare_node(jobs.seed, welcome, torch.device("cpu"))
        self.layout_digest = parts.layout_digest
        self._given: deque[tuple[bytes, float]] = deque()
        for index, batch in enumerate(jobs.read_batches(jobs.seed, jobs.BATCH_SIZE)[:GRADIENTS_CAPTURED]):
            samples = len(batch[0])
            outcome = parts.trainer.compute(Task(0, Span(0, 1), 1, samples, [(index, samples, batch)]))
            self._given.append((outcome.vector.raw.numpy().tobytes(), outcome.loss_sum / samples))

        # Once for all nodes: every node gets the same canary.
        parts.prove(welcome, body)
        self.proof = [parts.proof.body] if parts.proof is not None else []

    def next(self) -> tuple[bytes, float]:
        """The next vector and its loss, in turn."""
        self._given.rotate(-1)
        return self._given[0]


class Crowd:
    """All light nodes of one process."""

    def __init__(self, count: int, compute_seconds: float) -> None:
        self._count = count
        # The seconds for a batch that each node reports; they decide the size of its leases.
        self._compute_seconds = compute_seconds
        self._captured: CapturedGradients | None = None
        self._connections: set[Connection] = set()
        self._greeting = asyncio.Semaphore(WAVE)
        self._answered_at: dict[Connection, float] = {}
        # Work that arrived before all nodes had joined: answers would slow down the greeting of the rest.
        self._held: list[tuple[Connection, Work]] | None = []
        self.latencies: list[float] = []
        self.updates = 0
        self.rejected = 0
        self._trouble = ""
        self.is_over = asyncio.Event()

    async def join(self, ticket: Ticket) -> None:
        """Connect all nodes, a few at a time. They answer no Work yet."""
        self._route = Dialer(ticket, Settings(road="tcp"))
        self._proof = ticket.id + ticket.secret.reveal()
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(BEAT_SECONDS, self._beat)
        async with asyncio.TaskGroup() as joining:
            for number in range(self._count):
                await self._greeting.acquire()
                joining.create_task(self._join(f"light-{number + 1}"))

    def begin(self) -> None:
        """Answer all Work from now on."""
        held, self._held = self._held or [], None
        for connection, work in held:
            self._answer(connection, work)

    async def _join(self, name: str) -> None:
        ready = asyncio.Event()

        def heard(connection: Connection, message: Message, body: Body) -> None:
            if isinstance(message, Work) and self._held is not None:
                self._held.append((connection, message))
            elif isinstance(message, Work):
                self._answer(connection, message)
            elif isinstance(message, Welcome):
                self._captured = self._captured or CapturedGradients(message, body)
                connection.send(Ready(self._captured.layout_digest), self._captured.proof)
                ready.set()
            elif isinstance(message, Rejected):
                self.rejected += 1
            elif isinstance(message, Refuse):
                self._trouble = message.what
                ready.set()
            elif isinstance(message, Bye):
                connection.close()

        def opened(connection: Connection) -> None:
            self._connections.add(connection)

        def lost(connection: Connection, reason: str) -> None:
            self._connections.discard(connection)
            ready.set()
            if not self._connections:
                self.is_over.set()

        def make() -> Connection:
            return Connection(NODE, Owner(opened, heard, lost, alive=lambda: None), LIMITS)

        try:
            connection = await self._route.dial(make)
            # Without the name of a machine: nodes of one machine would take turns on its cores.
            connection.send(
                Hello(protocol=PROTOCOL_VERSION, package=w5xde.__version__, name=name, ticket=self._proof)
            )
            await ready.wait()
        finally:
            self._greeting.release()

    def _answer(self, connection: Connection, work: Work) -> None:
        now = self._loop.time()
        if connection in self._answered_at:
            self.latencies.append(now - self._answered_at[connection])
        answers, pieces = [], []
        for loan in work.loans:
            seconds = len(loan.batches) * self._compute_seconds
            vector, loss = self._captured.next() if self._captured is not None else (b"", 0.0)
            pieces.append(vector)
            loss_sum = loss * sum(batch.samples for batch in loan.batches)
            answers.append(Answer(loan.lease, loss_sum=loss_sum, seconds=seconds))
            self.updates += len(loan.batches)
        connection.send(Update(work.version, answers), pieces)
        self._answered_at[connection] = self._loop.time()

    def _beat(self) -> None:
        self._loop.call_later(BEAT_SECONDS, self._beat)
        for connection in self._connections:
            if connection.session.may_say(Beat):
                connection.send(Beat())

    @property
    def lost(self) -> int:
        """The number of nodes without a connection."""
        return self._count - len(self._connections)

    def require_everybody(self) -> None:
        if self.lost:
            raise TrainingError(
                f"{self.lost} of {self._count} light nodes could not join", code="W5-321", why=self._trouble
            )


def be_crowd(line: Line, count: int, compute_seconds: float) -> dict[str, Any]:
    """The process of all light nodes: gets a ticket, reports when all have joined, counts when told to."""
    # Broken connections are counted, not logged a thousand times.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    ticket = parse(line.hear())
    return asyncio.run(_be_crowd(line, count, compute_seconds, ticket))


async def _be_crowd(line: Line, count: int, compute_seconds: float, ticket: Ticket) -> dict[str, Any]:
    crowd = Crowd(count, compute_seconds)
    await crowd.join(ticket)
    crowd.require_everybody()
    line.say("all nodes have joined")
    begun: list[tuple[int, int]] = []
    found: dict[str, Any] = {}

    def obey() -> None:
        word = line.hear()
        if word == "answer":
            crowd.begin()
        elif word == "begin":
            crowd.latencies.clear()
            begun.append((crowd.updates, crowd.rejected))
        else:
            updates, rejected = begun[0]
            found.update(
                updates=crowd.updates - updates,
                rejected=crowd.rejected - rejected,
                latencies=quantiles(crowd.latencies),
                lost=crowd.lost,
            )
            line.say(found)

    asyncio.get_running_loop().add_reader(line.fileno(), obey)
    await crowd.is_over.wait()
    return found


def quantiles(seconds: list[float]) -> dict[str, float | None]:
    """The median, the 99th percentile and the maximum."""
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": None, "p99": None, "most": None}
    last = len(ordered) - 1
    return {"p50": ordered[last // 2], "p99": ordered[int(last * 0.99)], "most": ordered[-1]}
