"""Rounds in the simulator: the coordinator's history of differences, and the replica that a node has.

The weights are the counting model's value, and a difference is the text that leads from one value to the
next. Which of them a node lacks is decided by the real `Rounds` and `RoundParameters`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from tests.sim.books import require
from tests.sim.counter import Counter, Sum, column, digest_of, moved, start_of
from w5xde.compression import NONE
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.rounds.rounds import HISTORY_ROUNDS, Rounds, SentDifference
from w5xde.message_types import StepRates
from w5xde.messages import Difference, Params, Work
from w5xde.runtime.pipeline.peer import NO_REPLICA


class CountedRounds(Rounds):
    """The real choice of differences, of weights that are the value of a counting model."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._history: deque[SentDifference] = deque(maxlen=HISTORY_ROUNDS)
        self._exact_codec = NONE
        self.vectors = cast(Any, SimpleNamespace(moving_groups=[]))
        self.restored()

    def restored(self) -> None:
        """The counting model is new, or was loaded from a checkpoint."""
        self._history.clear()
        self._note()

    def advanced(self, change: str) -> None:
        """The counting model has made a round."""
        self._note()
        message = Difference(self._counter.after, self._counter.version, NONE, self._digest)
        self._history.append(SentDifference(message, [memoryview(change.encode())]))

    def _note(self) -> None:
        counter = self._counter
        self._digest, self._last_after = digest_of(start_of(counter.value, counter.kept)), counter.after
        self._last = _bytes_of(counter.kept) if counter.kept else None

    def replica(self) -> Replica:
        # Never empty, because torch refuses that.
        state = memoryview(bytearray(f"={self._counter.value}".encode()))
        return Replica(state, self._last)

    def step_rates(self, version: int, steps: int) -> StepRates:
        return StepRates(version, [[1.0]] * steps)


def _bytes_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class NodeReplica:
    """The weights that a node has, and whether they can be those of the coordinator."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._value = self._kept = ""
        # The version; -1: there are none, or they are not those of the coordinator.
        self.version = -1
        # Whether something changed them under our hands, since they were last sent in whole.
        self._is_damaged = False
        # The version that was just sent in whole: the last difference may follow, for the optimizer.
        self._fresh = -1
        # How often they turned out to be wrong, since the node connected.
        self.losses = 0

    @property
    def announced(self) -> tuple[int, bytes]:
        """What a node that comes back says of them, if all is there that a column starts from."""
        is_whole = self.version == 0 or (self.version > 0 and bool(self._kept))
        return (self.version, digest_of(start_of(self._value, self._kept))) if is_whole else NO_REPLICA

    def damage(self) -> None:
        """Bits flip."""
        self._value += "!"
        self._is_damaged = True

    def load(self, params: Params, body: bytes) -> None:
        require(params.whole, f"{self._node} is sent a part of version {params.version}")
        self._value, self._kept = body.decode().removeprefix("="), ""
        self.version = self._fresh = params.version
        self._is_damaged = False

    def follow(self, sent: Difference, body: bytes) -> None:
        """Add what a round changed. Only a replica that was damaged may not fit."""
        fresh, self._fresh = self._fresh, -1
        if not sent.adds:
            require(
                fresh == sent.version,
                f"{self._node} is told what version {sent.version} contains, and has {self.version}",
            )
            self._kept = body.decode()
        elif self.version != sent.after:
            require(
                self._is_damaged and self.version < 0,
                f"{self._node} has version {self.version}, and is sent what changed after {sent.after}",
            )
            return
        else:
            self._value, self._kept = moved(self._value, body.decode()), moved(self._kept, body.decode())
        self.version = sent.version
        if digest_of(start_of(self._value, self._kept)) != sent.replica:
            require(self._is_damaged, f"{self._node} followed to another version {sent.version}")
            self.version = -1
            self.losses += 1

    def fits(self, work: Work) -> bool:
        """Whether the node has what this work is to be computed from; if not, it must have been damaged."""
        self._fresh = -1
        rates = work.rates
        steps = {len(loan.batches) for loan in work.loans}
        is_right = rates is not None and rates.step == work.version and steps == {len(rates.of_steps)}
        require(
            rates is None if work.loans[0].validates else is_right,
            f"{self._node} is to make the steps of {work} by {rates}",
        )
        if self.version != work.version:
            require(
                self._is_damaged and self.version < 0,
                f"{self._node} has version {self.version}, and is sent {work}",
            )
        return self.version == work.version

    def column(self, batches: Sequence[Sum]) -> Sum:
        """What a column of these batches comes to."""
        return column(start_of(self._value, self._kept), batches)
