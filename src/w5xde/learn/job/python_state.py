"""Python state of a model and its loss: numbers and tensors that are neither parameters nor buffers.

A model has them in attributes, and in those of plain objects that it holds; a loss reads them from outside,
or has them in attributes if it is an object. A forward pass or a loss that changes them (`self.calls += 1`)
counts the batches that its own process has computed, so that nodes would compute different things. Compares
them before and after a batch, and decides nothing. Lists are left out: they are written as notes.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from w5xde.learn.job.outside_values import outside_names

# What torch itself keeps in every module.
_OF_TORCH = frozenset(vars(nn.Module()))


class PythonState:
    """The numbers and plain tensors that the modules of a model, and a loss, hold now, or hold in dicts."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any]) -> None:
        self.held = {**dict(_held_by(module)), **dict(_held_by_loss(loss))}

    def changed_since(self, before: PythonState) -> set[str]:
        """The names of those that were there before, and are others now."""
        return {name for name, value in self.held.items() if before.held.get(name, value) != value}


def _held_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, each in module.named_modules():
        for key, value in vars(each).items():
            if key not in _OF_TORCH:
                name = f"the model's {path}.{key}" if path else f"the model's {key}"
                yield from _values_in(name, value)
                if _is_plain_object(value):
                    yield from _attributes(name, value)


def _held_by_loss(loss: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    # Objects that a function reads are left out: they write notes more often than they are read.
    for name, value in outside_names(loss).items():
        yield from _values_in(name, value)
    owner = getattr(loss, "__self__", loss)
    if _is_plain_object(owner):
        yield from _attributes("the loss's", owner, between=" ")


def _attributes(name: str, value: Any, between: str = ".") -> Iterator[tuple[str, Any]]:
    for key, item in vars(value).items():
        yield from _values_in(f"{name}{between}{key}", item)


def _is_plain_object(value: Any) -> bool:
    """Whether it is an object with attributes of its own; a model's modules are looked at by themselves."""
    if isinstance(value, (nn.Module, Tensor, type, ModuleType)) or inspect.isroutine(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


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
