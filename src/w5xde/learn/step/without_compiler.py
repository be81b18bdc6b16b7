"""Lean: training without loading torch's compiler.

Making an optimizer, asking it for its state and letting it step first import the compiler, only to tell it
not to compile that: two seconds, and 70 MB for as long as we live. Torch keeps the answer beside some of
these functions, and takes one that lies there already; around a step it asks each time, so we go in one door
later.
"""

from __future__ import annotations

import inspect
import sys

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_KEPT_AS = "__dynamo_disable"
_FUNCTIONS = (
    Optimizer.add_param_group,
    Optimizer.state_dict,
    Optimizer.load_state_dict,
    Optimizer.zero_grad,
)


def compiler_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def leave_the_compiler_out() -> None:
    """Spare optimizers the import. A job that compiles its model has it already, and nothing changes."""
    if compiler_is_loaded():
        return
    for function in _FUNCTIONS:
        plain = getattr(function, "__wrapped__", None)
        if plain is not None and not hasattr(plain, _KEPT_AS):
            setattr(plain, _KEPT_AS, plain)


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether we know what it keeps: others may keep what they like, infinities too."""
    return type(optimizer).__module__.startswith("torch.optim.")


def has_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def is_patched(optimizer: Optimizer) -> bool:
    """Whether somebody gave this one a step of its own; a schedule does, but only to count."""
    own = vars(optimizer).get("step")
    return own is not None and not hasattr(own, "_wrapped_by_lr_sched")


def step(optimizer: Optimizer) -> None:
    """`optimizer.step()`: of torch's own optimizers what it comes to, of others just that."""
    if not is_torchs(optimizer) or has_hooks(optimizer) or compiler_is_loaded() or is_patched(optimizer):
        # As anybody would call it: one that is not torch's may need gradients of its own.
        with torch.enable_grad():
            optimizer.step()
        return
    with torch.set_grad_enabled(bool(optimizer.defaults.get("differentiable", False))):
        inspect.unwrap(type(optimizer).step)(optimizer)
    # What a schedule looks for, to warn of those that step before their optimizer.
    optimizer._opt_called = True  # type: ignore[attr-defined]
