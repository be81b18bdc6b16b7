"""The counting model: what the simulated learner knows. Applying a step adds 1 to each of its samples.

Its value is a hash over every sum in the order of application, so that two runs agree only if they applied
the same sums in the same order: the simulator's word for "the same weights".
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tests.sim.scenario import Scenario
from w5xde.control import events as ev
from w5xde.runtime.durable.disk import Piece

# A sum is a pair of sums, or a batch: (epoch, batch, version of the parameters it was computed on).
Sum = tuple[Any, ...]


def leaves_of(total: Any) -> list[Sum]:
    """The batches of a sum, in its order, as sums of one; an empty place has none."""
    if total is None:
        return []
    if len(total) == 3:
        return [total]
    return leaves_of(total[0]) + leaves_of(total[1])


def batches_of(total: Any) -> list[int]:
    return [batch for _, batch, _ in leaves_of(total)]


# What a lie is made of: no sum at all.
LIE: Sum = ("lie",)


class Counter:
    """How often each sample counts."""

    def __init__(self, scenario: Scenario) -> None:
        self._batch_size = scenario.batch_size
        self.version = 0
        self.value = ""
        self.counts = [[0] * sum(sizes) for sizes in scenario.epochs]

    def apply(self, step: ev.Step, total: Sum) -> None:
        sizes, first = step.plan.sizes, step.plan.first
        for each in leaves_of(total) if step.plan.apart else [total]:
            for batch in batches_of(each):
                start = batch * self._batch_size
                for sample in range(start, start + sizes[batch - first]):
                    self.counts[step.plan.epoch][sample] += 1
            self.value = hashlib.sha256(f"{self.value}{each}".encode()).hexdigest()
            self.version += 1

    # --- what a checkpoint keeps ------------------------------------------------------------------

    def capture(self) -> Captured:
        return Captured(self)

    def load(self, files: Mapping[str, bytes]) -> None:
        self.counts = json.loads(files["counts"])
        facts = json.loads(files["facts"])
        self.version, self.value = facts["version"], facts["value"]


class Captured:
    """The learner's state: of odd versions the learner itself, which its next step changes, else a copy."""

    def __init__(self, learner: Counter) -> None:
        self.version = learner.version
        self.is_live = self.version % 2 == 1
        self._learner = learner if self.is_live else copy.deepcopy(learner)

    def files(self) -> dict[str, list[Piece]]:
        facts = {"version": self._learner.version, "value": self._learner.value}
        return {"counts": [json.dumps(self._learner.counts).encode()], "facts": [json.dumps(facts).encode()]}

    def weights_sha256(self) -> str:
        return self._learner.value
