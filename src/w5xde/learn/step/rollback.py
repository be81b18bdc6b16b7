"""Undo: a small model's state of before a step, kept until the step has proved sound.

Everything a step may change is copied side by side, in one call for each dtype: a few microseconds, and a few
kilobytes. Whether the step left all numbers finite is seen on the copy made after it, which is then what the
next step would go back to. A large model is never copied: see `docs/decisions/0008-bad-gradients.md`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from w5xde.learn.step.fast_optimizer import is_torchs
from w5xde.learn.step.finite import are_finite, is_finite, may_be_wild

# What an optimizer may keep of a parameter beside tensors, and still be put back by assignment.
_PLAIN = (int, float, bool, str, type(None))
_NUMPYS = {torch.float32: np.float32, torch.float64: np.float64}


class _Row:
    """Tensors of one dtype, and a copy of their bytes, side by side. Numpy copies in half of torch's time."""

    def __init__(self, dtype: torch.dtype, tensors: list[Tensor]) -> None:
        self._dtype = dtype
        self._bytes = [tensor.view(torch.uint8).numpy() for tensor in tensors]
        count = sum(len(part) for part in self._bytes)
        self._kept = np.empty(count, np.uint8)
        self._newer = np.empty(count, np.uint8)

    def copy(self) -> None:
        """What is there now, beside what was kept."""
        np.concatenate(self._bytes, out=self._newer)

    def is_sound(self) -> bool:
        kind = _NUMPYS.get(self._dtype)
        if kind is not None:
            return are_finite(self._newer.view(kind))
        return is_finite(torch.from_numpy(self._newer).view(self._dtype))

    def keep(self) -> None:
        """The newer copy is the one to go back to."""
        self._kept, self._newer = self._newer, self._kept

    def back(self) -> None:
        at = 0
        for part in self._bytes:
            part[:] = self._kept[at : at + len(part)]
            at += len(part)


class Undo:
    """Keeps the state of a model and its optimizer; `back` returns to it, with the very same bits."""

    def __init__(self, moving: list[tuple[Tensor, bool]], optimizer: Optimizer) -> None:
        """`moving`: what a step changes of the model, and whether it must be finite."""
        self._moving = moving
        self._optimizer = optimizer
        # Torch's own keep all that changes in their state, and nothing there is ever infinite.
        self._is_torchs = is_torchs(optimizer)
        self._state: dict[Any, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        # By dtype, and by whether they must be finite.
        self._rows: dict[tuple[torch.dtype, bool], _Row] = {}
        # Who says that the tensors are still the same, and of which version the copies are.
        self._token: object = None
        self._version = -1
        # Whether all that the optimizer keeps can be put back: tensors and plain values, nothing nested.
        self.is_possible = True

    def keep(self, token: object, version: int) -> None:
        """Keep the state of this version, before a step. The same `token` means: the same tensors."""
        if token is not None and token is self._token and version == self._version:
            return
        self._list()
        self._token = token
        for row in self._rows.values():
            row.copy()
            row.keep()

    def is_sound(self, token: object, version: int) -> bool:
        """Whether all numbers are finite after the steps that made this version; if so, they are kept."""
        before = self._state, self._groups, self._rows
        if token is None or token is not self._token:
            # There may be other tensors now.
            self._list()
        for (_, is_watched), row in self._rows.items():
            row.copy()
            if is_watched and not row.is_sound():
                self._state, self._groups, self._rows = before
                return False
        for row in self._rows.values():
            row.keep()
        self._token, self._version = token, version
        return True

    def _list(self) -> None:
        self._state = {parameter: dict(kept) for parameter, kept in self._optimizer.state.items()}
        self._groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        found: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        for tensor, is_watched in self._moving:
            found.setdefault((tensor.dtype, is_watched), []).append(tensor)
        # One tensor may serve several parameters, as a counter of steps does.
        tensors: dict[int, Tensor] = {}
        for kept in self._state.values():
            for value in kept.values():
                if isinstance(value, Tensor):
                    self.is_possible &= value.is_contiguous() and value.device.type == "cpu"
                    tensors[id(value)] = value
                else:
                    self.is_possible &= isinstance(value, _PLAIN)
        for value in tensors.values():
            is_watched = self._is_torchs and may_be_wild(value.dtype)
            found.setdefault((value.dtype, is_watched), []).append(value.detach().cpu().reshape(-1))
        self._rows = {key: _Row(key[0], listed) for key, listed in found.items()}

    def back(self) -> None:
        """To the state that was kept last."""
        for row in self._rows.values():
            row.back()
        state = self._optimizer.state
        state.clear()
        state.update({parameter: dict(kept) for parameter, kept in self._state.items()})
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            if not self._is_torchs:
                group.update(kept)
        self._token = None
