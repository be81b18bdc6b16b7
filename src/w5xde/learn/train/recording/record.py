"""Recordings: the kernels that one batch of a small model calls, in order, with memory for their results.

Forward and backward of a small model are mostly Python, autograd's bookkeeping and dispatch: of 250
microseconds for a network of 430 parameters some 40 are arithmetic. A recording lists the kernels of one
batch, so that `replay` can call the same kernels for other batches of that shape, with the same bits.

That holds if the loss is a function of the model and the batch alone, as all distributed training requires.
A batch that does anything else is not recordable: random numbers, values that Python reads, buffers that
change, tensors that come from neither model nor batch. Knows nothing of how recordings are used or checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from w5xde.learn.torch_private import KernelCall, NotRecordable, listed, map_leaves, starts_at_scale, watch

# A recording keeps the results of all its kernels: this much is little beside torch itself.
RESULT_BYTES_MAX = 16 * 1024 * 1024

_aten = torch.ops.aten


class Recording:
    """The kernel calls of one batch. Each tensor has a place in memory that never changes."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        steady: Sequence[Tensor],
        parameters: Sequence[Tensor],
        compute: Callable[[], Tensor],
    ) -> None:
        """Watch `compute`, which returns a loss and leaves the gradients of the parameters.

        `inputs` are the tensors of the batch, and last the scale at which backward starts. `steady` tensors,
        those of the model, are the same for all batches. Raises `NotRecordable`.
        """
        loss, calls = watch(compute)
        if not starts_at_scale(loss):
            raise NotRecordable("backward multiplies this loss before it starts")
        # By the id of the watched tensor; `calls` keeps these tensors alive, so that ids stay unique.
        self._places: dict[int, Tensor] = {}
        # Tensors that the batch made itself; and of these the ones that it has not written into.
        self._own: set[int] = set()
        self._empty: set[int] = set()
        self.result_bytes = 0
        # With places for tensors.
        self.calls: list[KernelCall] = []
        self.inputs = [self._place(tensor, tensor.clone()) for tensor in inputs]
        for tensor in steady:
            self._place(tensor, tensor.detach())
        for call in calls:
            self._add(call)
        self.loss = self._place_of(loss)
        gradients = [parameter.grad for parameter in parameters]
        self.gradients = [
            parameter.detach().new_zeros(parameter.shape) if gradient is None else self._place_of(gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        # Parameters without a gradient.
        self.absent = frozenset(number for number, gradient in enumerate(gradients) if gradient is None)
        # The parameters' memory, for trials with other numbers; torch does not count writes into it.
        self.weights = [parameter.data for parameter in parameters]
        del self._places, self._own, self._empty

    def _place(self, tensor: Tensor, place: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise NotRecordable(f"a {type(tensor).__name__} takes part")
        self._places[id(tensor)] = place
        return place

    def _place_of(self, value: Any) -> Any:
        """The place of a tensor; any other value as it is."""
        if isinstance(value, Tensor) and id(value) not in self._places:
            raise NotRecordable("a tensor takes part that is neither of the model nor of the batch")
        return self._places.get(id(value), value)

    def _add(self, call: KernelCall) -> None:
        kernel, args, results = call.kernel, call.args, call.results
        if kernel is _aten.copy_.default and id(args[0]) in self._empty:
            self._add_copied_gradient(args[0], args[1])
            return
        if call.writes and any(id(each) not in self._own for each in call.written):
            raise NotRecordable("it writes into the model or the batch")
        # A kernel returns None for a gradient that is not needed.
        if not all(each is None or isinstance(each, Tensor) for each in results):
            raise NotRecordable(f"{kernel} returns something that is not a tensor")
        placed, options = map_leaves(self._place_of, (args, call.options))
        if call.is_view:
            # Made once, because its base never moves.
            for each, view in zip(results, listed(kernel(*placed, **options)), strict=True):
                self._place(each, view)
        else:
            self._add_results(call)
        if kernel is not _aten.new_empty_strided.default:
            places = [self._place_of(each) for each in results]
            self.calls.append(KernelCall(kernel, placed, options, places, call.returns_several))

    def _add_results(self, call: KernelCall) -> None:
        # A kernel returns a tensor that it wrote into as one of its results.
        fresh = [each for each in call.results if each is not None and id(each) not in self._places]
        if fresh and call.writes:
            raise NotRecordable(f"{call.kernel} writes into a tensor and returns a new one")
        for each in fresh:
            self._place(each, each.detach())
            self._own.add(id(each))
            self.result_bytes += each.nbytes
        if self.result_bytes > RESULT_BYTES_MAX:
            raise NotRecordable(f"it would keep more than {RESULT_BYTES_MAX} bytes")
        if call.kernel is _aten.new_empty_strided.default:
            self._empty.add(id(call.results[0]))

    def _add_copied_gradient(self, copy: Tensor, gradient: Tensor) -> None:
        """Autograd copies a gradient that other code holds; here only the watcher does.

        Both are one tensor in the recording, so nothing may write into either.
        """
        place = self._place_of(gradient)
        if place.shape != copy.shape or place.dtype != copy.dtype:
            raise NotRecordable("a gradient changes while autograd copies it")
        self._place(copy, place)
        self._own -= {id(copy), id(gradient)}
        self._empty.discard(id(copy))
