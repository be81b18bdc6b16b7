"""Replicas: the parameters on which nodes compute in rounds mode, as coordinator and nodes keep them.

A replica changes only by what rounds send, and by the same arithmetic everywhere, so that all replicas are
equal bit for bit. Their hashes tell whether they are. Knows no codecs and no messages.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from w5xde.learn.model.layout import Blueprint, Vector
from w5xde.message_types import DIGEST_BYTES
from w5xde.messages import TRAINED


class Replica(NamedTuple):
    """What leases are computed from: the bytes of the model, and those that the last round sent, if any did.

    In modes without rounds, the bytes of the model alone.
    """

    state: memoryview
    last: Tensor | None = None


def replica_digest(moving: Tensor, last: Tensor | None) -> bytes:
    """The hash of all that columns start from: the bytes of the moving part, and what the last round sent."""
    digest = blake2b(moving.cpu().numpy().data, digest_size=DIGEST_BYTES)
    if last is not None:
        digest.update(last.cpu().numpy().data)
    return digest.digest()


def move_replica(moving: Vector, difference: Vector, vectors: Blueprint) -> None:
    """Change a replica by what a round sent: add to its parameters, and set its buffers."""
    with torch.no_grad():
        # Statistics come last, and a replica has none.
        for group, part, change in zip(vectors.moving_groups, moving.parts, difference.parts, strict=False):
            # One rounding, wherever it is computed: replicas stay equal on machines of all kinds.
            if group.role == TRAINED:
                part.add_(change)
            else:
                part.copy_(change)
