"""Memory for gradient vectors: each is used again when it has been sent. Knows no batches and no sockets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from w5xde.learn.model.layout import Block, Blueprint, Row, Vector
from w5xde.messages import TRAINED

# As many vectors are kept for later use as a node often sends together, if they are small; at least a few.
SPARE_MAX = 128
SPARE_MIN = 4
SPARE_BYTES_MAX = 4 * 1024 * 1024
# Blocks whose rows are being sent: a node has little work in hand at a time.
BLOCKS_MAX = 8
# Batches of one group, whose vectors share a block: as many as a node often computes together.
BLOCK_ROWS = 16


class GradientVectors:
    """Joins the gradients of all parameters into vectors."""

    def __init__(self, blueprint: Blueprint, device: torch.device) -> None:
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
            vectors = [self._spare.pop() if self._spare else self._blueprint.new_vector(self._device)]
            parts = [part.unsqueeze(0) for part in vectors[0].parts]
        else:
            block = self._free_block()
            vectors, parts = block.give(count), [part[: len(gradients[0])] for part in block.parts]
        # Parts that hold buffers follow, and stay as they are.
        for part, members in zip(parts, self._members, strict=False):
            torch.cat([gradients[number] for number in members], dim=1, out=part)
        return list(vectors)

    def buffer_parts(self, vector: Vector) -> list[Tensor]:
        """The parts of a vector that hold buffers."""
        return vector.parts[len(self._members) :]

    def recycle(self, vector: Vector) -> None:
        """Take back a vector that is no longer read."""
        if isinstance(vector, Row):
            vector.block.take_back(vector)
        elif len(self._spare) < self._spare_max:
            self._spare.append(vector)

    def _free_block(self) -> Block:
        for block in self._blocks:
            if block.is_free:
                return block
        block = Block(self._blueprint, BLOCK_ROWS)
        self._blocks = [*self._blocks[1 - BLOCKS_MAX :], block]
        return block
