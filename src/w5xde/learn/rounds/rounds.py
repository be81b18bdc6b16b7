"""Rounds, on the coordinator: the replica that all nodes have, and what each round sends them.

The learner's own parameters are exact. Nodes compute on a *replica*, which follows them by differences that a
codec rounds: what rounding left out of one difference is in the next one. Also says at which rates nodes make
the steps of a round, by running the job's schedule ahead. Knows no nodes and no leases.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from w5xde.compression import NONE
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.model.layout import FlatModel, Vector
from w5xde.learn.rounds.hand_over import HandOver
from w5xde.learn.rounds.replica import Replica, move_replica, replica_digest
from w5xde.message_types import StepRates
from w5xde.messages import AVERAGED, CARRIED, TRAINED, Difference

# A node that missed more rounds than this is sent the parameters instead: they are not much larger.
HISTORY_ROUNDS = 8
# Floats shrink by a tenth, which is worth it on a link that needs rounds.
EXACT_CODEC = "shuffle | zstd:1"


class SentDifference(NamedTuple):
    """What a round sends, and its bytes."""

    message: Difference
    pieces: list[memoryview]


class Rounds:
    """The replica of one learner, and the schedule of its nodes' steps. Belongs to the learner's thread."""

    def __init__(
        self,
        flat: FlatModel,
        optimizer: Optimizer,
        scheduler: Any,
        hand_over: HandOver,
        codec: str,
        rate: float,
    ) -> None:
        """`rate` is a factor on the job's learning rate."""
        self._flat = flat
        self._optimizer = optimizer
        self._scheduler = scheduler
        self.codec = codec
        self._pipeline = parse(codec)
        # For what must arrive as it is.
        self._exact_codec = NONE if codec == NONE else EXACT_CODEC
        self._hand_over = hand_over
        self._parameters = [flat.tensors[entry] for entry in flat.blueprint.trained]
        self.vectors = hand_over.vectors
        self.rate = rate
        self._replica = Vector.over(flat.moving.raw.cpu().clone(), flat.blueprint)
        # The bytes of what the last round sent, as nodes unpack it, with the statistics of all rounds; None:
        # none did.
        self._last: Tensor | None = None
        self._last_after = 0
        # For each of the optimizer's groups, the sum of the rates of the last round.
        self._rate_sums: list[float] = []
        self._history: deque[SentDifference] = deque(maxlen=HISTORY_ROUNDS)
        self._digest = replica_digest(self._replica.raw, None)
        self._step_rates: StepRates | None = None

    # --- what nodes need --------------------------------------------------------------------------

    def replica(self) -> Replica:
        """A copy of what a column of the newest version starts from."""
        fixed = self._flat.state[self._flat.blueprint.moving_bytes :].cpu()
        whole = torch.cat([self._replica.raw, fixed])
        return Replica(whole.numpy().data, self._last)

    def last_sent(self, version: int) -> SentDifference | None:
        """What the last round sent, for nodes that were just sent the replica; None: there was none."""
        if self._last is None:
            return None
        pipeline = parse(self._exact_codec)
        kept = Difference(self._last_after, version, pipeline.spec, self._digest, adds=False)
        return SentDifference(kept, pipeline.encode(self._last, self.vectors.moving_groups))

    def since(self, version: int, digest: bytes, newest: int) -> list[SentDifference] | None:
        """What a replica of this version lacks of the newest one; None: too much, or it is no such replica.

        A digest that is empty is not compared.
        """
        if version == newest:
            return [] if digest in (b"", self._digest) else None
        places = [i for i, sent in enumerate(self._history) if sent.message.after == version]
        if not places:
            return None
        before = self._history[places[0] - 1] if places[0] else None
        if digest and (before is None or before.message.replica != digest):
            return None
        return [self._history[i] for i in range(places[0], len(self._history))]

    def step_rates(self, version: int, steps: int) -> StepRates:
        """The rates of the round that begins after `version` steps."""
        known = self._step_rates
        if known is None or (known.step, len(known.of_steps)) != (version, steps):
            with _schedule_restored(self._optimizer, self._scheduler):
                rates, momenta = self._run_schedule(steps)
            # Only schedules change momenta; the others are those of the job's optimizer.
            kept = [] if self._scheduler is None else momenta
            known = self._step_rates = StepRates(version, rates, kept, self._rate_sums)
        return known

    def forget_rates(self) -> None:
        """The learning rate was changed: the rates of the next round are computed anew."""
        self._step_rates = None

    def _run_schedule(self, steps: int) -> tuple[list[list[float]], list[list[float]]]:
        rates, momenta = [], []
        for _ in range(steps):
            groups = self._optimizer.param_groups
            rates.append([self.rate * float(group["lr"]) for group in groups])
            momenta.append([_momentum(group) for group in groups])
            self._step_schedule()
        return rates, momenta

    def _step_schedule(self) -> None:
        if self._scheduler is not None:
            with warnings.catch_warnings():
                # Schedules warn if their optimizer makes no steps: here nodes make them.
                warnings.simplefilter("ignore", UserWarning)
                self._scheduler.step()

    # --- a round ----------------------------------------------------------------------------------

    def advance(self, mean: Vector, version: int, steps: int) -> None:
        """The learner's parameters have moved by a round that began after `version` steps.

        `mean` is the mean of its columns. Moves the replica and the schedule on.
        """
        rates = self.step_rates(version, steps)
        self._rate_sums = [sum(of_group) for of_group in zip(*rates.of_steps, strict=True)]
        for _ in range(steps):
            self._step_schedule()
        change = self.vectors.new_vector()
        model = zip(self._flat.moving.parts, self._replica.parts, strict=True)
        for group, part, carried in zip(self.vectors.moving_groups, change.parts, mean.parts, strict=True):
            if group.role in (CARRIED, AVERAGED):
                part.copy_(carried)
                continue
            exact, known = next(model)
            if group.role == TRAINED:
                torch.sub(exact.cpu(), known, out=part)
            else:
                part.copy_(exact)
        self._send(change, version, version + steps)

    def _send(self, change: Vector, after: int, version: int) -> None:
        groups = self.vectors.moving_groups
        packed = self._pipeline.pack(change.raw, groups)
        received = self.vectors.new_vector()
        self._pipeline.unpack(packed, received.raw, groups)
        move_replica(self._replica, received, self.vectors)
        self._hand_over.accumulate(
            self._optimizer, self._parameters, self._last, received.raw, version - after
        )
        self._last, self._last_after = received.raw, after
        self._digest = replica_digest(self._replica.raw, self._last)
        message = Difference(after, version, self._pipeline.spec, self._digest)
        self._history.append(SentDifference(message, self._pipeline.compress(packed, groups)))

    # --- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the learner's own state."""
        return {
            "replica": self._replica.raw,
            "last": self._last,
            "after": self._last_after,
            "rate_sums": list(self._rate_sums),
        }

    def load_state(self, state: dict[str, Any], version: int) -> None:
        """Continue from a checkpoint; ValueError if its tensors have other sizes than ours."""
        replica, last = state["replica"], state["last"]
        for given, ours in ((replica, self._replica), (last, self.vectors.new_vector())):
            if given is not None and (given.shape, given.dtype) != (ours.raw.shape, ours.raw.dtype):
                raise ValueError("a replica that is not one of this model")
        self._replica = Vector.over(replica.clone(), self._flat.blueprint)
        self._rate_sums = [float(rate) for rate in state["rate_sums"]]
        self._last = last.clone() if last is not None else None
        self._digest = replica_digest(self._replica.raw, self._last)
        self._last_after, self._step_rates = int(state["after"]), None
        # Nodes that are some rounds behind, or ahead, get all parameters.
        self._history.clear()


def _momentum(group: dict[str, Any]) -> float:
    found = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
    return float(found)


@contextmanager
def _schedule_restored(optimizer: Optimizer, scheduler: Any) -> Iterator[None]:
    """Let a schedule run ahead, and go back to where it was."""
    if scheduler is None:
        yield
        return
    kept = deepcopy(scheduler.state_dict())
    # Copies: a schedule may change a rate that is a tensor in place.
    groups = [
        {key: deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        scheduler.load_state_dict(kept)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
