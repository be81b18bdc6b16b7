"""Recorded batches: the kernels that a batch of a small model runs, without the Python around them.

Forward and backward of a small model are mostly Python, autograd's bookkeeping and dispatch: of 250
microseconds for a network of 430 parameters some 40 are arithmetic. So one batch is watched: every kernel it
calls, in order, forward and backward. The next batches of that shape call the very same kernels on their own
data, which gives the very same bits.

That holds if the loss is a function of the model and the batch alone, which all distributed training rests
upon. Whatever would make it something else is not recorded: random numbers, values read back into Python,
buffers that change, tensors from nowhere. And nothing recorded is believed: it is compared with the real
thing, bit by bit, on the first batches and then ever more rarely.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Kernels with another outcome each time, or one that Python has seen.
_UNFIT_TAGS = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
# The same kernels by an entrance that parses its arguments sooner.
_aten = torch.ops.aten
_QUICK: dict[Any, Callable[..., Any]] = {
    _aten.relu.default: torch.relu,
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.view.default: Tensor.view,
}
# Those that can write where they wrote before: nothing is allocated, and views of it stay as they are.
_QUICK_IN_PLACE: dict[Any, Callable[..., Any]] = {
    _aten.addmm.default: torch.addmm,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.sum.dim_IntList: torch.sum,
    _aten._log_softmax.default: torch._log_softmax,
    _aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
}


# A batch that takes longer than this has little to gain.
SMALL_SECONDS = 0.005
# So many batches of a shape are compared with the real thing; then the 8th, the 16th, the 32nd…
COMPARED_FIRST = 4
# Batches of ever new shapes are not worth watching.
SHAPES_MAX = 16


def is_plain(loss: Tensor) -> bool:
    """Whether backward can begin at this loss with its scale, without multiplying first."""
    return type(loss) is Tensor and not loss.dim() and loss.dtype == torch.float32


class Unfit(Exception):
    """This batch does something that cannot be recorded."""


# A tensor computed before, by number, or a list of such.
_Fill: TypeAlias = int | list[int]


class _Call(NamedTuple):
    """One kernel: its arguments, and which of them are tensors computed before; where its results go."""

    kernel: Callable[..., Any]
    arguments: list[Any]
    fills: list[tuple[int, _Fill]]
    options: dict[str, Any]
    option_fills: list[tuple[str, _Fill]]
    results: list[int]
    gives_several: bool


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every kernel that is called, below autograd."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here; skipping it would first import the compiler, for seconds, on every node.
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _UNFIT_TAGS.isdisjoint(func.tags):
            raise Unfit(f"{func} gives another result each time, or one that Python sees")
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


def _filled(values: list[Any], number: _Fill) -> Any:
    return values[number] if isinstance(number, int) else [values[each] for each in number]


class Recording:
    """What one batch of a shape does, to be done with others."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        steady: Sequence[Tensor],
        parameters: Sequence[Tensor],
        compute: Callable[[], Tensor],
    ) -> None:
        """Watch `compute`, which gives a loss and leaves the gradients of the parameters.

        `steady` tensors, those of the model, are always the same and stay where they are in memory.
        """
        with _Watcher() as watcher:
            loss = self.watched_loss = compute()
        if not is_plain(loss):
            raise Unfit("its gradients do not begin with a scale of their own")
        self._numbers: dict[int, int] = {}
        # Of each tensor: the memory it always has, or None if that is another each time.
        self._places: list[Tensor | None] = []
        self._alive = watcher.calls  # an id is only good while its tensor lives
        # Batches are copied to where the first one lies: in torch's own memory, aligned like all of it.
        self._inputs = [tensor.clone() for tensor in inputs]
        for tensor, place in zip(inputs, self._inputs, strict=True):
            self._number(tensor, place)
        for tensor in steady:
            self._number(tensor, tensor.detach())
        self._outside = len(self._places)
        self._calls: list[_Call] = []
        for func, args, kwargs, result in watcher.calls:
            self._add(func, args, kwargs, result)
        self._loss = self._known(loss)
        self._gradients = [self._flat_gradient(each) for each in parameters]
        # Which of the parameters took no part.
        self.absent = [i for i, each in enumerate(parameters) if each.grad is None]
        del self._numbers, self._alive

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The same with another batch: its loss, and each parameter's gradient as one row, until the next."""
        for place, tensor in zip(self._inputs, inputs, strict=True):
            place.copy_(tensor)
        values: list[Any] = self._places.copy()
        for kernel, template, fills, fixed, option_fills, results, gives_several in self._calls:
            arguments, options = template, fixed
            if fills:
                arguments = template.copy()
                for i, number in fills:
                    arguments[i] = _filled(values, number)
            if option_fills:
                options = fixed | {name: _filled(values, number) for name, number in option_fills}
            result = kernel(*arguments, **options)
            if gives_several:
                for number, each in zip(results, result, strict=True):
                    values[number] = each
            elif results:
                values[results[0]] = result
        gradients = [values[each].reshape(-1) if isinstance(each, int) else each for each in self._gradients]
        return values[self._loss], gradients

    def _flat_gradient(self, parameter: Tensor) -> int | Tensor:
        """Which number a parameter's gradient has, or itself if it always lies in the same place."""
        if parameter.grad is None:
            return torch.zeros(parameter.numel(), dtype=parameter.dtype)
        number = self._known(parameter.grad)
        place = self._places[number]
        return place.view(-1) if place is not None and place.is_contiguous() else number

    # --- making it --------------------------------------------------------------------------------

    def _number(self, tensor: Tensor, place: Tensor | None) -> int:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise Unfit(f"a {type(tensor).__name__} takes part")
        number = self._numbers[id(tensor)] = len(self._places)
        self._places.append(place)
        return number

    def _known(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            raise Unfit("a tensor takes part that is neither of the model nor of the batch")
        return number

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func is _aten.detach.default or self._is_copy_of_a_gradient(func, args):
            # Another name for what is there already: nobody writes into it.
            source = args[0] if func is _aten.detach.default else args[1]
            target = result if func is _aten.detach.default else args[0]
            self._numbers[id(target)] = self._known(source)
            return
        fills = [(i, number) for i, each in enumerate(args) if (number := self._tensors(each)) is not None]
        option_fills = [
            (name, number) for name, each in kwargs.items() if (number := self._tensors(each)) is not None
        ]
        self._check_writes(func, args, kwargs)
        several = isinstance(result, (tuple, list))
        results = list(result) if several else [result]
        if not all(each is None or isinstance(each, Tensor) for each in results):
            raise Unfit(f"{func} gives something that is no tensor")
        is_view = func.is_view and all(
            type(number) is int and self._places[number] is not None for _, number in fills
        )
        quick = _QUICK_IN_PLACE.get(func)
        is_placed = is_view or quick is not None
        numbers = [self._result(each, is_placed=is_placed) for each in results]
        if is_view:
            return  # of memory that stays where it is
        filled = {i for i, number in fills if type(number) is not int or self._places[number] is None}
        options = {name: each for name, each in kwargs.items() if name not in dict(option_fills)}
        if quick is not None:
            options["out"] = self._places[numbers[0]]
        self._calls.append(
            _Call(
                quick or _QUICK.get(func, func._op),
                [
                    None
                    if i in filled
                    else self._places[self._known(each)]
                    if isinstance(each, Tensor)
                    else each
                    for i, each in enumerate(args)
                ],
                [(i, number) for i, number in fills if i in filled],
                options,
                option_fills,
                [] if quick is not None else numbers,
                several,
            )
        )

    def _result(self, tensor: Tensor | None, *, is_placed: bool) -> int:
        if tensor is None:  # a gradient that nobody asked for
            self._places.append(None)
            return len(self._places) - 1
        # What was written in place comes back as itself.
        known = self._numbers.get(id(tensor))
        return known if known is not None else self._number(tensor, tensor.detach() if is_placed else None)

    def _is_copy_of_a_gradient(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Autograd copies a gradient that somebody else holds too; here that is only the watcher."""
        if func is not _aten.copy_.default or not self._calls:
            return False
        last = self._calls[-1]
        made_by = last.kernel is _aten.new_empty_strided.default._op
        if made_by and last.results == [self._numbers.get(id(args[0]))]:
            self._calls.pop()
            return True
        return False

    def _tensors(self, value: Any) -> _Fill | None:
        """The tensors that an argument is or holds, by number."""
        if isinstance(value, Tensor):
            return self._known(value)
        if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
            if not all(isinstance(each, Tensor) for each in value):
                raise Unfit("tensors and other things in one list")
            return [self._known(each) for each in value]
        return None

    def _check_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a batch made itself it may write into; but nothing else."""
        if not func._schema.is_mutable:
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._check_own(value)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                self._check_own(kwargs[argument.name])

    def _check_own(self, value: Any) -> None:
        for each in value if isinstance(value, (list, tuple)) else [value]:
            number = self._known(each)
            if number < self._outside:
                raise Unfit("it writes into the model or the batch")


class Shape:
    """Batches of one shape, and how far we are with recording them."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.is_unfit = False
        self._batches = 0

    def watch(
        self,
        inputs: list[Tensor],
        steady: Sequence[Tensor],
        parameters: Sequence[Tensor],
        compute: Callable[[], Tensor],
    ) -> Tensor | None:
        """The loss of a batch, computed as always and maybe watched. None: it cannot be, do it again."""
        self._batches += 1
        if self._batches == 1:
            started = time.perf_counter()
            loss = compute()
            # Something larger spends its time in the kernels, and would only keep memory.
            self.is_unfit = time.perf_counter() - started > SMALL_SECONDS
            return loss
        try:
            self.recording = Recording(inputs, steady, parameters, compute)
        except Unfit:
            self.is_unfit = True
            return None
        self._batches = 0
        return self.recording.watched_loss

    def is_next_compared(self) -> bool:
        """Counts a batch; whether it is to be compared: the first few are, then ever more rarely."""
        self._batches += 1
        return self._batches <= COMPARED_FIRST or not self._batches & (self._batches - 1)

    def differs(self) -> bool:
        """A batch gave something else than its recording; returns whether others were believed before."""
        self.recording, self.is_unfit = None, True
        return self._batches > COMPARED_FIRST


def tensors_of(batch: Any) -> list[Any]:
    """What a batch consists of; tensors, if it can be recorded."""
    if type(batch) in (tuple, list):
        return list(batch)
    return list(batch.values()) if type(batch) is dict else [batch]


class Recordings:
    """A model's batches by shape."""

    def __init__(self) -> None:
        self._shapes: dict[Any, Shape] = {}

    def find(self, batch: Any) -> tuple[Shape, list[Tensor]] | None:
        """Which shape a batch is of, and its tensors; None if it is nothing to be recorded."""
        inputs = tensors_of(batch)
        key: list[Any] = [type(batch), *batch] if type(batch) is dict else [type(batch)]
        for each in inputs:
            if type(each) is not Tensor or each.requires_grad or not each.is_contiguous():
                return None
            key += [each.shape, each.dtype]
        found = tuple(key)
        shape = self._shapes.get(found)
        if shape is None:
            if len(self._shapes) >= SHAPES_MAX:
                return None
            shape = self._shapes[found] = Shape()
        return None if shape.is_unfit else (shape, inputs)
