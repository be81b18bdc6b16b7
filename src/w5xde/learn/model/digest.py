"""To the last bit: one number for all weights of a model, and whether two tensors or losses are the same."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import torch


def weights_sha256(module: torch.nn.Module) -> str:
    """Over the raw bytes of all parameters and buffers in the order of the state dict."""
    return tensors_sha256(each for each in module.state_dict().values() if isinstance(each, torch.Tensor))


def tensors_sha256(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_bytes_of(tensor).numpy().data)
    return digest.hexdigest()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also where numbers say otherwise: zeros of both signs differ, and what is no number may be the same."""
    return torch.equal(_bytes_of(one), _bytes_of(other))


def same_loss(one: float, other: float) -> bool:
    return struct.pack("d", one) == struct.pack("d", other)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
