"""Digests: one number for all weights of a model, by which two runs are compared to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def weights_sha256(module: torch.nn.Module) -> str:
    """Over the raw bytes of all parameters and buffers in the order of the state dict."""
    return tensors_sha256(each for each in module.state_dict().values() if isinstance(each, torch.Tensor))


def tensors_sha256(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()
