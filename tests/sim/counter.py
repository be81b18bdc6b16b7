"""The counting model: what the simulated learner knows. Applying a step adds 1 to each of its samples.

Its value is a hash over every sum in the order of application, so that two runs agree only if they applied
the same sums in the same order: the simulator's word for "the same weights".
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.sim.scenario import Scenario
from w5xde.control import events as ev
from w5xde.message_types import DIGEST_BYTES
from w5xde.runtime.durable.disk import Piece

# A sum is a pair of sums, or a batch: (epoch, batch, version of the parameters it was computed on), or a
# column of a round: the word, the hash of what it started from, and its batches.
Sum = tuple[Any, ...]
COLUMN = "column"


def is_leaf(total: Sum) -> bool:
    """Whether this is no pair: a batch or a column."""
    return isinstance(total[0], int) or total[0] == COLUMN


def leaves_of(total: Any) -> list[Sum]:
    """The batches of a sum, in its order, as sums of one; an empty place has none."""
    if total is None:
        return []
    if is_leaf(total):
        return list(total[2:]) if total[0] == COLUMN else [total]
    return leaves_of(total[0]) + leaves_of(total[1])


def batches_of(total: Any) -> list[int]:
    return [batch for _, batch, _ in leaves_of(total)]


# What a lie is made of: no sum at all.
LIE: Sum = ("lie",)


def moved(value: str, change: str) -> str:
    """The weights that follow from these by one change."""
    return hashlib.sha256(f"{value}{change}".encode()).hexdigest()


def digest_of(value: str) -> bytes:
    """The hash by which a node and the coordinator compare their weights."""
    return hashlib.blake2b(value.encode(), digest_size=DIGEST_BYTES).digest()


def start_of(value: str, kept: str) -> str:
    """All that a column starts from: the weights, and what the optimizer keeps."""
    return f"{value} with {kept}"


def column(start: str, batches: Sequence[Sum]) -> Sum:
    """What a node gives for a column of these batches that starts from there."""
    return (COLUMN, digest_of(start).hex(), *batches)


class Counter:
    """How often each sample counts."""

    def __init__(self, scenario: Scenario) -> None:
        self._batch_size = scenario.batch_size
        self.version = 0
        self.value = ""
        self.counts = [[0] * sum(sizes) for sizes in scenario.epochs]
        # After which version the last change came, and what the optimizer keeps of it and of all before it.
        self.after = 0
        self.kept = ""

    @property
    def start(self) -> str:
        """What columns of its version start from."""
        return start_of(self.value, self.kept)

    def apply(self, step: ev.Step, total: Sum) -> None:
        plan = step.plan
        for each in leaves_of(total) if plan.apart else [total]:
            for batch in batches_of(each):
                start = batch * self._batch_size
                for sample in range(start, start + plan.sizes[batch - plan.first]):
                    self.counts[plan.epoch][sample] += 1
            self.after, self.kept = self.version, moved(self.kept, str(each))
            self.value = moved(self.value, str(each))
            # A round is one change, and as many versions as it has steps.
            self.version += len(plan.sizes) // plan.columns if plan.columns else 1

    # --- what a checkpoint keeps ------------------------------------------------------------------

    def capture(self) -> Captured:
        return Captured(self)

    def load(self, files: Mapping[str, bytes]) -> None:
        self.counts = json.loads(files["counts"])
        facts = json.loads(files["facts"])
        self.version, self.value = facts["version"], facts["value"]
        self.after, self.kept = facts["after"], facts["kept"]


class Captured:
    """The learner's state: of odd versions the learner itself, which its next step changes, else a copy."""

    def __init__(self, learner: Counter) -> None:
        self.version = learner.version
        self.is_live = self.version % 2 == 1
        self._learner = learner if self.is_live else copy.deepcopy(learner)

    def files(self) -> dict[str, list[Piece]]:
        learner = self._learner
        facts = {name: getattr(learner, name) for name in ("version", "value", "after", "kept")}
        return {"counts": [json.dumps(self._learner.counts).encode()], "facts": [json.dumps(facts).encode()]}

    def weights_sha256(self) -> str:
        return self._learner.value
