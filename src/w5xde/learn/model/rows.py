"""Rows: vectors that lie one behind the other in one block of memory, so that one operation fills them all.

Knows nothing of batches and sockets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w5xde.learn.model.layout import Blueprint, Vector


class Row(Vector):
    """A vector that is one row of a block."""

    __slots__ = ("block",)

    def __init__(self, raw: Tensor, parts: list[Tensor], block: Block) -> None:
        super().__init__(raw, parts)
        self.block = block


class Block:
    """Vectors in one piece of CPU memory. The block can be reused when all rows that it gave out are back."""

    def __init__(self, blueprint: Blueprint, count: int) -> None:
        raw = torch.zeros(count, blueprint.moving_bytes, dtype=torch.uint8)
        # One tensor for each part, with a row for each vector.
        self.parts = blueprint.parts(raw)
        self.rows = [Row(raw[i], [part[i] for part in self.parts], self) for i in range(count)]
        self._given = 0
        # Another thread may take rows back, so this only grows until `give` clears it.
        self._returned: list[Row] = []

    def give(self, count: int) -> list[Row]:
        self._returned.clear()
        self._given = count
        return self.rows[:count]

    def take_back(self, row: Row) -> None:
        self._returned.append(row)

    @property
    def is_free(self) -> bool:
        return len(self._returned) == self._given
