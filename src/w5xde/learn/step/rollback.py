"""Undoing a step: a copy of a small model and its optimizer from before the step, to restore if it breaks.

Used where `bounds.py` cannot prove a step safe. Everything that a step may change is copied into one block
for each dtype. The copy that is made after the step shows whether all numbers are finite, and is what the
next step goes back to. A large model is never copied (`docs/decisions/0008-bad-gradients.md`). Does not
decide when to undo.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from w5xde.learn.model.layout import FlatModel, Vector
from w5xde.learn.step.finite import are_finite, can_hold_nan, is_finite
from w5xde.learn.step.flat_steps import is_torchs

# What an optimizer may keep for a parameter besides tensors and still be restored by assignment.
_PLAIN = (int, float, bool, str, type(None))
_NUMPYS = {torch.float32: np.float32, torch.float64: np.float64}


class _Block:
    """Tensors of one dtype, and two copies of their bytes. Numpy copies twice as fast as torch."""

    def __init__(self, dtype: torch.dtype, tensors: list[Tensor]) -> None:
        self._dtype = dtype
        self._bytes = [tensor.view(torch.uint8).numpy() for tensor in tensors]
        count = sum(len(part) for part in self._bytes)
        self._saved = np.empty(count, np.uint8)
        self._newer = np.empty(count, np.uint8)

    def copy(self) -> None:
        """Copy the tensors as they are now, beside the saved copy."""
        np.concatenate(self._bytes, out=self._newer)

    def is_finite(self) -> bool:
        """Whether all numbers of the newer copy are."""
        kind = _NUMPYS.get(self._dtype)
        if kind is not None:
            return are_finite(self._newer.view(kind))
        return is_finite(torch.from_numpy(self._newer).view(self._dtype))

    def save(self) -> None:
        """Make the newer copy the saved one."""
        self._saved, self._newer = self._newer, self._saved

    def restore(self) -> None:
        start = 0
        for part in self._bytes:
            part[:] = self._saved[start : start + len(part)]
            start += len(part)


class Undo:
    """Saves the state of a model and its optimizer; `restore` brings back the very same bits."""

    def __init__(self, flat: FlatModel, watched: list[bool], optimizer: Optimizer) -> None:
        """`watched`: for each part of the model that a step changes, whether it must be finite."""
        self._flat = flat
        self._watched = watched
        self._optimizer = optimizer
        # The optimizers of torch keep all that changes in their state, and none of it is ever infinite.
        self._is_torchs = is_torchs(optimizer)
        self._state: dict[Any, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        # By dtype, and by whether the numbers must be finite.
        self._blocks: dict[tuple[torch.dtype, bool], _Block] = {}
        # The same token means the same state of the optimizer; the version is that of the saved copies.
        self._token: object = None
        self._moving: Vector | None = None
        self._version = -1
        # Whether all that the optimizer keeps can be restored: tensors and plain values, nothing nested.
        self.is_possible = True

    def save(self, token: object, version: int) -> None:
        """Save the state of this version, before a step. The same `token`: the same state's tensors."""
        if self._are_listed(token) and version == self._version:
            return
        self._list()
        self._token = token
        for block in self._blocks.values():
            block.copy()
            block.save()

    def accept(self, token: object, version: int) -> bool:
        """Save the state after the steps that made this version, if all its numbers are finite."""
        before = self._state, self._groups, self._blocks
        if not self._are_listed(token):
            # The step may have made other tensors.
            self._list()
        for (_, is_watched), block in self._blocks.items():
            block.copy()
            if is_watched and not block.is_finite():
                self._state, self._groups, self._blocks = before
                return False
        for block in self._blocks.values():
            block.save()
        self._token, self._version = token, version
        return True

    def _are_listed(self, token: object) -> bool:
        return token is not None and token is self._token and self._moving is self._flat.moving

    def _list(self) -> None:
        """Find all tensors that a step may change."""
        self._moving = self._flat.moving
        self._state = {parameter: dict(kept) for parameter, kept in self._optimizer.state.items()}
        self._groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        found: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        for tensor, is_watched in zip(self._moving.parts, self._watched, strict=True):
            found.setdefault((tensor.dtype, is_watched), []).append(tensor)
        # By id: one tensor may serve several parameters, as a counter of steps does.
        tensors: dict[int, Tensor] = {}
        for kept in self._state.values():
            for value in kept.values():
                if isinstance(value, Tensor):
                    self.is_possible &= value.is_contiguous() and value.device.type == "cpu"
                    tensors[id(value)] = value
                else:
                    self.is_possible &= isinstance(value, _PLAIN)
        for value in tensors.values():
            is_watched = self._is_torchs and can_hold_nan(value.dtype)
            found.setdefault((value.dtype, is_watched), []).append(value.detach().cpu().reshape(-1))
        self._blocks = {key: _Block(key[0], listed) for key, listed in found.items()}

    def restore(self) -> None:
        """Go back to the saved state."""
        for block in self._blocks.values():
            block.restore()
        state = self._optimizer.state
        state.clear()
        state.update({parameter: dict(kept) for parameter, kept in self._state.items()})
        if not self._is_torchs:
            for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update(kept)
        self._token = None
