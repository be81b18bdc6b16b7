"""Bounds of a learner's state: proves before a step that all numbers will be finite after it.

For SGD, Adam and AdamW the largest weight, mean and square after a step follow from the largest before it,
the norm of the gradient, and the options. As long as these bounds are far below what a float32 holds, a step
needs neither a copy to go back to nor a look at its result: a few operations on three numbers replace passes
over all of them. Bounds only grow; when they get too large, the real values are measured again. Does not
know what happens to a step that may be unsafe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from w5xde.learn.torch_private import has_own_step

# A float32 holds up to 3.4e38. No number, and no intermediate result of a step, may reach this.
LARGEST = 1e37
# Each operation rounds by less than 1e-7 of its result; a step has about ten.
_ROUNDING = 1.0 + 1e-6
# Below this an optimizer's `eps` might vanish among its operations.
_EPS_MIN = 1e-30
_DTYPES = (torch.float32, torch.float64)
# Which bound holds for which state of a parameter.
_MEANS, _SQUARES = ("momentum_buffer", "exp_avg"), ("exp_avg_sq", "max_exp_avg_sq")


# The bounds of weights, means and squares after a step of one group, from the norm of the gradient and the
# bounds before it; None if a number may get too large.
_Rule = Callable[[float, float, float, float], tuple[float, float, float] | None]


class _Largest(NamedTuple):
    """The largest absolute values of the weights, of means of gradients, and of means of their squares."""

    weight: float
    mean: float
    square: float


class StateBounds:
    """The bounds of one optimizer's weights and state."""

    def __init__(self, optimizer: Optimizer, weights: list[Tensor]) -> None:
        """`weights`: parts of the flat vector with all that the optimizer changes."""
        self._optimizer = optimizer
        self._dtypes_fit = all(part.dtype in _DTYPES for part in weights)
        self._largest: _Largest | None = None
        self._version = -1

    def allow(self, version: int, norms: list[float], weights: list[Tensor]) -> bool:
        """Whether steps from this version, with gradients of these norms, surely leave finite numbers."""
        optimizer = self._optimizer
        if not self._dtypes_fit or type(optimizer) not in (SGD, Adam, AdamW) or has_own_step(optimizer):
            return False
        after = None
        if self._largest is not None and version == self._version:
            after = self._after(self._largest, norms)
        if after is None:
            measured = self._measure(weights)
            after = self._after(measured, norms) if measured is not None else None
        self._largest, self._version = after, version + len(norms)
        return after is not None

    def _after(self, largest: _Largest, norms: Iterable[float]) -> _Largest | None:
        """The bounds after steps with gradients of these norms; None if there may be larger numbers."""
        rule_of = _sgd_rule if type(self._optimizer) is SGD else _adam_rule
        rules = [rule_of(group) for group in self._optimizer.param_groups]
        weight, mean, square = largest
        # Written out, without lists and tuples of bounds: small models make many steps in one call.
        for norm in norms:
            # Before `max`, which may pass over a NaN.
            if not (norm < LARGEST and weight < LARGEST and mean < LARGEST and square < LARGEST):
                return None
            weights, means, squares = weight, mean, square
            for rule in rules:
                after = rule(norm, weight, mean, square) if rule is not None else None
                if after is None:
                    return None
                weights, means, squares = (
                    max(weights, after[0]),
                    max(means, after[1]),
                    max(squares, after[2]),
                )
            weight, mean, square = weights * _ROUNDING, means * _ROUNDING, squares * _ROUNDING
        return _Largest(weight, mean, square)

    def _measure(self, weights: list[Tensor]) -> _Largest | None:
        found = {"weight": 0.0, "mean": 0.0, "square": 0.0}
        kinds = dict.fromkeys(_MEANS, "mean") | dict.fromkeys(_SQUARES, "square")
        named = [("weight", part) for part in weights]
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if name in kinds and isinstance(value, Tensor):
                    named.append((kinds[name], value))
                elif name != "step" and value is not None:
                    return None
        for kind, tensor in named:
            if tensor.numel():
                low, high = torch.aminmax(tensor.detach())
                # Not `max`: it may pass over a NaN.
                size = max(abs(low.item()), abs(high.item()))
                found[kind] = size if not size <= found[kind] else found[kind]
        return _Largest(**found)


def _options(group: dict[str, Any], *names: str) -> list[float] | None:
    """These options of a group as numbers; None if one is something else."""
    values = [group[name] for name in names]
    return values if all(isinstance(value, (int, float)) for value in values) else None


def _sgd_rule(group: dict[str, Any]) -> _Rule | None:
    options = _options(group, "lr", "momentum", "dampening", "weight_decay")
    if options is None:
        return None
    lr, momentum, dampening, decay = map(abs, options)
    is_nesterov = group["nesterov"]

    def after(norm: float, weight: float, mean: float, square: float) -> tuple[float, float, float] | None:
        gradient = norm + decay * weight
        moved = gradient
        if momentum:
            mean = momentum * mean + (1.0 + dampening) * gradient
            moved = gradient + momentum * mean if is_nesterov else mean
        weight += lr * moved
        is_safe = moved < LARGEST and weight < LARGEST and mean < LARGEST and square < LARGEST
        return (weight, mean, square) if is_safe else None

    return after


def _adam_rule(group: dict[str, Any]) -> _Rule | None:
    options = _options(group, "lr", "eps", "weight_decay")
    betas = group["betas"]
    if options is None or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
        return None
    (lr, eps, decay), (beta1, beta2) = options, betas
    if not eps >= _EPS_MIN or group["capturable"]:
        return None
    # Older versions of torch do not say in the group which of the two they do.
    kept = abs(1.0 - lr * decay) if group.get("decoupled_weight_decay", True) else 1.0
    added = abs(decay) if not group.get("decoupled_weight_decay", False) else 0.0
    # At the first step the means are divided by 1 - beta, later by more.
    rate, spread = abs(lr) / (1.0 - beta1), 1.0 - beta2

    def after(norm: float, weight: float, mean: float, square: float) -> tuple[float, float, float] | None:
        gradient = norm + added * weight
        mean, square = max(mean, gradient), max(square, gradient * gradient)
        moved = rate * mean / eps
        weight = kept * weight + moved
        # A mean moves by its difference from the gradient, which is at most twice as large as the larger.
        is_safe = (
            2 * mean < LARGEST
            and mean / eps < LARGEST
            and square / spread < LARGEST
            and moved < LARGEST
            and weight < LARGEST
        )
        return (weight, mean, square) if is_safe else None

    return after
