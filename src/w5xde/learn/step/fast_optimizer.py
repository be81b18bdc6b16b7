"""Optimizer steps without the Python around them, and without importing torch's compiler.

For a small model most of `optimizer.step()` is Python around one kernel (profiling, grouping, checks): 90 of
110 microseconds with fused Adam. Here the same kernels are called with the same arguments, for a few of
torch's optimizers; every other one, and one with hooks, steps as usual. Bits are the same. Knows nothing of
batches: the learner puts gradients into the parameters, or passes them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from w5xde.learn.torch_private import (
    add_scaled,
    compiler_is_loaded,
    fused_adam,
    has_own_step,
    step_uncompiled,
)


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether torch defines its class: then we know its state, which never holds infinities."""
    return type(optimizer).__module__.startswith("torch.optim.")


def step(optimizer: Optimizer) -> None:
    """`optimizer.step()`; for torch's own optimizers without importing the compiler."""
    if is_torchs(optimizer) and not has_own_step(optimizer) and not compiler_is_loaded():
        step_uncompiled(optimizer)
        return
    # With gradients enabled, as in a training loop: an optimizer that is not torch's may compute some.
    with torch.enable_grad():
        optimizer.step()


class _KnownGroup(NamedTuple):
    """One of the optimizer's groups: its tensors by their part in a step, each a row of numbers."""

    rows: dict[str, list[Tensor]]
    # Which of the trained parameters these are.
    numbers: list[int]


class Stepper:
    """Steps one optimizer, quickly where that is possible."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """`parameters` are those that are trained, in the order in which `step_with` gets their gradients."""
        self._optimizer = optimizer
        self._parameters = parameters
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        # For each of the optimizer's groups; None: it steps as usual.
        self._groups: list[_KnownGroup] | None = None

    @property
    def tensors(self) -> object:
        """The same object as before if the next step works on the same tensors; None if that is unknown."""
        return self._groups

    def step(self) -> bool:
        """One step with the parameters' gradients; returns whether the parameters surely stayed in place."""
        gradients = [parameter.grad for parameter in self._parameters]
        rows = [each.reshape(-1) for each in gradients if each is not None and each.layout is torch.strided]
        if len(rows) == len(gradients) and self.is_known():
            self.step_with(rows)
            return True
        self._split_counters()
        # The first step makes the state, and tells the schedule that there was one.
        step(self._optimizer)
        self._groups = self._find_groups()
        return False

    def is_known(self) -> bool:
        """Whether `step_with` may be called: no code changed the optimizer or moved a parameter since."""
        optimizer, groups = self._optimizer, self._groups
        if groups is None or len(groups) != len(optimizer.param_groups) or has_own_step(optimizer):
            return False
        for group, (rows, numbers) in zip(optimizer.param_groups, groups, strict=True):
            if not self._is_plain(group) or len(group["params"]) != len(numbers):
                return False
            if any(
                row.data_ptr() != p.data_ptr() for row, p in zip(rows["params"], group["params"], strict=True)
            ):
                return False
            last = optimizer.state.get(group["params"][-1], {})
            if "steps" in rows and last.get("step") is not rows["steps"][0]:
                return False
        return True

    def step_with(self, gradients: Sequence[Tensor]) -> None:
        """One step with these gradients, each a row of numbers; those of the parameters stay as they are."""
        for group, (rows, numbers) in zip(self._optimizer.param_groups, self._groups or (), strict=True):
            chosen = [gradients[number] for number in numbers]
            if type(self._optimizer) is SGD:
                add_scaled(rows["params"], chosen, -group["lr"])
                continue
            # Numpy counts in a fifth of the time; it is the same memory.
            count = rows["steps"][0].numpy()
            count += 1
            tensors = rows["params"], chosen, rows["exp_avg"], rows["exp_avg_sq"], rows["steps"]
            is_decoupled = group.get("decoupled_weight_decay", type(self._optimizer) is AdamW)
            fused_adam(*tensors, is_decoupled=is_decoupled, group=group)

    def _is_plain(self, group: dict[str, Any]) -> bool:
        """Whether we know how to step a group with these options."""
        if not isinstance(group["lr"], float):
            return False
        if type(self._optimizer) is SGD:
            names = ("momentum", "weight_decay", "maximize", "fused", "differentiable")
            return not any(group[name] for name in names)
        betas = group["betas"]
        is_fused = group["fused"] and not group["amsgrad"] and not group["capturable"]
        return is_fused and not isinstance(betas[0], Tensor) and not isinstance(betas[1], Tensor)

    def _find_groups(self) -> list[_KnownGroup] | None:
        """The tensors that a step of this optimizer works on; None if we do not know how it steps."""
        optimizer = self._optimizer
        if type(optimizer) not in (SGD, Adam, AdamW) or has_own_step(optimizer):
            return None
        groups = []
        for group in optimizer.param_groups:
            parameters: list[Tensor] = group["params"]
            if not self._is_plain(group) or not all(map(self._is_ordinary, parameters)):
                return None
            if len({(each.dtype, each.device) for each in parameters}) != 1:
                return None
            rows = {"params": [each.detach().view(-1) for each in parameters]}
            if type(optimizer) is not SGD:
                state = [optimizer.state[each] for each in parameters]
                if len({each["step"].item() for each in state}) != 1:
                    return None
                # All have made the same number of steps, so one counter serves them all and is advanced by
                # one call.
                for each in state:
                    each["step"] = state[0]["step"]
                rows["steps"] = [each["step"] for each in state]
                for name in ("exp_avg", "exp_avg_sq"):
                    rows[name] = [each[name].view(-1) for each in state]
            groups.append(_KnownGroup(rows, [self._numbers[id(each)] for each in parameters]))
        return groups

    def _is_ordinary(self, parameter: Tensor) -> bool:
        gradient = parameter.grad
        has_rows = id(parameter) in self._numbers and parameter.is_contiguous() and not parameter.is_complex()
        return has_rows and gradient is not None and not gradient.is_sparse

    def _split_counters(self) -> None:
        """Give every parameter its own counter again: the optimizer's own step advances each."""
        for state in self._optimizer.state.values() if self._groups is not None else ():
            if "step" in state:
                state["step"] = state["step"].clone()
