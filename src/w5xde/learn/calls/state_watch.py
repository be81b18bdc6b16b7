"""Watches a flat model that other code changes, and tells which part of its state has changed.

The caller of a pool steps its own optimizers, loads weights, copies target networks. Torch counts writes into
a tensor, but not those through `.data`. So what the counts call unchanged is compared by its hash too, before
parameters are not sent again. Knows no optimizer and no nodes.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from w5xde.errors import JobError
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.torch_private import own_buffers, own_parameters, write_count
from w5xde.messages import FROZEN, STILL

# After a look that found no writes, others are likely to come: between two steps, or in every second call.
HASHED_LOOKS = 16


class Changes(NamedTuple):
    """Whether code outside has changed the moving part of the state, or the rest of it."""

    moving: bool
    fixed: bool


class _Bound(NamedTuple):
    """A tensor of the layout: which of its module's tensors it must be, and whether it seldom changes."""

    name: str
    tensor: Tensor
    siblings: dict[str, Any]
    key: str
    is_fixed: bool


class StateWatch:
    """Watches one flat model, whose module is the user's own."""

    def __init__(self, flat: FlatModel) -> None:
        self._flat = flat
        owners = {
            f"{prefix}.{key}" if prefix else key: (siblings, key)
            for prefix, module in flat.module.named_modules()
            for siblings in (own_parameters(module), own_buffers(module))
            for key in siblings
        }
        self._bound = [
            _Bound(entry.name, tensor, *owners[entry.name], entry.role in (FROZEN, STILL))
            for entry, tensor in zip(flat.blueprint.layout.entries, flat.tensors, strict=True)
        ]
        self._modules = list(flat.module.modules())
        # Empty: nothing was remembered yet.
        self._counts: list[int] = []
        self._fixed_hash = self._moving_hash = b""
        # For how many looks the moving part is hashed: in most scripts it changes in between every time.
        self._hashed_looks = 0

    def look(self) -> Changes:
        """Bring what other code left elsewhere into the state, and tell what has changed since `remember`.

        Raises JobError if a parameter or module was replaced: nodes know only those of the start.
        """
        self._require_same_modules()
        strayed = [self._regain(entry, each) for entry, each in enumerate(self._bound)]
        if not self._counts:
            return Changes(moving=True, fixed=True)
        counts = self._write_counts()
        is_written = [
            now != before or has_strayed
            for now, before, has_strayed in zip(counts, self._counts, strayed, strict=True)
        ]
        moving = any(w and not each.is_fixed for w, each in zip(is_written, self._bound, strict=True))
        fixed = any(w and each.is_fixed for w, each in zip(is_written, self._bound, strict=True))
        if moving:
            self._hashed_looks = max(0, self._hashed_looks - 1)
        else:
            moving = not self._moving_hash or self._moving_hash != self._hash_of_moving()
            self._hashed_looks = HASHED_LOOKS
        return Changes(moving, fixed or self._fixed_hash != self._hash_of_fixed())

    def remember(self) -> None:
        """Let the state as it is now be what `look` compares with."""
        self._counts = self._write_counts()
        self._fixed_hash = self._hash_of_fixed()
        self._moving_hash = self._hash_of_moving() if self._hashed_looks else b""

    def _require_same_modules(self) -> None:
        if list(self._flat.module.modules()) != self._modules:
            raise _replaced("the model has other modules")

    def _regain(self, entry: int, each: _Bound) -> bool:
        """Let a tensor lie in the state again, with its values; returns whether it had to be moved there."""
        now, place = each.siblings.get(each.key), self._flat.place(entry)
        if now is each.tensor and now.data_ptr() == place.data_ptr():
            return False
        # A buffer may be assigned anew, as `self.steps = self.steps + 1` does; optimizers hold parameters.
        if now is None or (now is not each.tensor and isinstance(now, nn.Parameter)):
            raise _replaced(f"{each.name} is another tensor")
        if now.shape != place.shape or now.dtype != place.dtype or now.device != place.device:
            raise _replaced(f"{each.name} has another shape, dtype or device")
        with torch.no_grad():
            place.copy_(now.detach())
        each.tensor.data = place
        each.siblings[each.key] = each.tensor
        return True

    def _write_counts(self) -> list[int]:
        return [write_count(each.tensor) for each in self._bound]

    def _hash_of_moving(self) -> bytes:
        return _hash(self._flat.moving.raw)

    def _hash_of_fixed(self) -> bytes:
        return _hash(self._flat.state[self._flat.blueprint.moving_bytes :])


def _hash(state: Tensor) -> bytes:
    return blake2b(state.numpy().data, digest_size=16).digest() if len(state) else b""


def _replaced(what: str) -> JobError:
    return JobError(
        f"{what} than when the pool began",
        code="W5-273",
        why="nodes have the model as it was then, and are sent only its numbers",
        fix="change weights in place (load_state_dict does), or make a new w5xde.Pool",
    )
