"""Python state of a model: numbers and tensors in attributes that are neither parameters nor buffers.

A forward pass that changes them (`self.calls += 1`) counts the batches that its own process has computed, so
that nodes would compute different things. Compares them before and after a batch, and decides nothing. Knows
no losses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What torch itself keeps in every module.
_OF_TORCH = frozenset(vars(nn.Module()))


class PythonState:
    """The numbers and plain tensors that the modules of a model hold now, or hold in dicts."""

    def __init__(self, module: nn.Module) -> None:
        self.held = dict(_held_by(module))

    def changed_since(self, before: PythonState) -> set[str]:
        """The names of those that were there before, and are others now."""
        return {name for name, value in self.held.items() if before.held.get(name, value) != value}


def _held_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, each in module.named_modules():
        for key, value in vars(each).items():
            if key not in _OF_TORCH:
                yield from _values_in(f"{path}.{key}" if path else key, value)


def _values_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is dict:
        for key, item in value.items():
            if type(item) is not dict:
                yield from _values_in(f"{name}[{key!r}]", item)
    elif isinstance(value, (int, float, complex, np.number)) and not isinstance(value, bool):
        # As text: NaN is no other number than NaN.
        yield name, repr(value)
    elif type(value) is Tensor and value.layout is torch.strided and value.device.type != "meta":
        yield name, _digest(value)


def _digest(tensor: Tensor) -> tuple[Any, ...]:
    """Differs if the bits do; a copy would take as much memory as the tensor."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
    return tuple(tensor.shape), tensor.dtype, hashlib.sha256(raw).digest()
