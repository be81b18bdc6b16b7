"""Quick steps: what a torch optimizer does at a step, without what surrounds it.

For a small model most of `optimizer.step()` is Python around one kernel (profiling, grouping, checks): 90 of
110 microseconds with fused Adam. Here the very same kernels are called with the very same arguments, for
those optimizers we know by heart; every other, and every one with hooks, steps as always. Bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from w5xde.learn.step import without_compiler as lean
from w5xde.learn.step.without_compiler import has_hooks, is_patched

_ADAMS = (Adam, AdamW)


# The tensors of one of the optimizer's groups, by their part in a step.
_Group = dict[str, list[Tensor]]


class Stepper:
    """Steps one optimizer, quickly where that is possible."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """`parameters` are those that are trained, in the order in which `step_with` is given gradients."""
        self._optimizer = optimizer
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._groups: list[_Group] | None = None
        # The same tensors as rows of numbers, and whose gradients they take, by place.
        self._rows: list[tuple[_Group, list[int]]] = []

    @property
    def tensors(self) -> object:
        """The same object as before: the next step works on the same tensors. None: nobody knows."""
        return self._groups

    def step(self, *, same_gradients: bool) -> bool:
        """One step; `same_gradients`: all parameters hold the very tensors that they held at the last one.

        Returns whether it surely left the parameters where they are in memory.
        """
        if self._groups is None or not same_gradients or not self._is_still_known(self._groups):
            self._part_steps()
            # The first step makes the state, and tells the schedule that there was one.
            lean.step(self._optimizer)
            self._groups = self._known()
            self._rows = [self._in_rows(group) for group in self._groups or ()]
            return False
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._step_quickly(self._groups)
        else:
            self._step_quickly(self._groups)
        return True

    def is_known(self) -> bool:
        """Whether `step_with` may be called, until somebody else has had the optimizer or the parameters."""
        if self._groups is None or not self._is_still_known(self._groups):
            return False
        return all(
            row.data_ptr() == parameter.data_ptr()
            for (rows, _), group in zip(self._rows, self._groups, strict=True)
            for row, parameter in zip(rows["params"], group["params"], strict=True)
        )

    def step_with(self, gradients: Sequence[Tensor]) -> None:
        """One step with these gradients, each a row of numbers; those at the parameters stay as they are."""
        for group, (rows, places) in zip(self._optimizer.param_groups, self._rows, strict=True):
            rows["grads"] = [gradients[place] for place in places]
            self._step_group(group, rows)

    def _in_rows(self, group: _Group) -> tuple[_Group, list[int]]:
        rows = {
            name: tensors if name == "steps" else [each.detach().view(-1) for each in tensors]
            for name, tensors in group.items()
        }
        return rows, [self._places[id(parameter)] for parameter in group["params"]]

    def _step_quickly(self, groups: list[_Group]) -> None:
        for group, tensors in zip(self._optimizer.param_groups, groups, strict=True):
            self._step_group(group, tensors)

    def _step_group(self, group: dict[str, Any], tensors: _Group) -> None:
        if type(self._optimizer) is SGD:
            torch._foreach_add_(tensors["params"], tensors["grads"], alpha=-group["lr"])
        else:
            self._fused_adam(group, tensors)

    def _fused_adam(self, group: dict[str, Any], tensors: _Group) -> None:
        # Numpy counts in a fifth of the time; it is the same memory.
        count = tensors["steps"][0].numpy()
        count += 1
        beta1, beta2 = group["betas"]
        is_decoupled = group.get("decoupled_weight_decay", type(self._optimizer) is AdamW)
        kernel: Any = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
        kernel(
            tensors["params"],
            tensors["grads"],
            tensors["exp_avgs"],
            tensors["exp_avg_sqs"],
            [],
            tensors["steps"],
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=None,
            found_inf=None,
        )

    def _known(self) -> list[_Group] | None:
        """The tensors that a step of this optimizer works on, or None if we do not know how it steps."""
        optimizer = self._optimizer
        if type(optimizer) not in (SGD, *_ADAMS) or (has_hooks(optimizer) or is_patched(optimizer)):
            return None
        groups = []
        for group in optimizer.param_groups:
            params = group["params"]
            if any(id(p) not in self._places or not p.is_contiguous() for p in params):
                return None
            if any(p.grad is None or p.grad.is_sparse or p.is_complex() for p in params):
                return None
            if len({(p.dtype, p.device) for p in params}) != 1 or not isinstance(group["lr"], float):
                return None
            tensors = {"params": list(params), "grads": [p.grad for p in params]}
            if type(optimizer) is SGD:
                plain = not (group["momentum"] or group["weight_decay"] or group["maximize"])
                if not plain or group["fused"] or group["differentiable"]:
                    return None
            else:
                if not group["fused"] or group["amsgrad"] or group["capturable"]:
                    return None
                if any(isinstance(beta, Tensor) for beta in group["betas"]):
                    return None
                state = [optimizer.state[p] for p in params]
                if len({each["step"].item() for each in state}) != 1:
                    return None
                # All have made as many steps, so one counter serves them all; counting is a call for each.
                for each in state:
                    each["step"] = state[0]["step"]
                tensors |= {
                    "exp_avgs": [each["exp_avg"] for each in state],
                    "exp_avg_sqs": [each["exp_avg_sq"] for each in state],
                    "steps": [each["step"] for each in state],
                }
            groups.append(tensors)
        return groups

    def _part_steps(self) -> None:
        """Give every parameter its own counter again: the optimizer's own step counts each."""
        for group in self._groups or ():
            for parameter in group["params"] if "steps" in group else ():
                # None, if the step that made the state was undone; asking must not make one.
                state = self._optimizer.state.get(parameter)
                if state is not None:
                    state["step"] = state["step"].clone()

    def _is_still_known(self, groups: list[_Group]) -> bool:
        """Whether nobody has given the optimizer another state or a hook."""
        optimizer = self._optimizer
        if len(groups) != len(optimizer.param_groups) or (has_hooks(optimizer) or is_patched(optimizer)):
            return False
        for group, tensors in zip(optimizer.param_groups, groups, strict=True):
            if not isinstance(group["lr"], float):
                return False
            if type(optimizer) is SGD and (group["momentum"] or group["weight_decay"] or group["maximize"]):
                return False
            if type(optimizer) is not SGD and (group["amsgrad"] or not group["fused"]):
                return False
            last = tensors["params"][-1]
            if "steps" in tensors and optimizer.state.get(last, {}).get("step") is not tensors["steps"][0]:
                return False
        return True
