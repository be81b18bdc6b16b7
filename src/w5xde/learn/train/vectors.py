"""Memory for gradient vectors: each is used again when it has been sent.

Vectors lie in slots that the coordinator reads too, if there are such. Knows no batches and no sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from w5xde.learn.model.layout import Blueprint, Vector
from w5xde.learn.model.route import VectorRoute
from w5xde.learn.model.rows import Block, Row
from w5xde.messages import TRAINED

# As many vectors are kept for later use as a node often sends together, if they are small; at least a few.
SPARE_MAX = 128
SPARE_MIN = 4
SPARE_BYTES_MAX = 4 * 1024 * 1024
# Blocks whose rows are being sent: a node has little work in hand at a time.
BLOCKS_MAX = 8
# Batches of one group, whose vectors share a block: as many as a node often computes together.
BLOCK_ROWS = 16


class Slots(Protocol):
    """Memory for vectors that the coordinator reads where they are."""

    def slots(self, vector_bytes: int) -> list[memoryview]:
        """The memory of each slot, for vectors of this many bytes."""
        ...

    def is_lent(self, slot: int) -> bool:
        """Whether the coordinator still uses the vector that was sent from this slot."""
        ...


class SlotVectors:
    """The vectors in slots. A slot is free if its vector was recycled and the coordinator does not use it."""

    def __init__(self, blueprint: Blueprint, slots: Slots) -> None:
        self._slots = slots
        memory = slots.slots(blueprint.moving_bytes)
        self._vectors = [Vector.over(torch.frombuffer(each, dtype=torch.uint8), blueprint) for each in memory]
        self._taken: set[int] = set()

    def take(self) -> Vector | None:
        """A vector in a free slot."""
        for slot, vector in enumerate(self._vectors):
            if slot not in self._taken and not self._slots.is_lent(slot):
                self._taken.add(slot)
                return vector
        return None

    def recycle(self, vector: Vector) -> bool:
        """Take back a vector; returns whether it lies in a slot."""
        for slot, own in enumerate(self._vectors):
            if own is vector:
                self._taken.discard(slot)
                return True
        return False


class GradientVectors:
    """Joins the gradients of all parameters into vectors."""

    def __init__(self, blueprint: Blueprint, device: torch.device, slots: Slots | None = None) -> None:
        is_shared = device.type == "cpu" and VectorRoute(blueprint.moving_bytes).is_shared
        self._slots = SlotVectors(blueprint, slots) if slots is not None and is_shared else None
        self._blueprint = blueprint
        self._device = device
        self._spare: list[Vector] = []
        self._spare_max = max(SPARE_MIN, min(SPARE_MAX, SPARE_BYTES_MAX // max(1, blueprint.moving_bytes)))
        self._blocks: list[Block] = []
        numbers = {entry: number for number, entry in enumerate(blueprint.trained)}
        # The parameters in each part of a vector, by number.
        self._members = [
            [numbers[entry] for entry in group.entries]
            for group in blueprint.moving_groups
            if group.role == TRAINED
        ]

    def join(self, gradients: Sequence[Tensor], count: int = 1) -> list[Vector]:
        """The vectors of the first `count` batches, given each parameter's gradients, one row for a batch."""
        vectors: Sequence[Vector]
        if count == 1:
            vectors = [self.take()]
            parts = [part.unsqueeze(0) for part in vectors[0].parts]
        else:
            block = self._free_block()
            vectors, parts = block.give(count), [part[: len(gradients[0])] for part in block.parts]
        # Parts that hold buffers follow, and stay as they are.
        for part, members in zip(parts, self._members, strict=False):
            torch.cat([gradients[number] for number in members], dim=1, out=part)
        return list(vectors)

    def take(self) -> Vector:
        """A vector to write into; in a slot if one is free."""
        vector = self._slots.take() if self._slots is not None else None
        if vector is None:
            vector = self._spare.pop() if self._spare else self._blueprint.new_vector(self._device)
        return vector

    def buffer_parts(self, vector: Vector) -> list[Tensor]:
        """The parts of a vector that hold buffers."""
        return vector.parts[len(self._members) :]

    def square(self, vector: Vector) -> float:
        """The squared norm of the gradients in a vector."""
        return sum([_square(part) for part in vector.parts[: len(self._members)]])

    def recycle(self, vector: Vector) -> None:
        """Take back a vector that is no longer read."""
        if isinstance(vector, Row):
            vector.block.take_back(vector)
        elif self._slots is not None and self._slots.recycle(vector):
            return
        elif len(self._spare) < self._spare_max:
            self._spare.append(vector)

    def _free_block(self) -> Block:
        for block in self._blocks:
            if block.is_free:
                return block
        block = Block(self._blueprint, BLOCK_ROWS)
        self._blocks = [*self._blocks[1 - BLOCKS_MAX :], block]
        return block


def _square(part: Tensor) -> float:
    if part.dtype in (torch.float32, torch.float64):
        # A fifth of the time of a norm in float64, and exact enough for an estimate.
        return torch.dot(part, part).item()
    return float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
