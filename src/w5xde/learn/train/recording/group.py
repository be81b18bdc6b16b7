"""Batches of a small model together: each recorded kernel once for all, where that gives the same bits.

A recorded batch of a small model spends its time on calling kernels, not in them. So batches of one shape
are laid side by side, and a kernel that treats every batch alike is called once for all: element by element,
row by row, matrix by matrix. A kernel that no rule here knows is called for each batch as before. That a rule
gives the very same bits as one batch after another is not believed either: the trainer compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from w5xde.learn.model.digest import same_bits, same_loss
from w5xde.learn.train.recording.record import IN_PLACE, Call, Recording, Unfit, moving

# As many batches as often come together, and no more memory than stays close to a core.
SIZE_MAX = 16
BYTES_MAX = 4 * 1024 * 1024

# What a group is tried with before it computes anything: so many times, weights at least so far apart.
TRIALS = 4
SPREAD_MIN = 0.1
# A multiple of what any loop over registers takes at a time.
REGISTERS_VALUES = 64

_aten = torch.ops.aten
_MEAN, _NONE = 1, 0
# Kernels with one rounding or none.
_EXACT = {
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.mul.Tensor,
    _aten.div.Tensor,
    _aten.neg.default,
    _aten.abs.default,
    _aten.relu.default,
    _aten.threshold_backward.default,
    _aten.maximum.default,
    _aten.minimum.default,
    _aten.where.self,
}


@dataclass(frozen=True, slots=True)
class _Many:
    """A tensor of each batch: the first dimension says which."""

    all: Tensor

    @property
    def rank(self) -> int:
        return self.all.dim() - 1

    @property
    def flat(self) -> Tensor:
        """The rows of all batches as those of one."""
        return self.all.view(-1, *self.all.shape[2:])


# What a kernel is given and where it writes; one for all, or several.
_Step: TypeAlias = Callable[[], object]
# A rule gives the steps that do what a kernel does, for all batches; None if it does not know how.
_Rule: TypeAlias = Callable[[int, Call, list[Any], dict[str, Any], list[_Many]], list[_Step] | None]


class Group:
    """A recording of one batch, made to compute several side by side."""

    def __init__(self, recording: Recording) -> None:
        self.size = min(SIZE_MAX, BYTES_MAX // max(1, recording.bytes))
        if self.size < 2:
            raise Unfit("one batch is large enough to be worth its calls")
        self.absent = recording.absent
        # By the place that a tensor has in the recording: what is not here is shared by all batches.
        self._many: dict[int, _Many] = {}
        self._steps: list[_Step] = []
        # The last one is the scale, which all have in common.
        *own, self._scale = recording.inputs
        self._inputs = [self._new(place).all for place in own]
        for call in recording.program:
            self._add(call)
        self._losses = self._known(recording.loss).all
        gradients = [self._many.get(id(each)) for each in recording.gradients]
        self._gradients = [
            each.reshape(1, -1).expand(self.size, -1) if many is None else many.all
            for each, many in zip(recording.gradients, gradients, strict=True)
        ]
        del self._many
        self._try(recording)

    def _try(self, recording: Recording) -> None:
        """With numbers of our own: a model that begins with zeros hides what rounds otherwise."""
        chance = torch.Generator().manual_seed(0)
        kept = [weight.clone() for weight in recording.weights]
        *own, scale = [place.clone() for place in recording.inputs]
        try:
            for weight, before in zip(recording.weights, kept, strict=True):
                if weight.is_floating_point():
                    size = max(SPREAD_MIN, float(before.std()) if before.numel() > 1 else 0.0)
                    weight.copy_(torch.randn(weight.shape, generator=chance).mul_(size))
            for _ in range(TRIALS):
                batches = [[_shuffled(place, chance) for place in own] for _ in range(self.size)]
                losses, rows = self.run(batches, scale)
                found = [row.clone() for row in rows]
                for i, batch in enumerate(batches):
                    loss, gradients = recording.run([*batch, scale])
                    same = [same_bits(many[i], one) for many, one in zip(found, gradients, strict=True)]
                    if not all(same) or not same_loss(losses[i], loss.item()):
                        raise Unfit("many together round otherwise than one by one")
        finally:
            for weight, before in zip(recording.weights, kept, strict=True):
                weight.copy_(before)

    def run(self, batches: Sequence[Sequence[Tensor]], scale: Tensor) -> tuple[list[float], list[Tensor]]:
        """The loss of each batch; and each parameter's gradients, one row for a batch, until the next run.

        Rows beyond the batches mean nothing.
        """
        count = len(batches)
        for number, place in enumerate(self._inputs):
            torch.stack([batch[number] for batch in batches], out=place[:count])
        self._scale.copy_(scale)
        for step in self._steps:
            step()
        return self._losses.tolist(), [each.reshape(self.size, -1) for each in self._gradients]

    # --- making it --------------------------------------------------------------------------------

    def _new(self, one: Tensor) -> _Many:
        """Memory for a tensor of each batch; each lies as the one does."""
        length = 1 + sum((n - 1) * s for n, s in zip(one.shape, one.stride(), strict=True))
        if length != one.numel():
            raise Unfit("a tensor with holes takes part")
        many = torch.zeros(self.size * length, dtype=one.dtype, device=one.device)
        self._many[id(one)] = found = _Many(many.as_strided((self.size, *one.shape), (length, *one.stride())))
        return found

    def _known(self, one: Tensor) -> _Many:
        found = self._many.get(id(one))
        if found is None:
            raise Unfit("a loss that does not depend on the batch")
        return found

    def _placed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._many.get(id(value), value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._placed(each) for each in value)
        return value

    def _add(self, call: Call) -> None:
        args = [self._placed(each) for each in call.args]
        options = {name: self._placed(each) for name, each in call.options.items()}
        if call.func.is_view:
            self._add_view(call, args)
            return
        outs = [self._many.get(id(each)) or self._new(each) for each in call.results if each is not None]
        rule = _RULES.get(call.func)
        if rule is None and torch.Tag.pointwise in call.func.tags and not call.func._schema.is_mutable:
            rule = _pointwise if _is_alike(call, args, outs) else None
        steps = rule(self.size, call, args, options, outs) if rule is not None else None
        self._steps += steps if steps is not None else self._one_by_one(call, args, options, outs)

    def _add_view(self, call: Call, args: list[Any]) -> None:
        """Another look at what lies where it lay: each batch's is as far from its own as the recorded one."""
        one, many = call.args[0], args[0]
        if not isinstance(many, _Many):
            return  # of the model: it stays shared
        for view in call.results:
            if view is None or view.dtype != one.dtype or not _is_same_memory(view, one):
                raise Unfit(f"{call.func} gives something else than a view")
            offset = many.all.storage_offset() + view.storage_offset() - one.storage_offset()
            strides = (many.all.stride(0), *view.stride())
            self._many[id(view)] = _Many(many.all.as_strided((self.size, *view.shape), strides, offset))

    def _one_by_one(
        self, call: Call, args: list[Any], options: dict[str, Any], outs: list[_Many]
    ) -> list[_Step]:
        steps: list[_Step] = []
        for i in range(self.size):
            own = [_of(i, each) for each in args]
            named = {name: _of(i, each) for name, each in options.items()}
            given = iter(outs)
            places = [None if each is None else next(given).all[i] for each in call.results]
            in_place = IN_PLACE.get(call.func)
            if in_place is not None:
                steps.append(partial(in_place, *own, **named, out=places[0]))
            elif call.func._schema.is_mutable:
                steps.append(partial(call.func._op, *own, **named))
            else:
                kernel = partial(call.func._op, *own, **named)
                steps.append(moving(kernel, places, several=call.several))
        return steps


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _shuffled(values: Tensor, chance: torch.Generator) -> Tensor:
    """The same numbers in another order: whatever is allowed among them still is."""
    return values.view(-1)[torch.randperm(values.numel(), generator=chance)].view(values.shape)


def _is_alike(call: Call, args: list[Any], outs: list[_Many]) -> bool:
    """Whether an element-by-element kernel surely treats every element alike, wherever it lies.

    Most round the last few elements, which fill no register, by another function than the others. That
    matters neither where rounding is exact nor where the elements of one batch fill registers.
    """
    if call.func in _EXACT:
        return bool(call.options.get("alpha", 1) == 1)
    tensors = [each for each in args if isinstance(each, (_Many, Tensor))]
    return all(
        isinstance(each, _Many)
        and each.all.is_contiguous()
        and each.all.shape == outs[0].all.shape
        and each.all[0].numel() % REGISTERS_VALUES == 0
        for each in tensors
    )


def _of(i: int, value: Any) -> Any:
    """What the i-th batch has of a value."""
    if isinstance(value, _Many):
        return value.all[i]
    if isinstance(value, (list, tuple)):
        return type(value)(_of(i, each) for each in value)
    return value


def _step(kernel: Callable[..., Any], *args: Any, out: Tensor, **options: Any) -> list[_Step]:
    """A kernel that writes to its place, or whose result is copied there."""
    if kernel in _WRITES:
        return [partial(kernel, *args, **options, out=out)]
    return [moving(partial(kernel, *args, **options), [out], several=False)]


_WRITES = set(IN_PLACE.values())

# --- rules ----------------------------------------------------------------------------------------


def _pointwise(
    size: int, call: Call, args: list[Any], options: dict[str, Any], outs: list[_Many]
) -> list[_Step] | None:
    """Element by element: what has fewer dimensions is stretched over the same ones as before."""
    rank = outs[0].rank

    def aligned(value: Any) -> Any:
        if not isinstance(value, _Many):
            return value
        shape = value.all.shape
        return (
            value.all if value.rank == rank else value.all.view(size, *[1] * (rank - value.rank), *shape[1:])
        )

    if len(outs) != 1 or any(isinstance(each, (list, tuple)) for each in args):
        return None
    if not any(isinstance(each, _Many) for each in args):
        return None  # of the model alone: it would not even be as long as the others
    named = {name: aligned(each) for name, each in options.items()}
    return _step(call.func._op, *[aligned(each) for each in args], out=outs[0].all, **named)


def _addmm(
    size: int, call: Call, args: list[Any], options: dict[str, Any], outs: list[_Many]
) -> list[_Step] | None:
    bias, rows, matrix = args
    if isinstance(bias, _Many) or isinstance(matrix, _Many) or not rows.all.is_contiguous():
        return None
    return _step(torch.addmm, bias, rows.flat, matrix, out=outs[0].flat, **options)


def _mm(
    size: int, call: Call, args: list[Any], options: dict[str, Any], outs: list[_Many]
) -> list[_Step] | None:
    left, right = args
    if isinstance(left, _Many) and not isinstance(right, _Many) and left.all.is_contiguous():
        return _step(torch.mm, left.flat, right, out=outs[0].flat)
    both = [each.all if isinstance(each, _Many) else each.expand(size, *each.shape) for each in args]
    return _step(torch.bmm, *both, out=outs[0].all)


def _along(
    size: int, call: Call, args: list[Any], options: dict[str, Any], outs: list[_Many]
) -> list[_Step] | None:
    """A kernel that works along a dimension, given after its tensors."""
    at = next(i for i, each in enumerate(args) if not isinstance(each, _Many))
    dim = args[at]
    tensors = [each.all for each in args[:at]]
    if not tensors or len({each.dim() for each in tensors}) > 1:
        return None
    rank = tensors[0].dim() - 1
    if isinstance(dim, (list, tuple)):
        shifted: Any = [each + 1 if each >= 0 else each for each in dim or range(rank)]
    elif isinstance(dim, int) and rank:
        shifted = dim + 1 if dim >= 0 else dim
    else:
        return None
    kernel = IN_PLACE.get(call.func, call.func._op)
    return _step(kernel, *tensors, shifted, *args[at + 1 :], out=outs[0].all, **options)


def _nll_backward(
    size: int, call: Call, args: list[Any], options: dict[str, Any], outs: list[_Many]
) -> list[_Step] | None:
    """The mean over a batch's rows begins with one gradient for all of them: here each row gets its own."""
    gradient, rows, target, weight, reduction, ignored, total = args
    if reduction != _MEAN or weight is not None or not isinstance(rows, _Many) or rows.rank != 2:
        return None
    if not isinstance(target, _Many) or not isinstance(total, _Many):
        return None
    of_rows = torch.zeros(size, rows.all.shape[1], dtype=rows.all.dtype)
    of_batch = gradient.all if isinstance(gradient, _Many) else gradient

    def spread() -> None:
        of_rows.copy_((of_batch / total.all).unsqueeze(1))

    kernel = call.func._op
    flat = (of_rows.view(-1), rows.flat, target.flat, None, _NONE, ignored, total.all[0])
    return [spread, *_step(kernel, *flat, out=outs[0].flat)]


def _nll_forward(
    size: int, call: Call, args: list[Any], options: dict[str, Any], outs: list[_Many]
) -> list[_Step] | None:
    """One after another, because the sum over rows has an order of its own; but straight to its place."""
    kernel = _aten.nll_loss_forward.output
    return [
        partial(kernel, *[_of(i, each) for each in args], output=outs[0].all[i], total_weight=outs[1].all[i])
        for i in range(size)
    ]


_RULES: dict[Any, _Rule] = {
    _aten.addmm.default: _addmm,
    _aten.mm.default: _mm,
    _aten.sum.dim_IntList: _along,
    _aten.mean.dim: _along,
    _aten._log_softmax.default: _along,
    _aten._softmax.default: _along,
    _aten._log_softmax_backward_data.default: _along,
    _aten._softmax_backward_data.default: _along,
    _aten.nll_loss_forward.default: _nll_forward,
    _aten.nll_loss_backward.default: _nll_backward,
}
