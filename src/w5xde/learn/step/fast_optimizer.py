"""The optimizer's step on the flat model: few calls instead of many for each parameter, with the same bits.

Most of `optimizer.step()` is Python around kernels, for each parameter again. The optimizers in
`ELEMENT_WISE` compute each number from its own gradient and state alone, and torch computes it alike wherever
it lies in a tensor, so they step long pieces of the flat vector instead of parameters. Only torch's fused
kernels round the last numbers of a tensor differently: these are called for each parameter, but directly.
Every other optimizer, and one with hooks, steps as usual. Knows nothing of batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from w5xde.learn.model.layout import FlatModel
from w5xde.learn.step.flat_steps import (
    COUNTERS,
    FlatPlace,
    FusedSteps,
    PieceSteps,
    PlacedParameter,
    are_in_place,
    is_like,
    is_plain,
    step,
)
from w5xde.learn.torch_private import has_own_step
from w5xde.messages import TRAINED

ELEMENT_WISE = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, Rprop)


class Stepper:
    """Steps the optimizer of a flat model, on flat memory where that gives the same bits."""

    def __init__(self, optimizer: Optimizer, flat: FlatModel) -> None:
        self._optimizer = optimizer
        self._flat = flat
        blueprint = flat.blueprint
        self._groups = blueprint.moving_groups
        self._places: dict[int, FlatPlace] = {}
        for part, group in enumerate(blueprint.moving_groups):
            for entry in group.entries:
                tensor = flat.tensors[entry]
                start = (blueprint.offsets[entry] - group.start) // group.dtype.itemsize
                self._places[id(tensor)] = FlatPlace(part, start, start + tensor.numel())
        self._parameters = [(entry, flat.tensors[entry]) for entry in blueprint.trained]
        # The optimizer's state in the layout of the flat vector, by part and name.
        self._kept: dict[tuple[int, str], Tensor] = {}
        # None: the next step is made as usual.
        self._steps: FusedSteps | PieceSteps | None = None
        self._absent: frozenset[int] | None = None

    @property
    def tensors(self) -> object:
        """The same object as before if the next step works on the same tensors; None if that is unknown."""
        return self._steps

    def step(
        self, gradients: Sequence[Tensor], absent: frozenset[int] = frozenset(), *, is_next: bool = False
    ) -> bool:
        """One step with the gradients in these parts of a vector; entries in `absent` have none.

        `is_next`: no other code ran since the last step. Returns whether the parameters surely stayed in
        place.
        """
        steps = self._steps
        if steps is not None and absent == self._absent and (is_next or steps.are_valid()):
            steps.make(gradients)
            return True
        self._step_as_usual(gradients, absent)
        return False

    def forget(self) -> None:
        """Make the next step as usual: the optimizer's state was restored, and is all that counts."""
        if type(self._optimizer) in ELEMENT_WISE:
            # The restored state may have counters that several parameters shared.
            self._split_counters()
        self._steps = self._absent = None

    @contextmanager
    def gradients_given(self, gradients: Sequence[Tensor], absent: frozenset[int]) -> Iterator[None]:
        """Let each parameter have its gradient in these parts of a vector, whose memory is not ours."""
        for entry, parameter in self._parameters:
            place = self._places[id(parameter)]
            parameter.grad = None if entry in absent else place.of(gradients).view(parameter.shape)
        try:
            yield
        finally:
            for _, parameter in self._parameters:
                parameter.grad = None

    def clip(self, gradients: Sequence[Tensor], absent: frozenset[int], norm_max: float) -> None:
        """Clip the gradients in these parts of a vector, in place, to a norm of at most `norm_max`."""
        trained = [
            part for part, group in zip(gradients, self._groups, strict=False) if group.role == TRAINED
        ]
        if [part.dtype for part in trained] in ([torch.float32], [torch.float64]):
            # One computation on the whole vector: seven times as fast for a small model.
            norm = torch.linalg.vector_norm(trained[0])
            trained[0].mul_(torch.clamp(norm_max / (norm + 1e-6), max=1.0))
            return
        # With several dtypes, or a coarse one, the result depends on where norms are rounded: torch does it.
        with self.gradients_given(gradients, absent):
            torch.nn.utils.clip_grad_norm_([parameter for _, parameter in self._parameters], norm_max)

    def _step_as_usual(self, gradients: Sequence[Tensor], absent: frozenset[int]) -> None:
        if self._steps is not None:
            self._split_counters()
        with self.gradients_given(gradients, absent):
            # The first step makes the state, and tells the schedule that there was one.
            step(self._optimizer)
        # If other parameters lack a gradient at each step, looking for a better way each time would not pay.
        is_steady = self._absent is None or absent == self._absent
        self._steps = self._find_steps(absent) if is_steady else None
        self._absent = absent

    def _split_counters(self) -> None:
        """Give every parameter its own counter again: the optimizer's own step advances each."""
        for state in self._optimizer.state.values():
            for name in COUNTERS:
                if isinstance(state.get(name), Tensor):
                    state[name] = state[name].clone()

    def _find_steps(self, absent: frozenset[int]) -> FusedSteps | PieceSteps | None:
        """How to make the next steps; None if we do not know how this optimizer steps."""
        optimizer = self._optimizer
        if type(optimizer) not in ELEMENT_WISE or has_own_step(optimizer):
            return None
        if self._flat.state.device.type != "cpu" or not are_in_place(self._flat):
            return None
        without = {id(self._flat.tensors[entry]) for entry in absent}
        groups: list[list[PlacedParameter]] = []
        for group in optimizer.param_groups:
            if not is_plain(group):
                return None
            chosen = [each for each in group["params"] if id(each) not in without]
            if any(id(each) not in self._places or each.is_complex() for each in chosen):
                return None
            groups.append([PlacedParameter(each, self._places[id(each)]) for each in chosen])
        if all(group.get("fused") for group in optimizer.param_groups):
            return FusedSteps.find(optimizer, self._flat, groups)
        if any(group.get("fused") for group in optimizer.param_groups) or not self._gather_state(groups):
            return None
        return PieceSteps(optimizer, self._flat, groups, self._kept)

    def _gather_state(self, groups: list[list[PlacedParameter]]) -> bool:
        """Let all state of these parameters lie as the parameters do; False if some of it cannot.

        Each tensor is replaced by a view at once, so that at most one of them exists twice.
        """
        state, parts = self._optimizer.state, self._flat.moving.parts
        members = [member for group in groups for member in group]
        for parameter, _ in members:
            for name, value in state.get(parameter, {}).items():
                is_counter = name in COUNTERS and isinstance(value, Tensor) and value.dim() == 0
                if value is not None and not is_counter and not is_like(value, parameter):
                    return False
        for parameter, place in members:
            kept = state.get(parameter, {})
            for name in [name for name, value in kept.items() if value is not None]:
                if name in COUNTERS:
                    continue
                if (place.part, name) not in self._kept:
                    self._kept[place.part, name] = torch.empty_like(parts[place.part])
                view = self._kept[place.part, name][place.start : place.stop].view(parameter.shape)
                if view.data_ptr() != kept[name].data_ptr():
                    view.copy_(kept[name])
                    kept[name] = view
        return True
