"""The service of a pool: runs its coordinator on a thread, and lets another thread wait for calls.

The caller's thread packs the parts, waits, and adds the gradients; the service's thread has the event loop.
Only one of them uses the model at a time. Starts local nodes, and ends everything. Knows nothing of how a
batch is split or which loss is meant.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from w5xde.config import Settings
from w5xde.learn.data.parts import Part
from w5xde.learn.data.payload import pack_batch
from w5xde.learn.job.pool_setup import PoolSetup
from w5xde.learn.model.device import use_threads
from w5xde.learn.model.seeding import as_before
from w5xde.message_types import Call
from w5xde.runtime.calls.body import CallCoordinator, PendingCall
from w5xde.runtime.coordinator.local.memory import LocalMemory
from w5xde.runtime.coordinator.local.nodes import LocalNodes
from w5xde.runtime.node.fork_server import ForkServer
from w5xde.runtime.system.capacity import NodePlan
from w5xde.ticket import Ticket

# How long a call waits without a word if no node is there, and then between two words.
WORD_SECONDS, WORDS_SECONDS = 5.0, 60.0
# How long an interrupted call may take to be withdrawn: until the learner's thread has made its step.
WITHDRAW_SECONDS = 10.0
# How long the coordinator may take to end: its nodes get five seconds of that.
END_SECONDS = 15.0


class CallService:
    """One pool that is open. All of its methods belong to the caller's thread."""

    def __init__(
        self,
        pool: PoolSetup,
        settings: Settings,
        local: tuple[ForkServer | None, NodePlan],
        memory: LocalMemory,
    ) -> None:
        """`local`: what starts nodes on this machine, and how many."""
        self._pool = pool
        self._settings = settings
        self._fork_server, self._plan = local
        self._memory = memory
        self._coordinator = CallCoordinator(pool, settings)
        self._opened: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Not waited for when Python ends: a script may forget to close its pool.
        self._thread = threading.Thread(target=self._run, name="w5xde-pool", daemon=True)

    # --- life -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Listen, and start the local nodes; raises what keeps the coordinator from it."""
        self._thread.start()
        self._opened.result()

    def _run(self) -> None:
        use_threads(self._settings.threads)
        error: BaseException | None = None
        try:
            asyncio.run(self._serve())
        except BaseException as raised:
            error = raised
        if not self._opened.done():
            self._opened.set_exception(error or self._coordinator.error_of_end())
        self._coordinator.ended()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._coordinator.run(self._begin)

    def _begin(self, host: str, port: int) -> None:
        if self._fork_server is not None:
            place = (host, port)
            LocalNodes(self._fork_server, self._coordinator, self._plan, place, self._memory).start()
        self._opened.set_result(None)

    def close(self) -> None:
        """End the coordinator, whose nodes then leave."""
        self._post(self._coordinator.stop, "the pool was closed")
        self._thread.join(END_SECONDS)
        self._pool.learner.let_go()

    @property
    def ticket(self) -> Ticket | None:
        """With which other nodes can join."""
        return self._coordinator.gatekeeper.ticket

    @property
    def ticket_shown(self) -> str:
        """The ticket as the line to join names it."""
        return self._coordinator.gatekeeper.ticket_shown

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can join and nothing is encrypted."""
        return self._coordinator.gatekeeper.is_exposed

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes that are ready."""
        return sorted(name for name, is_ready in self._coordinator.connected.items() if is_ready)

    def _post(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Have the event loop call a function; returns whether there still is one."""
        if self._loop is None or not self._thread.is_alive():
            return False
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False  # it closed in this moment
        return True

    # --- calls ------------------------------------------------------------------------------------

    def call(self, call: Call, parts: list[Part], waiting: Callable[[], str]) -> float:
        """Compute the gradients of these parts on nodes, and add them to the caller's; returns the mean loss.

        `waiting` gives a sentence for the user if no node is there.
        """
        types = self._pool.source.recipe.types
        packed = [pack_batch(part.samples, part.value, types) for part in parts]
        for part in packed:
            part.call = call
        pending, learner = PendingCall(packed), self._pool.learner
        learner.begin_call()
        # To verify an answer is to compute it here, which draws from the caller's own generators.
        with as_before() if self._settings.verify else contextlib.nullcontext():
            loss = self._answer_to(pending, waiting)
        learner.end_call()
        return loss

    def _answer_to(self, pending: PendingCall, waiting: Callable[[], str]) -> float:
        try:
            if not self._post(self._coordinator.begin, pending):
                raise self._coordinator.error_of_end()
            return self._wait(pending, waiting)
        except BaseException:
            is_open = not pending.answer.done()
            if is_open and self._post(self._coordinator.withdraw, pending, "its caller gave it up"):
                wait([pending.answer], WITHDRAW_SECONDS)
            raise

    def _wait(self, pending: PendingCall, waiting: Callable[[], str]) -> float:
        seconds = WORD_SECONDS
        while True:
            try:
                return pending.answer.result(seconds)
            except TimeoutError:
                if not self.nodes:
                    print(f"w5xde: {waiting()}", file=sys.stderr, flush=True)
                    seconds = WORDS_SECONDS
