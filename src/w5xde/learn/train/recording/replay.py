"""Replays: a recording repeated for other batches, one at a time or several side by side.

A recorded batch of a small model spends its time on calling kernels, not in them. So a replay of several
batches lays their tensors side by side and calls a kernel once for all batches where a rule of `kernel_steps`
allows it. Knows which of its results must be compared with a batch computed plainly, but does not compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from w5xde.learn.model.digest import same_bits, same_loss
from w5xde.learn.torch_private import KernelCall, NotRecordable, map_leaves
from w5xde.learn.train.recording.kernel_steps import Stacked, steps_of
from w5xde.learn.train.recording.record import Recording

# The first results are compared with batches computed plainly; then the 8th, 16th, 32nd…, and each 512th.
COMPARED_FIRST = 4
COMPARED_EVERY = 512

# Runs of several batches before their replay is used, on weights that are at least this far apart.
TRIALS = 4
SPREAD_MIN = 0.1


class Replay:
    """Repeats a recording for `size` batches at a time."""

    def __init__(self, recording: Recording, size: int) -> None:
        self.recording = recording
        self.size = size
        self._runs = 0
        # How often the result at each place was compared.
        self._compared = [0] * size
        # By the id of a tensor's place in the recording; a tensor that is not here is shared by all batches.
        self._stacked: dict[int, Stacked] = {}
        *own, self._scale = recording.inputs
        self._inputs = [self._new(place) for place in own]
        self._steps = [step for call in recording.calls for step in self._steps_of(call)]
        if id(recording.loss) not in self._stacked:
            raise NotRecordable("the loss does not depend on the batch")
        self._losses = self._stacked[id(recording.loss)].all
        gradients = [
            self._stacked[id(each)].all if id(each) in self._stacked else each.expand(size, *each.shape)
            for each in recording.gradients
        ]
        # One row for a batch: a view made once, or a copy made by each run.
        self._rows = [each.view(size, -1) if each.is_contiguous() else each for each in gradients]
        del self._stacked

    def run(self, batches: Sequence[Sequence[Tensor]], scale: Tensor) -> tuple[list[float], list[Tensor]]:
        """The losses, and each parameter's gradients, one row for a batch, valid until the next run.

        With fewer batches than `size`, the rows beyond them mean nothing.
        """
        count = len(batches)
        for number, place in enumerate(self._inputs):
            torch.stack(
                [batch[number] for batch in batches], out=place[:count] if count < self.size else place
            )
        self._scale.copy_(scale)
        for step in self._steps:
            step()
        rows = [each if each.dim() == 2 else each.reshape(self.size, -1) for each in self._rows]
        return self._losses.tolist(), rows

    def compare_next(self, count: int) -> list[int]:
        """Count a run of `count` batches, and return the places in it whose results must be compared.

        Each place is compared the first few times: a kernel may treat the last rows unlike the others.
        """
        self._runs += 1
        runs = self._runs
        places = [place for place in range(count) if self._compared[place] < COMPARED_FIRST]
        if not places and (not runs & (runs - 1) or not runs % (COMPARED_EVERY // self.size)):
            places = [runs // 2 % count]
        for place in places:
            self._compared[place] += 1
        return places

    def is_trusted(self, place: int) -> bool:
        """Whether results at this place have been used without comparison."""
        return self._compared[place] > COMPARED_FIRST

    @property
    def is_compared(self) -> bool:
        """Whether a replay of one batch has passed its first comparisons."""
        return self._compared[0] >= COMPARED_FIRST

    def agrees_with(self, single: Replay) -> bool:
        """Whether this replay gives the bits of a replay of one batch.

        On random weights and shuffled batches: a model that starts with zeros hides differences in rounding.
        """
        recording, generator = self.recording, torch.Generator().manual_seed(0)
        before = [weight.clone() for weight in recording.weights]
        *own, scale = [place.clone() for place in recording.inputs]
        try:
            for weight, kept in zip(recording.weights, before, strict=True):
                if weight.is_floating_point():
                    spread = max(SPREAD_MIN, float(kept.std()) if kept.numel() > 1 else 0.0)
                    weight.copy_(torch.randn(weight.shape, generator=generator).mul_(spread))
            for _ in range(TRIALS):
                batches = [[_shuffled(place, generator) for place in own] for _ in range(self.size)]
                losses, rows = self.run(batches, scale)
                rows = [row.clone() for row in rows]
                for number, batch in enumerate(batches):
                    (loss,), gradients = single.run([batch], scale)
                    same = [same_bits(many[number], one) for many, one in zip(rows, gradients, strict=True)]
                    if not all(same) or not same_loss(losses[number], loss):
                        return False
        finally:
            for weight, kept in zip(recording.weights, before, strict=True):
                weight.copy_(kept)
        return True

    # --- construction -----------------------------------------------------------------------------

    def _new(self, one: Tensor) -> Tensor:
        """Memory for a tensor of each batch, with the recorded strides; for one batch the recorded tensor."""
        if self.size == 1:
            many = one.unsqueeze(0)
        else:
            length = 1 + sum((n - 1) * s for n, s in zip(one.shape, one.stride(), strict=True))
            if length != one.numel():
                raise NotRecordable("a tensor whose elements do not fill its memory takes part")
            memory = torch.zeros(self.size * length, dtype=one.dtype, device=one.device)
            many = memory.as_strided((self.size, *one.shape), (length, *one.stride()))
        self._stacked[id(one)] = Stacked(many)
        return many

    def _steps_of(self, call: KernelCall) -> list[Any]:
        if call.is_view:
            self._add_views(call)
            return []
        for each in call.results:
            if each is not None and id(each) not in self._stacked:
                self._new(each)
        stacked = map_leaves(lambda value: self._stacked.get(id(value), value), list(call))
        return steps_of(KernelCall(*stacked), self.size)

    def _add_views(self, call: KernelCall) -> None:
        """Each batch's view lies as far from its base as the recorded view does."""
        base = call.args[0]
        many = self._stacked.get(id(base))
        if many is None:
            return  # Of the model: all batches share it.
        for view in call.results:
            if self.size == 1:
                self._new(view)
                continue
            if view is None or view.dtype != base.dtype or not _share_memory(view, base):
                raise NotRecordable(f"{call.kernel} returns something else than a view")
            offset = many.all.storage_offset() + view.storage_offset() - base.storage_offset()
            strides = (many.all.stride(0), *view.stride())
            self._stacked[id(view)] = Stacked(many.all.as_strided((self.size, *view.shape), strides, offset))


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _shuffled(values: Tensor, generator: torch.Generator) -> Tensor:
    """The same values in another order, so that each is still allowed (a class number, for example)."""
    return values.view(-1)[torch.randperm(values.numel(), generator=generator)].view(values.shape)
