"""Manners: how batches are computed, by which loss and under which seeds: one in a run, one for each call.

All batches of a run are computed in one manner. Each call of a pool may name another loss, and set flags of
the model. What was recorded in one manner is never replayed in another. Knows no parameters and no sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from torch import Tensor, nn

from w5xde.errors import RemoteProtocolError
from w5xde.learn.job.job import Job
from w5xde.learn.job.pool_job import PoolJob
from w5xde.learn.train.flags import ModelFlags
from w5xde.learn.train.recording.fast_path import FastPath
from w5xde.message_types import Call
from w5xde.messages import Rules

# Calls that differ in loss or flags, as those for a generator and a discriminator do. More are hardly ever in
# use at a time, and recordings take memory.
CALLS_KEPT = 8


class Manner(NamedTuple):
    """The loss of batches, the rules that say which generators are seeded, and recordings made for both."""

    loss: Callable[[nn.Module, Any], Tensor]
    rules: Rules
    fast_path: FastPath


class Manners:
    """Finds the manner for each call."""

    def __init__(
        self, job: Job, rules: Rules, flags: ModelFlags, record: Callable[[Rules], FastPath]
    ) -> None:
        """`record` makes a fast path without recordings."""
        self._job = job
        self._rules = rules
        self._flags = flags
        self._record = record
        self._call: Call | None = None
        # The newest last.
        self._of_calls: dict[Call, Manner] = {}
        self.now = Manner(job.loss, rules, record(rules))

    def take(self, call: Call | None) -> None:
        """Let `now` be the manner of this call, and set the model's flags; None: this is a run.

        Raises RemoteProtocolError if the job or the model does not have what the call names.
        """
        if (call is None) == isinstance(self._job, PoolJob):
            raise RemoteProtocolError("work of a pool for a run, or of a run for a pool", code="W5-120")
        if call is None or call == self._call:
            return
        manner = self._of_calls.pop(call, None) or self._new(call)
        try:
            self._flags.set(call.frozen, call.evaluating)
        except ValueError as error:
            raise RemoteProtocolError(f"flags that do not fit this model: {error}", code="W5-120") from None
        self._call, self.now = call, manner
        self._of_calls[call] = manner
        if len(self._of_calls) > CALLS_KEPT:
            del self._of_calls[next(iter(self._of_calls))]

    def _new(self, call: Call) -> Manner:
        loss = self._job.losses.get(call.loss) if isinstance(self._job, PoolJob) else None
        if loss is None:
            raise RemoteProtocolError(f"no loss {call.loss!r} is known here", code="W5-120")
        seeds = {"seeds_python": call.seeds_python, "seeds_numpy": call.seeds_numpy}
        rules = msgspec.structs.replace(self._rules, **seeds)
        return Manner(loss, rules, self._record(rules))
