"""Weights of the model that a callback reads. Knows nothing of how they are copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Weights(dict[str, "Tensor"]):
    """A copy of the model's state dict, on the CPU, after `step` steps and `epoch` complete epochs.

    The training never looks at it: keep it, save it, or load it into another model. Other callbacks may read
    the same copy, so do not change its tensors in place.
    """

    __slots__ = ("epoch", "step")

    def __init__(self, tensors: Mapping[str, Tensor], step: int, epoch: int) -> None:
        super().__init__(tensors)
        self.step = step
        self.epoch = epoch
