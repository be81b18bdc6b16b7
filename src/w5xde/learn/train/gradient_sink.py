"""The gradient sink: writes each gradient into a vector as soon as autograd has computed it.

Of a large model the gradients and the vector into which they are joined would take twice the memory of the
model. Here a gradient is copied while it is in the processor's cache, and its own memory is free at once. The
bits are those of gradients that are joined afterwards. Knows no batches and no sockets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from w5xde.learn.model.layout import Blueprint, FlatModel, Vector


class GradientSink:
    """Takes the gradients of one model's parameters while it is open."""

    def __init__(self, flat: FlatModel) -> None:
        self._blueprint: Blueprint = flat.blueprint
        self._parameters = [flat.tensors[entry] for entry in flat.blueprint.trained]
        # Where each gradient goes; empty while the sink is closed.
        self._places: list[Tensor] = []
        for number, parameter in enumerate(self._parameters):
            hook = _hook(weakref.ref(self), number)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def open(self, vector: Vector) -> None:
        """The backward pass of a batch's loss begins: from now on gradients go into this vector.

        Not earlier: a loss that computes gradients itself may keep, change or discard them.
        """
        self._places = self._blueprint.entries_in(vector.raw, self._blueprint.trained)

    def take(self, number: int) -> None:
        """Autograd has added to the gradient of a parameter."""
        if not self._places:
            return
        parameter, place = self._parameters[number], self._places[number]
        if parameter.grad is not None and parameter.grad is not place:
            place.copy_(parameter.grad)
            # A backward pass inside this one, of a checkpoint for example, adds to it there.
            parameter.grad = place

    def close(self) -> frozenset[int]:
        """Complete the vector; returns the parameters without a gradient, whose place is zero."""
        absent = []
        for number, (parameter, place) in enumerate(zip(self._parameters, self._places, strict=True)):
            if parameter.grad is None:
                place.zero_()
                absent.append(number)
            elif parameter.grad is not place:
                # Code assigned it, or the loss left it there, and autograd added nothing.
                place.copy_(parameter.grad)
        self.discard()
        return frozenset(absent)

    def discard(self) -> None:
        """Leave gradients to the parameters again; they have none, as the vector is used elsewhere."""
        self._places = []
        for parameter in self._parameters:
            parameter.grad = None


def _hook(sink: weakref.ref[GradientSink], number: int) -> Callable[[Any], None]:
    # Weak: a model that its parameters' own hooks kept alive would keep its memory until a collection.
    def hook(parameter: Any) -> None:
        found = sink()
        if found is not None:
            found.take(number)

    return hook
