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

from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Kernels with another outcome each time, or one that Python has seen.
_UNFIT_TAGS = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    # What such a kernel changes is the shape of a tensor that others hold too.
    torch.Tag.inplace_view,
}
# Ways out of torch that no kernel shows: what goes there, Python or somebody else may read.
_WAYS_OUT = ("numpy", "tolist", "data_ptr", "untyped_storage", "__dlpack__")
# The same kernels by an entrance that parses its arguments sooner.
_aten = torch.ops.aten
_QUICK: dict[Any, Callable[..., Any]] = {_aten.relu.default: torch.relu}
# Those that can write where they wrote before.
IN_PLACE: dict[Any, Callable[..., Any]] = {
    _aten.addmm.default: torch.addmm,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.sum.dim_IntList: torch.sum,
    _aten._log_softmax.default: torch._log_softmax,
    _aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
}
# What a recording may keep for its results.
BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel, or a view, with the places of its tensors."""

    func: Any
    args: list[Any]
    options: dict[str, Any]
    results: list[Tensor | None]
    several: bool


def is_plain(loss: Tensor) -> bool:
    """Whether backward can begin at this loss with its scale, without multiplying first."""
    return type(loss) is Tensor and not loss.dim() and loss.dtype == torch.float32


class Unfit(Exception):
    """This batch does something that cannot be recorded."""


@contextmanager
def _ways_out_closed(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Nobody in this thread takes a value out of a tensor without a kernel that shows it."""
    thread = get_ident()
    before = {name: vars(Tensor)[name] for name in _WAYS_OUT if name in vars(Tensor)}

    def closed(name: str) -> Callable[..., Any]:
        usual = getattr(Tensor, name)

        def way_out(*args: Any, **kwargs: Any) -> Any:
            return usual(*args, **kwargs) if get_ident() != thread else refuse(name)

        return way_out

    for name in _WAYS_OUT:
        setattr(Tensor, name, closed(name))
    try:
        yield
    finally:
        for name in _WAYS_OUT:
            if name in before:
                setattr(Tensor, name, before[name])
            else:
                delattr(Tensor, name)  # it is inherited


class _Listener(TorchFunctionMode):
    """Hears what is called by name: one function reads a tensor and calls no kernel for it."""

    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "tensor_split":
            self._refuse("tensor_split")
        return func(*args, **(kwargs or {}))


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every kernel that is called, below autograd."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here; skipping it would first import the compiler, for seconds, on every node.
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        # Why it is of no use; the user's code may have caught what we raised.
        self.refused = ""

    def watch(self, compute: Callable[[], Tensor]) -> Tensor:
        def refuse(name: str) -> NoReturn:
            self._refuse(f"{name} lets somebody see a value")

        with _ways_out_closed(refuse), _Listener(refuse), self:
            loss = compute()
        if self.refused:
            raise Unfit(self.refused)
        return loss

    def _refuse(self, why: str) -> NoReturn:
        self.refused = why
        raise Unfit(why)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _UNFIT_TAGS.isdisjoint(func.tags):
            self._refuse(f"{func} gives another result each time, or one that Python sees")
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


class Recording:
    """What one batch of a shape does, to be done with others.

    Every tensor has its place in memory, for good: batches are copied to theirs, and kernels write where they
    wrote when they were watched. So a recording is a list of calls without arguments.
    """

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
        watcher = _Watcher()
        loss = self.watched_loss = watcher.watch(compute)
        if not is_plain(loss):
            raise Unfit("its gradients do not begin with a scale of their own")
        # An id is only good while its tensor lives: the watcher keeps them all until we are done.
        self._places: dict[int, Tensor] = {}
        # Those that the batch made itself, and of these the ones that nothing was written into.
        self._own: set[int] = set()
        self._empty: set[int] = set()
        self.bytes = 0
        self._calls: list[Callable[[], object]] = []
        # What is called and looked at, in order, for whoever makes something else of it.
        self.program: list[Call] = []
        self.inputs = [self._place(tensor, tensor.clone()) for tensor in inputs]
        for tensor in steady:
            self._place(tensor, tensor.detach())
        for call in watcher.calls:
            self._add(*call)
        self.loss = self._known(loss)
        self.gradients = [
            torch.zeros(each.numel(), dtype=each.dtype) if each.grad is None else self._known(each.grad)
            for each in parameters
        ]
        # As one row, if it lies like that already; else it is made one each time.
        self._rows = [each.view(-1) if each.is_contiguous() else None for each in self.gradients]
        # What is trained, to be tried with other numbers; nobody is told that it was written to.
        self.weights = [each.data for each in parameters]
        # Which of the parameters took no part.
        self.absent = [i for i, each in enumerate(parameters) if each.grad is None]
        del self._places, self._own, self._empty

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The same with another batch: its loss, and each parameter's gradient as one row, until the next."""
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.copy_(tensor)
        for call in self._calls:
            call()
        return self.loss, [
            each.reshape(-1) if row is None else row
            for row, each in zip(self._rows, self.gradients, strict=True)
        ]

    # --- making it --------------------------------------------------------------------------------

    def _place(self, tensor: Tensor, place: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise Unfit(f"a {type(tensor).__name__} takes part")
        self._places[id(tensor)] = place
        return place

    def _known(self, tensor: Tensor) -> Tensor:
        place = self._places.get(id(tensor))
        if place is None:
            raise Unfit("a tensor takes part that is neither of the model nor of the batch")
        return place

    def _placed(self, value: Any) -> Any:
        """An argument of a kernel, with each tensor in its place."""
        if isinstance(value, Tensor):
            return self._known(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._placed(each) for each in value)
        return value

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func is _aten.detach.default:
            # Another name for what is there already.
            self._place(result, self._known(args[0]))
            return
        if func is _aten.copy_.default and id(args[0]) in self._empty:
            # Autograd copies a gradient that somebody else holds too; here that is only the watcher. As they
            # are one now, nobody may write into either.
            source = self._known(args[1])
            if source.shape != args[0].shape or source.dtype != args[0].dtype:
                raise Unfit("a gradient that is changed while it is copied")
            self._place(args[0], source)
            self._own -= {id(args[0]), id(args[1])}
            self._empty.discard(id(args[0]))
            return
        self._check_writes(func, args, kwargs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        # A gradient that nobody asked for is None.
        if not all(each is None or isinstance(each, Tensor) for each in results):
            raise Unfit(f"{func} gives something that is no tensor")
        placed = [self._placed(each) for each in args]
        options = {name: self._placed(each) for name, each in kwargs.items()}
        several = isinstance(result, (tuple, list))
        if func.is_view:
            # Of what stays where it is: made once.
            views = func(*placed, **options)
            views = list(views) if several else [views]
            for each, view in zip(results, views, strict=True):
                self._place(each, view)
            self.program.append(Call(func, placed, options, views, several))
            return
        # What was written in place comes back as itself.
        fresh = [each for each in results if each is not None and id(each) not in self._places]
        for each in fresh:
            self._place(each, each.detach())
            self._own.add(id(each))
            self.bytes += each.nbytes
        if self.bytes > BYTES_MAX:
            raise Unfit(f"it would keep more than {BYTES_MAX} bytes")
        if func is _aten.new_empty_strided.default:
            self._empty.add(id(result))
            return
        places = [None if each is None else self._known(each) for each in results]
        self.program.append(Call(func, placed, options, places, several))
        quick = IN_PLACE.get(func)
        if quick is not None:
            self._calls.append(partial(quick, *placed, **options, out=self._known(result)))
        elif not fresh:
            self._calls.append(partial(func._op, *placed, **options))
        else:
            kernel = partial(_QUICK.get(func, func._op), *placed, **options)
            self._calls.append(moving(kernel, places, several=several))

    def _check_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a batch made itself it may write into; but nothing else."""
        if not func._schema.is_mutable:
            return
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given:
                value = given[argument.name]
                for each in value if isinstance(value, (list, tuple)) else [value]:
                    if id(each) not in self._own:
                        raise Unfit("it writes into the model or the batch")


def moving(kernel: Callable[[], Any], places: list[Tensor | None], *, several: bool) -> Callable[[], object]:
    """A kernel that takes new memory each time, and what it gives copied to its place."""

    def call() -> None:
        for place, given in zip(places, kernel() if several else (kernel(),), strict=True):
            if place is not None:
                if place.shape != given.shape:  # copying would stretch it
                    raise Unfit(f"a result of shape {tuple(given.shape)}, not {tuple(place.shape)}")
                place.copy_(given)

    return call
