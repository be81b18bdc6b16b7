"""Exact comparison: the sha256 of all weights, and whether two tensors or losses have the same bits.

Knows no tolerance and no layout.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import torch


def weights_sha256(module: torch.nn.Module) -> str:
    """The sha256 over the raw bytes of all parameters and buffers, in the order of the state dict."""
    return tensors_sha256(each for each in module.state_dict().values() if isinstance(each, torch.Tensor))


def tensors_sha256(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes_of(tensor).numpy().data)
    return digest.hexdigest()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits: 0.0 differs from -0.0, and a NaN equals itself."""
    return torch.equal(bytes_of(one), bytes_of(other))


def same_loss(one: float, other: float) -> bool:
    return struct.pack("d", one) == struct.pack("d", other)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
