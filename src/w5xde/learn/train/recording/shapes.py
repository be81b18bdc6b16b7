"""Batches by their shape: what of a node's work is recorded, grouped, compared and believed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from w5xde.learn.train.recording.group import SIZE_MAX, Group
from w5xde.learn.train.recording.record import Recording, Unfit

# A batch that takes longer than this, so many times in a row, has little to gain.
SMALL_SECONDS = 0.005
TIMED_MAX = 8
# So many batches of a shape are compared with the real thing; then the 8th, 16th, 32nd…, and each of these.
COMPARED_FIRST = 4
COMPARED_EVERY = 512
# Batches of ever new shapes are not worth watching.
SHAPES_MAX = 16

CHANGED = (
    "the loss is no longer the function of model and batch that it was: some batches since may be wrong. Use"
    " --recording off, or keep what changes in a buffer"
)


class Shape:
    """Batches of one shape, and how far we are with recording them."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.is_unfit = False
        self._batches = 0
        self._seconds = math.inf
        self._group: Group | None = None
        self._has_no_group = False
        self._groups = 0
        # How often each place in a group was compared.
        self._compared = [0] * SIZE_MAX

    def watch(
        self,
        inputs: list[Tensor],
        steady: Sequence[Tensor],
        parameters: Sequence[Tensor],
        compute: Callable[[], Tensor],
    ) -> Tensor | None:
        """The loss of a batch, computed as always and maybe watched. None: it cannot be, do it again."""
        if self._seconds > SMALL_SECONDS:
            started = time.perf_counter()
            loss = compute()
            self._seconds = time.perf_counter() - started
            self._batches += 1
            # Something larger spends its time in the kernels, and would only keep memory. The first batches
            # of a small one may take long too: they load and warm up.
            self.is_unfit = self._seconds > SMALL_SECONDS and self._batches == TIMED_MAX
            return loss
        try:
            self.recording = Recording(inputs, steady, parameters, compute)
        except Unfit:
            self.is_unfit = True
            return None
        self._batches = 0
        return self.recording.watched_loss

    def is_next_compared(self) -> bool:
        """Counts a batch; whether it is to be compared: the first few are, then ever more rarely."""
        self._batches += 1
        n = self._batches
        return n <= COMPARED_FIRST or not n & (n - 1) or not n % COMPARED_EVERY

    def give_up(self) -> None:
        self.recording, self.is_unfit = None, True
        self.give_up_group()

    @property
    def group(self) -> Group | None:
        """Several batches at once, if their recording is believed and can be made to."""
        if self._group is None and not self._has_no_group and self.recording is not None:
            if self._batches < COMPARED_FIRST:
                return None
            try:
                self._group = Group(self.recording)
            except Exception:
                # It does not fit, or torch says so: then each batch is computed for itself.
                self._has_no_group = True
        return self._group

    def compared_of(self, count: int) -> list[int]:
        """Counts a group of so many batches; which of them are to be compared.

        Each place in a group is, the first few times: a kernel may treat the last rows unlike the others.
        """
        self._groups += 1
        n, places = self._groups, self._compared
        found = [i for i in range(count) if places[i] < COMPARED_FIRST]
        if not found and (not n & (n - 1) or not n % (COMPARED_EVERY // SIZE_MAX)):
            found = [n // 2 % count]
        for i in found:
            places[i] += 1
        return found

    def give_up_group(self) -> None:
        self._group, self._has_no_group = None, True

    def group_differs(self, place: int) -> bool:
        """A group gave something else than this batch; returns whether others were believed before."""
        self.give_up_group()
        return self._compared[place] > COMPARED_FIRST

    def differs(self) -> bool:
        """A batch gave something else than its recording; returns whether others were believed before."""
        self.give_up()
        return self._batches > COMPARED_FIRST


def tensors_of(batch: Any) -> list[Any]:
    """What a batch consists of; tensors, if it can be recorded."""
    if type(batch) in (tuple, list):
        return list(batch)
    return list(batch.values()) if type(batch) is dict else [batch]


class Recordings:
    """A model's batches by shape."""

    def __init__(self) -> None:
        self._shapes: dict[Any, Shape] = {}

    def find(self, batch: Any) -> tuple[Shape, list[Tensor]] | None:
        """Which shape a batch is of, and its tensors; None if it is nothing to be recorded."""
        inputs = tensors_of(batch)
        key: list[Any] = [type(batch), *batch] if type(batch) is dict else [type(batch)]
        for each in inputs:
            if type(each) is not Tensor or each.requires_grad or not each.is_contiguous():
                return None
            key += [each.shape, each.stride(), each.dtype]
        found = tuple(key)
        shape = self._shapes.get(found)
        if shape is None:
            if len(self._shapes) >= SHAPES_MAX:
                return None
            shape = self._shapes[found] = Shape()
        return None if shape.is_unfit else (shape, inputs)
