"""Layers that compute something else than they should: for nodes that must be found out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Rough(nn.Linear):
    """A layer that computes in bfloat16."""

    def forward(self, numbers: Tensor) -> Tensor:
        half = torch.bfloat16
        return linear(numbers.to(half), self.weight.to(half), self.bias.to(half)).float()


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Backward(nn.Linear):
    """A layer whose weight gets the opposite of its gradient."""

    def forward(self, numbers: Tensor) -> Tensor:
        return linear(numbers, Negated.apply(self.weight), self.bias)


class Deaf(nn.Linear):
    """A layer whose weight gets no gradient."""

    def forward(self, numbers: Tensor) -> Tensor:
        return linear(numbers, self.weight.detach(), self.bias)
