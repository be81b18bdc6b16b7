"""ModelSnapshots of the model: the bytes of a version, with the step and the epoch that they are of.

Taken where the learner lives, between two steps. Knows nothing of what they are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from w5xde.callbacks.weights import Weights
from w5xde.control.steps.cut import Progress
from w5xde.learn.model.named_state import NamedState
from w5xde.learn.step.learner import Learner
from w5xde.runtime.system.actor import Actor


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """A version of the model."""

    step: int
    epoch: int
    # The whole state; of a small model others may read the same bytes.
    raw: memoryview
    others: dict[str, Tensor]


class ModelSnapshots:
    """Takes snapshots of one learner's model. `progress` says how many steps and epochs the core counted."""

    def __init__(
        self,
        learner: Learner,
        actor: Actor,
        progress: Callable[[], Progress],
        state: Callable[[], memoryview] | None = None,
    ) -> None:
        """`state` gives the bytes of a version that nodes measure, if these are not the learner's own."""
        self._learner = learner
        self._state = state or (lambda: learner.snapshot(whole=True))
        self._actor = actor
        self._progress = progress
        self._named = NamedState(learner.flat)

    def take(self, done: Callable[[ModelSnapshot | None], None]) -> None:
        """Call `done` on the loop with a snapshot; None if the learner failed in the middle of a step."""

        def taken(snapshot: ModelSnapshot | None) -> None:
            counted = self._progress()
            if snapshot is None:
                done(None)
            elif snapshot.step == counted.steps:
                done(replace(snapshot, epoch=counted.epochs))
            else:
                # The core hears of the newest steps in a moment; only then is the epoch known.
                asyncio.get_running_loop().call_soon(self.take, done)

        self._actor.call(lambda: self.take_here() if self._learner.is_whole else None, taken)

    def take_here(self, epoch: int = 0) -> ModelSnapshot:
        """A snapshot of this moment, for the thread that owns the learner."""
        learner = self._learner
        return ModelSnapshot(learner.version, epoch, self._state(), self._named.others())

    def weights(self, snapshot: ModelSnapshot) -> Weights:
        """The state dict of a snapshot."""
        # The bytes of a small model are also what nodes are sent; of a large model each snapshot is a copy.
        raw = snapshot.raw if self._learner.route.is_large else bytearray(snapshot.raw)
        return Weights(self._named.tensors(raw, snapshot.others), snapshot.step, snapshot.epoch)
