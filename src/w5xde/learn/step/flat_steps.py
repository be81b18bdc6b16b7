"""Ways to step an optimizer on flat memory: in pieces, or by fused kernels that are called directly.

Each way holds the tensors of one optimizer, and notices when other code changed the optimizer or moved a
parameter. Does not know which way is right for an optimizer: `fast_optimizer.py` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from w5xde.learn.model.layout import FlatModel
from w5xde.learn.model.parallel import SHARE_NUMBERS, on_all_cores, shares
from w5xde.learn.torch_private import (
    compiler_is_loaded,
    fused_adam,
    has_own_step,
    step_uncompiled,
    twin_of,
)

# State of a parameter that is one number and the same for all its elements.
COUNTERS = ("step", "mu_product")
# Numbers of a piece: its parameters, gradients and state stay in a core's cache from one kernel to the next.
# Measured with AdamW at 25 million parameters: half as many or twice as many are slower, and all in one piece
# take three times as long.
PIECE_NUMBERS = 128 * 1024


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


class FlatPlace(NamedTuple):
    """Where the numbers of a parameter lie: from `start` to `stop` in a part of the flat vector."""

    part: int
    start: int
    stop: int

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[self.part][self.start : self.stop]


class PlacedParameter(NamedTuple):
    """A parameter of one of the optimizer's groups."""

    parameter: Tensor
    place: FlatPlace


class _Unchanged:
    """Notices whether other code changed an optimizer, or moved its parameters."""

    def __init__(self, optimizer: Optimizer, flat: FlatModel) -> None:
        self._optimizer = optimizer
        self._flat = flat
        self._groups = [(len(group["params"]), _switches(group)) for group in optimizer.param_groups]
        # The last parameter that has a state: one that never had a gradient has none, and tells nothing.
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        last = next((each for each in reversed(parameters) if optimizer.state.get(each)), parameters[-1])
        self._last, self._last_state = last, dict(optimizer.state.get(last, {}))

    def holds(self) -> bool:
        optimizer = self._optimizer
        if has_own_step(optimizer) or not are_in_place(self._flat):
            return False
        groups = optimizer.param_groups
        if self._groups != [(len(group["params"]), _switches(group)) for group in groups]:
            return False
        # A state that was loaded consists of other tensors.
        state = optimizer.state.get(self._last, {})
        return len(state) == len(self._last_state) and all(
            state.get(name) is value for name, value in self._last_state.items()
        )


class _Share(NamedTuple):
    """Numbers of a parameter that one call of a kernel steps: all, or a share of a long parameter."""

    parameter: Tensor
    place: FlatPlace
    within: slice

    @classmethod
    def all_of(cls, member: PlacedParameter) -> list[_Share]:
        parameter, (part, start, stop) = member
        return [
            cls(parameter, FlatPlace(part, start + cut.start, start + cut.stop), cut)
            for cut in shares(stop - start)
        ]


class FusedSteps:
    """Steps of torch's fused Adam and AdamW: one call of the kernel for each group, or more on all cores.

    The kernel treats the last numbers of a tensor differently, so a long parameter is cut only where the
    kernel begins anew in any case.
    """

    def __init__(self, optimizer: Optimizer, flat: FlatModel, members: list[list[PlacedParameter]]) -> None:
        self._optimizer = optimizer
        self._flat = flat
        self._moving = flat.moving
        groups = [[share for member in group for share in _Share.all_of(member)] for group in members]
        self._groups = groups
        # For each group, which of its shares each call of the kernel takes.
        self._calls = [_calls([share.place for share in group]) for group in groups]
        self._rows = [self._rows_of(members) for members in groups]
        self._unchanged = _Unchanged(optimizer, flat)
        # If the parameters of all groups are a whole part, one call gives the gradients of all.
        self._sizes = [member.place.stop - member.place.start for group in groups for member in group]
        self._is_whole = [member.place for group in groups for member in group] == [
            FlatPlace(0, stop - size, stop)
            for size, stop in zip(self._sizes, accumulate(self._sizes), strict=True)
        ] and sum(self._sizes) == flat.moving.parts[0].numel()

    @classmethod
    def find(
        cls, optimizer: Optimizer, flat: FlatModel, groups: list[list[PlacedParameter]]
    ) -> FusedSteps | None:
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            if type(optimizer) not in (Adam, AdamW) or group["amsgrad"] or not members:
                return None
            if len({member.parameter.dtype for member in members}) != 1:
                return None
        for members in groups:
            # One counter serves all parameters that have made the same number of steps.
            counters: dict[float, Tensor] = {}
            for member in members:
                state = optimizer.state[member.parameter]
                state["step"] = counters.setdefault(state["step"].item(), state["step"])
        return cls(optimizer, flat, groups)

    def _rows_of(self, members: list[_Share]) -> dict[str, list[Tensor]]:
        state = [self._optimizer.state[member.parameter] for member in members]
        cuts = [member.within for member in members]
        return {
            "params": [member.place.of(self._moving.parts) for member in members],
            "exp_avg": [each["exp_avg"].view(-1)[cut] for each, cut in zip(state, cuts, strict=True)],
            "exp_avg_sq": [each["exp_avg_sq"].view(-1)[cut] for each, cut in zip(state, cuts, strict=True)],
            "steps": [each["step"] for each in state],
            "counters": list({id(each["step"]): each["step"] for each in state}.values()),
        }

    def are_valid(self) -> bool:
        if not self._unchanged.holds():
            return False
        if self._moving is not self._flat.moving:
            self._moving = self._flat.moving
            self._rows = [self._rows_of(members) for members in self._groups]
        return True

    def make(self, gradients: Sequence[Tensor]) -> None:
        found = iter(
            gradients[0].split_with_sizes(self._sizes)
            if self._is_whole
            else [member.place.of(gradients) for group in self._groups for member in group]
        )
        for group, rows, calls in zip(self._optimizer.param_groups, self._rows, self._calls, strict=True):
            chosen = list(islice(found, len(rows["params"])))
            for counter in rows["counters"]:
                # Numpy counts in a fifth of the time; it is the same memory.
                count = counter.numpy()
                count += 1
            tensors = rows["params"], chosen, rows["exp_avg"], rows["exp_avg_sq"], rows["steps"]
            is_decoupled = group.get("decoupled_weight_decay", type(self._optimizer) is AdamW)
            _step_shares(tensors, calls, is_decoupled=is_decoupled, group=group)


def _calls(places: list[FlatPlace]) -> list[slice]:
    """Neighbours that one call of a kernel takes together: about as many numbers as a share has."""
    calls, first, numbers = [], 0, 0
    for count, place in enumerate(places, 1):
        numbers += place.stop - place.start
        if numbers >= SHARE_NUMBERS or count == len(places):
            calls.append(slice(first, count))
            first, numbers = count, 0
    return calls


def _step_shares(
    tensors: tuple[list[Tensor], ...], calls: list[slice], *, is_decoupled: bool, group: dict[str, Any]
) -> None:
    """Step all tensors of a group, some in each call; `tensors` is what `fused_adam` takes."""

    def step_some(number: int) -> None:
        fused_adam(*(row[calls[number]] for row in tensors), is_decoupled=is_decoupled, group=group)

    on_all_cores(step_some, len(calls))


class PieceSteps:
    """Steps of an element-wise optimizer: a twin of it, whose parameters are pieces of the flat vector."""

    def __init__(
        self,
        optimizer: Optimizer,
        flat: FlatModel,
        groups: list[list[PlacedParameter]],
        kept: dict[tuple[int, str], Tensor],
    ) -> None:
        """`kept` is the optimizer's state in the layout of the flat vector."""
        self._optimizer = optimizer
        self._flat = flat
        self._moving = flat.moving
        self._pieces: list[tuple[Tensor, FlatPlace]] = []
        state: dict[Tensor, dict[str, Any]] = {}
        twins: list[list[Tensor]] = []
        for members in groups:
            twins.append([])
            for run in _runs(optimizer, members):
                first = optimizer.state.get(run[0].parameter, {})
                counters = {name: first[name] for name in COUNTERS if name in first}
                for place in _cut(run):
                    piece = place.of(self._moving.parts).detach()
                    self._pieces.append((piece, place))
                    twins[-1].append(piece)
                    if first:
                        state[piece] = {
                            name: kept[place.part, name][place.start : place.stop]
                            for name, value in first.items()
                            if value is not None and name not in COUNTERS
                        } | {name: value.clone() for name, value in counters.items()}
                # All pieces of a run count alike; the parameters of the run show the count of its last piece.
                for member in run if counters else ():
                    optimizer.state[member.parameter].update({name: state[piece][name] for name in counters})
        self._twin = twin_of(optimizer, twins, state)
        self._unchanged = _Unchanged(optimizer, flat)

    def are_valid(self) -> bool:
        if not self._unchanged.holds():
            return False
        if self._moving is not self._flat.moving:
            self._moving = self._flat.moving
            for piece, place in self._pieces:
                piece.data = place.of(self._moving.parts)
        return True

    def make(self, gradients: Sequence[Tensor]) -> None:
        for group, twin in zip(self._optimizer.param_groups, self._twin.param_groups, strict=True):
            pieces = twin["params"]
            twin.update(group)
            twin["params"] = pieces
        for piece, place in self._pieces:
            piece.grad = place.of(gradients)
        try:
            step(self._twin)
        finally:
            for piece, _ in self._pieces:
                piece.grad = None


def are_in_place(flat: FlatModel) -> bool:
    """Whether all trained parameters lie in the flat vector."""
    tensors, offsets, base = flat.tensors, flat.blueprint.offsets, flat.state.data_ptr()
    return all([tensors[i].data_ptr() - base == offsets[i] for i in flat.blueprint.trained])  # noqa: C419


def is_plain(group: dict[str, Any]) -> bool:
    """Whether a group's options are numbers and switches, and its steps not part of a graph."""
    if group.get("capturable") or group.get("differentiable") or not isinstance(group["lr"], (int, float)):
        return False
    return not any(isinstance(each, Tensor) for each in group.get("betas", ()))


def _switches(group: dict[str, Any]) -> list[tuple[str, bool]]:
    """What of a group's options is on. While that stays, other values change no step but their own."""
    is_number = isinstance(group["lr"], (int, float))
    return [("lr is a number", is_number)] + [
        (name, bool(value)) for name, value in group.items() if name not in ("params", "lr")
    ]


def is_like(value: Any, parameter: Tensor) -> bool:
    """Whether a value of a parameter's state has a number for each of the parameter's."""
    return (
        isinstance(value, Tensor)
        and (value.shape, value.dtype, value.device) == (parameter.shape, parameter.dtype, parameter.device)
        and value.is_contiguous()
    )


def _runs(optimizer: Optimizer, members: list[PlacedParameter]) -> list[list[PlacedParameter]]:
    """Members that lie one behind the other, and whose state has the same names and counters."""
    runs: list[list[PlacedParameter]] = []
    before: Any = None
    for member in sorted(members, key=lambda each: each.place):
        state = optimizer.state.get(member.parameter, {})
        like = (
            member.place.part,
            [name for name, value in state.items() if value is not None],
            [state[name].item() for name in COUNTERS if name in state],
        )
        if runs and before == like and runs[-1][-1].place.stop == member.place.start:
            runs[-1].append(member)
        else:
            runs.append([member])
        before = like
    return runs


def _cut(run: list[PlacedParameter]) -> Iterator[FlatPlace]:
    """A run in pieces of equal size, none of which is too long."""
    part, start, stop = run[0].place.part, run[0].place.start, run[-1].place.stop
    count = max(1, -(-(stop - start) // PIECE_NUMBERS))
    for number in range(count):
        yield FlatPlace(
            part, start + (stop - start) * number // count, start + (stop - start) * (number + 1) // count
        )
