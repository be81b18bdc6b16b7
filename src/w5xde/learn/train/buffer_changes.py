"""How a batch changes the model's buffers: each batch starts from the version's buffers.

Knows no gradients. A buffer that travels with every update is moving; any other is still, and no batch may
change it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from w5xde.learn.job.job import BatchFailed
from w5xde.learn.model.cumulative_averages import CumulativeAverages
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.torch_private import own_buffers, write_count
from w5xde.messages import MOVING

_UNEXPECTED = (
    "buffer {} changed, which it did not do in the first batch; buffers that change must do so in every batch"
)


class _BoundBuffer(NamedTuple):
    """A buffer of the flat model: its tensor, and which of its module's buffers must be this tensor."""

    name: str
    tensor: Tensor
    siblings: dict[str, Tensor | None]
    key: str
    is_moving: bool


class BufferChanges:
    """Keeps the buffers of the version, takes what a batch changed, and restores them."""

    def __init__(self, flat: FlatModel) -> None:
        blueprint = flat.blueprint
        self._moving = [
            (group.dtype, part, part.clone())
            for group, part in zip(blueprint.moving_groups, flat.moving.parts, strict=True)
            if group.role == MOVING
        ]
        owners = {
            f"{prefix}.{key}" if prefix else key: (own_buffers(module), key)
            for prefix, module in flat.module.named_modules()
            for key in own_buffers(module)
        }
        self._bound = [
            _BoundBuffer(entry.name, tensor, siblings, key, entry.role == MOVING)
            for entry, tensor in zip(blueprint.layout.entries, flat.tensors, strict=True)
            for siblings, key in [owners.get(entry.name, ({}, ""))]
            if siblings.get(key) is tensor
        ]
        self._averages = CumulativeAverages(flat.module, blueprint)
        self._write_counts: dict[str, int] = {}
        self.remember(whole=True)

    def remember(self, *, whole: bool) -> None:
        """Let batches start from the buffers that the model holds now, still ones included if `whole`."""
        for _, part, before in self._moving:
            before.copy_(part)
        if whole:
            # A still buffer that a batch has overwritten stays wrong until a whole version is loaded.
            self._write_counts = {
                each.name: write_count(each.tensor) for each in self._bound if not each.is_moving
            }

    def undo(self) -> None:
        """Restore the version's buffers after a batch that failed, also those that it replaced."""
        for each in self._bound:
            each.siblings[each.key] = each.tensor
        self._restore()

    def _restore(self) -> None:
        for _, part, before in self._moving:
            part.copy_(before)

    def take(self, parts: list[Tensor]) -> None:
        """Write the last batch's changes into `parts` and restore the version's buffers."""
        if not self._bound:
            return
        with torch.no_grad():
            self._rebind()
            for out, (dtype, part, before) in zip(parts, self._moving, strict=True):
                if dtype is torch.bool:
                    out.copy_(part)
                else:
                    # Equal means no difference, for infinities too (masks are often minus infinity).
                    torch.sub(part, before, out=out)
                    out.masked_fill_(part == before, 0)
            self._averages.make_sums(parts, [before for _, _, before in self._moving])
            self._restore()

    def keep(self) -> None:
        """Let the next batch start from the buffers as the last batch left them."""
        if self._bound:
            with torch.no_grad():
                self._rebind()
                for _, part, before in self._moving:
                    before.copy_(part)

    def _rebind(self) -> None:
        """Copy buffers that the forward pass replaced into the flat model; refuse changes of still ones."""
        for name, tensor, siblings, key, is_moving in self._bound:
            now = siblings[key]
            if now is not tensor and now is not None:
                if now.shape != tensor.shape or now.dtype != tensor.dtype:
                    raise BatchFailed(f"buffer {name} changed its shape or dtype")
                siblings[key] = tensor
                if is_moving:
                    tensor.copy_(now)
                elif not torch.equal(tensor, now):
                    raise BatchFailed(_UNEXPECTED.format(name))
            if not is_moving and write_count(tensor) != self._write_counts[name]:
                raise BatchFailed(_UNEXPECTED.format(name))
