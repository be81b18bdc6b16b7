"""The coordinator of a pool: each call of its user is a step whose sum is handed over instead of applied.

Nodes, leases, checks and sums are those of a run in sync mode. Only the plan is not known beforehand: it
comes call by call, one at a time. Decides nothing: the core does.
"""

from __future__ import annotations

import contextlib
import re
import sys
from concurrent.futures import Future
from dataclasses import dataclass, field

from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.control.pool.names import is_local_name
from w5xde.errors import StorageError, TrainingError
from w5xde.learn.data.payload import Packed
from w5xde.learn.job.pool_setup import PoolSetup
from w5xde.runtime.calls.unkept import NoJournal, TemporaryFolder
from w5xde.runtime.coordinator.body import Coordinator
from w5xde.runtime.pipeline.steps import Applied
from w5xde.sanitize import harmless

# Notes that say nothing to the user of a pool: no call is an epoch to them, and nothing is kept.
_UNTOLD = {"epoch", "finished", "storage", "stalled"}


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that its caller waits for: its parts, the mean loss that will answer it, and its number."""

    parts: list[Packed]
    answer: Future[float] = field(default_factory=Future)
    number: int = -1


class CallCoordinator(Coordinator):
    """Answers calls until it is stopped. All of its methods are called on its event loop."""

    def __init__(self, pool: PoolSetup, settings: Settings) -> None:
        folder = TemporaryFolder(settings)
        try:
            super().__init__(pool.prepared, settings, folder, NoJournal(folder))
        except BaseException:
            folder.close()
            raise
        self._source = pool.source
        self._pending: PendingCall | None = None
        self._calls = 0

    # --- calls ------------------------------------------------------------------------------------

    def begin(self, call: PendingCall) -> None:
        """Lend the parts of a call to nodes, as soon as there are any."""
        if self.is_over:
            call.answer.set_exception(self.error_of_end())
            return
        call.number, self._calls = self._calls, self._calls + 1
        self._pending = call
        self._source.packed.update({(call.number, i): part for i, part in enumerate(call.parts)})
        self.dispatch(ev.Called(call.number, [part.samples for part in call.parts]))

    def withdraw(self, call: PendingCall, reason: str) -> None:
        """The caller waits no longer: cancel what nodes compute for it."""
        if call is self._pending:
            self.dispatch(ev.Withdrawn(call.number, reason))

    def stepped(self, applied: list[Applied]) -> None:
        for each in applied:
            self._answer(each.step.plan.epoch, each.loss)

    def given_up(self, effect: ev.SetAside) -> None:
        on_nodes = f" (on {', '.join(effect.nodes)})" if effect.nodes else ""
        self._answer(
            effect.plan.epoch,
            TrainingError(
                f"a part of the batch fails wherever it is tried{on_nodes}: {_as_of_calls(effect.reason)}",
                code="W5-276",
                fix="correct the loss or the batch; nothing was added to the gradients",
            ),
        )

    def finish(self, effect: ev.Finish) -> None:
        super().finish(effect)
        if self._pending is not None:
            self._answer(self._pending.number, self.error_of_end())

    def _answer(self, number: int, found: float | TrainingError) -> None:
        pending = self._pending
        # A call may be answered in the moment in which it is withdrawn.
        if pending is None or pending.number != number:
            return
        self._pending = None

        def answer() -> None:
            if isinstance(found, TrainingError):
                pending.answer.set_exception(found)
            else:
                pending.answer.set_result(found)

        if self._settings.verify:
            # An answer that came too late may still be compared: that draws from the caller's generators.
            self._recheck.settle(answer)
        else:
            answer()

    def error_of_end(self) -> TrainingError:
        return TrainingError(f"the pool has ended: {self.end.reason or 'it broke'}", code="W5-279")

    def ended(self) -> None:
        """The event loop has ended, in order or not: nobody may wait for it."""
        if self._pending is not None:
            self._pending.answer.set_exception(self.error_of_end())
        # A disk that fails at the very end is nobody's concern.
        with contextlib.suppress(StorageError):
            self.gatekeeper.forget_identity()
        if not self.address:
            self._run_folder.discard()

    # --- the end, and what the user is told -----------------------------------------------------------

    async def _conclude(self) -> None:
        """Nothing is saved: the model is the caller's."""

    def learner_broke(self, error: BaseException) -> None:
        self._broke(error)

    def note(self, effect: ev.Note) -> None:
        super().note(effect)
        node = str(effect.facts.get("node", ""))
        is_usual = effect.kind in _UNTOLD or (effect.kind == "joined" and is_local_name(node))
        log = self._settings.log
        if log == "verbose" or (log == "normal" and not is_usual):
            print(f"w5xde: {harmless(_as_of_calls(effect.text))}", file=sys.stderr, flush=True)


def _as_of_calls(text: str) -> str:
    """A sentence of the core or of a node, for the user of a pool, to whom a batch is a part of a call."""
    text = re.sub(r"\bbatch(?:es)? (\d+(?: to \d+)?) of epoch (\d+)", r"part \1 of call \2", text)
    return re.sub(r"^the loss of batch (\d+) is", r"the loss of part \1 is", text)
