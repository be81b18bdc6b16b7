"""Batches that came together are computed together, before they are asked for one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w5xde.learn.job.job import BatchFailed
from w5xde.learn.model.layout import Block, Blueprint, Vector
from w5xde.learn.train.recording.group import SIZE_MAX, Group
from w5xde.learn.train.recording.shapes import CHANGED, Recordings, Shape

# Blocks that are on their way; a few, because a node has little in hand at a time.
BLOCKS_MAX = 8

# Which batch: its epoch, and its index there.
Key = tuple[int, int]


class Batch(NamedTuple):
    """A batch that is to be computed, with its weight in its step."""

    key: Key
    weight: float
    value: Any


class Known(NamedTuple):
    """What a batch gave; which parameters took no part in it."""

    vector: Vector
    loss: float
    absent: list[int]


class Ahead:
    """Knows what some batches gave before anybody asks."""

    def __init__(
        self,
        recordings: Recordings,
        blueprint: Blueprint,
        gradient_groups: list[list[int]],
        scale: Callable[[float], Tensor],
        is_right: Callable[[Batch, Known], bool],
    ) -> None:
        """`is_right` computes a batch as always and compares."""
        self._recordings = recordings
        self._blueprint = blueprint
        self._gradient_groups = gradient_groups
        self._scale = scale
        self._is_right = is_right
        # None: wrong, although such groups were believed before.
        self._known: dict[tuple[Key, float], Known | None] = {}
        self._blocks: list[Block] = []

    def compute(self, batches: Iterable[Batch]) -> None:
        """Compute those that can be computed in groups; what nobody took from before is forgotten."""
        self.forget()
        alike: dict[tuple[Shape, float], list[tuple[Batch, list[Tensor]]]] = {}
        for batch in batches:
            found = self._recordings.find(batch.value)
            if found is not None:
                alike.setdefault((found[0], batch.weight), []).append((batch, found[1]))
        for (shape, weight), several in alike.items():
            at = 0
            while (group := shape.group) is not None and at + 1 < len(several):
                self._together(shape, group, weight, several[at : at + group.size])
                at += group.size

    def forget(self) -> None:
        """What is known was computed on other parameters, or nobody asks for it any more."""
        self._known.clear()

    def take(self, key: Key, weight: float) -> Known | None:
        """What a batch gave with this weight, if it was computed in a group."""
        if (key, weight) not in self._known:
            return None
        known = self._known.pop((key, weight))
        if known is None:
            raise BatchFailed(CHANGED)
        return known

    def _together(
        self, shape: Shape, group: Group, weight: float, several: list[tuple[Batch, list[Tensor]]]
    ) -> None:
        try:
            losses, gradients = group.run([inputs for _, inputs in several], self._scale(weight))
        except Exception:
            # It has given nothing; each batch for itself says what is wrong with it.
            shape.give_up_group()
            return
        block = self._free_block()
        for part, members in zip(block.parts, self._gradient_groups, strict=False):
            torch.cat([gradients[i] for i in members], dim=1, out=part[: group.size])
        rows = block.give(len(several))
        known = [Known(row, loss, group.absent) for row, loss in zip(rows, losses, strict=False)]
        for place in shape.compared_of(len(several)):
            if not self._is_right(several[place][0], known[place]):
                if shape.group_differs(place):
                    self._known[several[place][0].key, weight] = None
                return
        self._known |= {(batch.key, weight): each for (batch, _), each in zip(several, known, strict=True)}

    def _free_block(self) -> Block:
        for block in self._blocks:
            if block.is_free:
                return block
        block = Block(self._blueprint, SIZE_MAX)
        self._blocks = [*self._blocks[-BLOCKS_MAX + 1 :], block]
        return block
