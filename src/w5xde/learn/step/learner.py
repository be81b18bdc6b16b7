"""The learner: folds updates in the canonical tree, steps the optimizer, publishes versions.

The one owner of the model that is trained. One thread uses it at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from w5xde.learn.model.digest import weights_sha256
from w5xde.learn.model.layout import FlatModel, Vector
from w5xde.learn.model.route import VectorRoute
from w5xde.learn.step import fast_optimizer
from w5xde.learn.step.fast_optimizer import Stepper
from w5xde.learn.step.finite import Gauge, can_hold_nan, is_finite
from w5xde.learn.step.rollback import Undo
from w5xde.learn.step.sums import TAME_NORM, Contribution, StepNotFinite, Total
from w5xde.messages import MOVING, TRAINED

# Optimizers whose state stays finite if it was and the gradient is tame: it holds means of it and its square.
_TAMED = (SGD, Adam, AdamW)


class _Readers:
    """How many began to read the state where it lies, and how many are done: each counted by one thread."""

    def __init__(self) -> None:
        self.begun = self.done = 0


class Learner:
    """Parameters, optimizer, schedule, and the steps being put together."""

    def __init__(
        self, flat: FlatModel, optimizer: Optimizer, scheduler: Any = None, clip_norm: float | None = None
    ) -> None:
        self.flat = flat
        self.version = 0
        # False from the first change of a step to its last, and for good if one broke and cannot be undone:
        # then this is a mixture of two steps, or not finite, and nothing may be made of it.
        self.is_whole = True
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._clip_norm = clip_norm
        self._blueprint = flat.blueprint
        self.route = VectorRoute(flat.blueprint.moving_bytes)
        self._parameters = [flat.tensors[i] for i in self._blueprint.trained]
        # A small model's gradients have their own place, so that a step always finds them there; a large
        # one's are used where they arrived, because copying them would cost as much as a step.
        self._is_large = self.route.is_large
        self._gradient = None if self._is_large else self._blueprint.new_vector()
        self.gauge = Gauge(self._blueprint)
        self._gradients = [] if self._gradient is None else self._views(self._gradient)
        self._stepper = Stepper(optimizer, self._parameters)
        # Where one step is only its gradients: how many numbers each parameter has.
        is_plain = [group.role for group in self._blueprint.moving_groups] == [TRAINED]
        self._row_counts = (
            [parameter.numel() for parameter in self._parameters]
            if is_plain and clip_norm is None and not self._is_large
            else None
        )
        # What must be finite after a step: not a buffer that never was (masks are often minus infinity).
        self._watched = [
            can_hold_nan(group.dtype) and group.count > 0 and (group.role == TRAINED or is_finite(part))
            for group, part in zip(self._blueprint.moving_groups, flat.moving.parts, strict=True)
        ]
        moving = list(zip(flat.moving.parts, self._watched, strict=True))
        self._undo = None if self._is_large else Undo(moving, optimizer)
        self._snapshots: dict[bool, tuple[int, memoryview]] = {}
        # Who reads the state itself, since it last moved.
        self._readers = _Readers()

    @property
    def vector_bytes(self) -> int:
        return self._blueprint.moving_bytes

    def _views(self, vector: Vector) -> list[torch.Tensor]:
        """The gradient of each parameter in a vector."""
        views = []
        for i in self._blueprint.trained:
            tensor = self.flat.tensors[i]
            offset = self._blueprint.offsets[i]
            raw = vector.raw[offset : offset + tensor.numel() * tensor.element_size()]
            views.append(raw.view(tensor.dtype).view(tensor.shape))
        return views

    @property
    def can_roll_back(self) -> bool:
        """Whether a step can be rolled back: not if a copy of the state would be too large."""
        return self._undo is not None

    def body_of(self, total: Total) -> memoryview:
        """The sum of a step as bytes, for the step log."""
        body: memoryview = total.contribution.vector.raw.numpy().data
        return body

    def replay(self, batches: int, body: bytes, absent: frozenset[int], loss_sum: float) -> None:
        """Apply a step once more, from the sum that was kept of it."""
        (vector,) = self._blueprint.vectors(bytearray(body), 1)
        self.apply([Total(batches, Contribution(vector, absent, loss_sum))])

    def apply(self, wholes: list[Total]) -> list[float]:
        """Step the optimizer, for each of a stretch. Returns the sum of the losses of each step's samples.

        If the optimizer raises, or a parameter, a buffer or the optimizer's state is not finite afterwards
        (StepNotFinite), the step is rolled back if that is possible; `is_whole` tells.
        """
        if self.scheduler is not None and len(wholes) > 1:
            raise ValueError("a schedule wants to know of each step before the next")
        if self._undo is not None:
            self._undo.save(self._stepper.tensors, self.version)
        self.is_whole = False
        try:
            self._step_all(wholes)
            self._require_finite(max([whole.contribution.norm for whole in wholes]), len(wholes))
        except (Exception, SystemExit):
            self._go_back()
            raise
        if self.scheduler is not None:
            self.scheduler.step()
        self.version += len(wholes)
        self.is_whole = True
        return [whole.contribution.loss_sum for whole in wholes]

    def apply_all(self, steps: list[list[Total]]) -> tuple[list[list[float]], BaseException | None]:
        """As many as can be, one after another: the sums of their losses, and what was wrong with the next.

        What is not finite stays so, whatever is added: one look behind the last step sees all of them.
        """
        if self._undo is not None and self.scheduler is None and len(steps) > 1:
            try:
                sums = iter(self.apply([whole for wholes in steps for whole in wholes]))
                return [list(islice(sums, len(wholes))) for wholes in steps], None
            except (Exception, SystemExit) as error:
                if not self.is_whole:
                    return [], error
        losses: list[list[float]] = []
        try:
            # One by one: those before the one that fails are made.
            losses.extend(map(self.apply, steps))
        except (Exception, SystemExit) as error:
            return losses, error
        return losses, None

    def _go_back(self) -> None:
        """Undo what was changed since the last version; the learner is whole then, if that is possible."""
        if self._undo is not None and self._undo.is_possible:
            self._undo.restore()
            self.flat.reclaim()
            self.is_whole = True

    def _step_all(self, wholes: list[Total]) -> None:
        """One step after another; where nobody could look in between, without putting each in place first."""
        counts = self._row_counts
        is_quick = counts is not None and self._stepper.is_known()
        for whole in wholes:
            if is_quick and counts is not None and not whole.contribution.absent:
                self._stepper.step_with(whole.contribution.vector.parts[0].split_with_sizes(counts))
            else:
                self._step(whole)
                is_quick = counts is not None and self._stepper.is_known()

    def _step(self, whole: Total) -> None:
        total = whole.contribution
        absent = total.absent
        self._leave_readers()
        gradient, views = self._gradient, self._gradients
        if gradient is None:
            gradient = total.vector
            views = self._views(gradient)
        else:
            for part, summed in zip(gradient.parts, total.vector.parts, strict=True):
                part.copy_(summed)
        for i, parameter, view in zip(self._blueprint.trained, self._parameters, views, strict=True):
            wanted = None if i in absent else view
            # Asking costs less than setting, and they rarely change.
            if parameter.grad is not wanted:
                parameter.grad = wanted
        if self._clip_norm is not None:
            self._clip(gradient, self._clip_norm)
        if self._is_large:
            fast_optimizer.step(
                self.optimizer
            )  # nothing to gain there, and the stepper would keep the vector alive
            is_in_place = False
        else:
            is_in_place = self._stepper.step()
        if not is_in_place:
            self.flat.gather()
        self._advance_buffers(gradient, whole.batches)
        if self._is_large:
            for parameter in self._parameters:
                parameter.grad = None

    def _require_finite(self, norm: float, steps: int) -> None:
        """The optimizer has stepped: all that it changed must be finite."""
        undo, version = self._undo, self.version + steps
        if not (undo.accept(self._stepper.tensors, version) if undo else self._is_sound(norm)):
            what = f"step {self.version + 1} made the weights or the optimizer's state"
            raise StepNotFinite(f"{what} infinite or not a number")

    def _is_sound(self, norm: float) -> bool:
        """Of a large model: one pass over the parameters, and over the rest only if the gradient was wild."""
        for part, is_watched in zip(self.flat.moving.parts, self._watched, strict=True):
            if is_watched and not is_finite(part):
                return False
        if (norm < TAME_NORM and type(self.optimizer) in _TAMED) or not fast_optimizer.is_torchs(
            self.optimizer
        ):
            return True
        return all(
            is_finite(value.reshape(-1))
            for kept in self.optimizer.state.values()
            for value in kept.values()
            if isinstance(value, torch.Tensor) and can_hold_nan(value.dtype)
        )

    def _clip(self, vector: Vector, norm_max: float) -> None:
        trained = [group.dtype for group in self._blueprint.moving_groups if group.role == TRAINED]
        if trained not in ([torch.float32], [torch.float64]):
            # Several dtypes, or one so coarse that where its norms are rounded matters: torch's own way.
            torch.nn.utils.clip_grad_norm_(self._parameters, norm_max)
            return
        # The same on the whole vector at once, in a seventh of the time for a small model.
        gradient = vector.parts[0]
        norm = torch.linalg.vector_norm(gradient)
        gradient.mul_(torch.clamp(norm_max / (norm + 1e-6), max=1.0))

    def _advance_buffers(self, vector: Vector, count: int) -> None:
        """Floating buffers move by the mean of what the batches did, counters by the sum."""
        for group, state, change in zip(
            self._blueprint.moving_groups, self.flat.moving.parts, vector.parts, strict=True
        ):
            if group.role != MOVING:
                continue
            if group.dtype is torch.bool:
                state.copy_(change)
            elif group.dtype.is_floating_point or group.dtype.is_complex:
                state.add_(change / count)
            else:
                state.add_(change)

    def snapshot(self, *, whole: bool) -> memoryview:
        """The parameters of this version as bytes that stay as they are; of a small model one for all."""
        if self._is_large:
            return self.flat.snapshot(whole=whole)
        cached = self._snapshots.get(whole)
        if cached is None or cached[0] != self.version:
            cached = self._snapshots[whole] = (self.version, self.flat.snapshot(whole=whole))
        return cached[1]

    def read_state(self, *, whole: bool) -> tuple[memoryview, Callable[[], None]] | None:
        """The parameters of this version without a copy, and what to call when they have been read.

        They stay as they are: a step applied before then leaves this memory behind. None: make a copy.
        """
        memory = self.flat.memory(whole=whole) if self._is_large else None
        if memory is None:
            return None
        readers = self._readers
        readers.begun += 1

        def done() -> None:
            readers.done += 1

        return memory, done

    def _leave_readers(self) -> None:
        if self._readers.begun != self._readers.done:
            self._readers = _Readers()
            self.flat.move()

    def weights_sha256(self) -> str:
        return weights_sha256(self.flat.module)
