"""Changes the learning rate of an optimizer in the middle of a run, and that of its schedule with it.

The schedule keeps its form: all rates that it is made of are multiplied by the same factor. Does not know why
the rate is changed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from w5xde.errors import UsageError
from w5xde.learn.rate.rates import learning_rates, require_every_rate
from w5xde.specs.rate_override import RateOverride

# Rates that torch's schedules keep in the optimizer's groups, and in lists of their own.
_OF_GROUPS = ("initial_lr", "max_lr", "min_lr")
_OF_SCHEDULES = ("base_lrs", "max_lrs", "_last_lr")


def override_rates(optimizer: Optimizer, scheduler: Any, override: RateOverride) -> None:
    """Make the next step with the rate that the override says, and go on from there."""
    require_every_rate(optimizer)
    before = learning_rates(optimizer)
    factors = [_factor(rate, override, scheduler) for rate in before]
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for name in _OF_GROUPS:
            if isinstance(group.get(name), (int, float, Tensor)):
                group[name] = group[name] * factor
        if override.is_factor:
            group["lr"] = group["lr"] * factor
        elif isinstance(group["lr"], Tensor):
            group["lr"].fill_(override.value)
        else:
            group["lr"] = override.value
    if scheduler is not None:
        _scale(scheduler, factors)


def _factor(rate: float, override: RateOverride, scheduler: Any) -> float:
    """By what the rates of a group are multiplied."""
    if override.is_factor:
        return override.value
    if rate > 0:
        return override.value / rate
    if scheduler is not None:
        raise UsageError(
            f"the learning rate is {rate:g} by its schedule, so {override} has nothing to scale",
            code="W5-265",
            fix="start a new run from these weights, with another schedule",
        )
    return 1.0


def _scale(scheduler: Any, factors: list[float]) -> None:
    """Multiply the rates that a schedule keeps, one for each group; those of schedules inside it too."""
    held = vars(scheduler)
    for name in _OF_SCHEDULES:
        rates = held.get(name)
        if isinstance(rates, list) and len(rates) == len(factors):
            held[name] = [rate * factor for rate, factor in zip(rates, factors, strict=True)]
    for inner in held.get("_schedulers", ()):
        _scale(inner, factors)
