"""Kernel calls as steps: functions without arguments that repeat a call for every batch of a group.

A kernel that treats all batches alike is called once for all of them: element by element, row by row, matrix
by matrix. A kernel without such a rule is called once for each batch. Whether a rule gives the same bits as
one batch after another is not decided here: `replay` and `fast_path` compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from w5xde.learn.torch_private import OUT_VARIANTS, SOFTMAX_KERNELS, KernelCall, NotRecordable, map_leaves

# A multiple of the values that any vectorized loop takes at a time.
REGISTERS_VALUES = 64

_aten = torch.ops.aten
# How `nll_loss` reduces the losses of rows, as its kernels number it.
_MEAN, _NONE = 1, 0
# Element-by-element kernels that round once or not at all.
_EXACT = {
    _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.neg.default,
    _aten.abs.default, _aten.relu.default, _aten.threshold_backward.default, _aten.maximum.default,
    _aten.minimum.default, _aten.where.self,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stacked:
    """A tensor of each batch: the first dimension numbers the batches."""

    all: Tensor

    @property
    def rank(self) -> int:
        return self.all.dim() - 1

    @property
    def flat(self) -> Tensor:
        """The rows of all batches as those of one."""
        return self.all.view(-1, *self.all.shape[2:])


Step: TypeAlias = Callable[[], object]
# The steps of a call for all batches; None if the rule does not apply to these arguments.
_Rule: TypeAlias = Callable[[KernelCall], list[Step] | None]


def steps_of(call: KernelCall, size: int) -> list[Step]:
    """The steps of a call for a group of this size; tensors that differ between batches are `Stacked`."""
    rule = _RULES.get(call.kernel)
    if rule is None and call.is_pointwise and not call.writes and _is_uniform(call):
        rule = _pointwise
    steps = rule(call) if rule is not None and size > 1 else None
    return steps or [_step(_of_batch(number, call)) for number in range(size)]


def _of_batch(number: int, call: KernelCall) -> KernelCall:
    """The call for the batch of this number in the group."""
    return KernelCall(
        *map_leaves(lambda value: value.all[number] if isinstance(value, Stacked) else value, list(call))
    )


def _step(call: KernelCall) -> Step:
    """One call that leaves its results in the tensors `call.results`."""
    if call.kernel in OUT_VARIANTS:
        function, names = OUT_VARIANTS[call.kernel]
        places = dict(zip(names, call.results, strict=True))
        return partial(function, *call.args, **call.options, **places)
    kernel = partial(call.function, *call.args, **call.options)
    if call.writes:
        return kernel

    def call_and_copy() -> None:
        results = kernel() if call.returns_several else (kernel(),)
        for place, result in zip(call.results, results, strict=True):
            if place is not None:
                if place.shape != result.shape:  # copy_ would broadcast it
                    raise NotRecordable(f"a result of shape {tuple(result.shape)}, not {tuple(place.shape)}")
                place.copy_(result)

    return call_and_copy


# --- rules ----------------------------------------------------------------------------------------


def _is_uniform(call: KernelCall) -> bool:
    """Whether an element-by-element kernel treats each element alike, wherever it lies in memory.

    Most kernels round the last few elements, which fill no register, by another function than the others.
    That matters neither where rounding is exact nor where the elements of one batch fill registers.
    """
    if call.kernel in _EXACT:
        return bool(call.options.get("alpha", 1) == 1)
    return all(
        isinstance(each, Stacked)
        and each.all.is_contiguous()
        and each.all.shape == call.results[0].all.shape
        and each.all[0].numel() % REGISTERS_VALUES == 0
        for each in call.args
        if isinstance(each, (Stacked, Tensor))
    )


def _pointwise(call: KernelCall) -> list[Step] | None:
    """Element by element: a tensor of fewer dimensions is broadcast over the same ones as for one batch."""
    if len(call.results) != 1 or any(isinstance(each, (list, tuple)) for each in call.args):
        return None
    if not any(isinstance(each, Stacked) for each in call.args):
        return None  # Of the model alone: its result has no dimension of batches.
    (out,) = call.results

    def aligned(value: Any) -> Any:
        if not isinstance(value, Stacked):
            return value
        size, *shape = value.all.shape
        return value.all.view(size, *[1] * (out.rank - value.rank), *shape)

    options = {name: aligned(each) for name, each in call.options.items()}
    return [_step(call._replace(args=list(map(aligned, call.args)), options=options, results=[out.all]))]


def _addmm(call: KernelCall) -> list[Step] | None:
    bias, rows, matrix = call.args
    if isinstance(bias, Stacked) or isinstance(matrix, Stacked) or not rows.all.is_contiguous():
        return None
    return [_step(call._replace(args=[bias, rows.flat, matrix], results=[call.results[0].flat]))]


def _mm(call: KernelCall) -> list[Step] | None:
    (left, right), (out,) = call.args, call.results
    if isinstance(left, Stacked) and not isinstance(right, Stacked) and left.all.is_contiguous():
        return [partial(torch.mm, left.flat, right, out=out.flat)]
    size = len(out.all)
    both = [each.all if isinstance(each, Stacked) else each.expand(size, *each.shape) for each in call.args]
    return [partial(torch.bmm, *both, out=out.all)]


def _along(call: KernelCall) -> list[Step] | None:
    """A kernel that works along a dimension, given after its tensors."""
    count = next(number for number, each in enumerate(call.args) if not isinstance(each, Stacked))
    tensors, dim = [each.all for each in call.args[:count]], call.args[count]
    if len({each.dim() for each in tensors}) != 1:
        return None
    rank = tensors[0].dim() - 1
    if isinstance(dim, (list, tuple)):
        shifted: Any = [each + 1 if each >= 0 else each for each in dim or range(rank)]
    elif isinstance(dim, int) and rank:
        shifted = dim + 1 if dim >= 0 else dim
    else:
        return None
    args = [*tensors, shifted, *call.args[count + 1 :]]
    return [_step(call._replace(args=args, results=[call.results[0].all]))]


def _nll_backward(call: KernelCall) -> list[Step] | None:
    """The mean over a batch's rows starts with one gradient for all of them: here each row gets its own."""
    gradient, rows, target, weight, reduction, ignored, total = call.args
    if reduction != _MEAN or weight is not None or not isinstance(rows, Stacked) or rows.rank != 2:
        return None
    if not isinstance(target, Stacked) or not isinstance(total, Stacked):
        return None
    of_rows = rows.all.new_zeros(rows.all.shape[:2])
    of_batch = gradient.all if isinstance(gradient, Stacked) else gradient

    def spread() -> None:
        of_rows.copy_((of_batch / total.all).unsqueeze(1))

    args = [of_rows.view(-1), rows.flat, target.flat, None, _NONE, ignored, total.all[0]]
    return [spread, _step(call._replace(args=args, results=[call.results[0].flat]))]


_RULES: dict[Any, _Rule] = {
    _aten.addmm.default: _addmm,
    _aten.mm.default: _mm,
    _aten.sum.dim_IntList: _along,
    _aten.mean.dim: _along,
    **dict.fromkeys(SOFTMAX_KERNELS, _along),
    _aten.nll_loss_backward.default: _nll_backward,
}
