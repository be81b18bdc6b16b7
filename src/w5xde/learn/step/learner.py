"""The learner: owns the model that is trained, applies the sums of steps to it, and gives copies of versions.

Only one thread uses it at a time. Knows no nodes and no leases, and does not add updates up (`sums.py` does).
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

# Optimizers that keep only means of the gradient and of its square: their state stays finite as long as the
# norm of the gradient is below TAME_NORM.
_AVERAGING_OPTIMIZERS = (SGD, Adam, AdamW)


class _Readers:
    """Counts reads of the state's own memory: begun, and done. One thread changes each count."""

    def __init__(self) -> None:
        self.begun = self.done = 0


class Learner:
    """Parameters, optimizer and schedule of the model that is trained, and its version."""

    def __init__(
        self, flat: FlatModel, optimizer: Optimizer, scheduler: Any = None, clip_norm: float | None = None
    ) -> None:
        self.flat = flat
        self.version = 0
        # Whether the state is that of `version`. False while a step changes it, and for good if a step failed
        # and cannot be rolled back: then the state is a mixture of two versions, or not finite, and must not
        # be saved or sent.
        self.is_whole = True
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._clip_norm = clip_norm
        self._blueprint = flat.blueprint
        self.route = VectorRoute(flat.blueprint.moving_bytes)
        self._parameters = [flat.tensors[i] for i in self._blueprint.trained]
        # The gradients of a small model are copied into memory of their own, so that the optimizer always
        # finds them there. Those of a large model are used where they arrived: a copy would take as long as a
        # step.
        self._is_large = self.route.is_large
        self._gradient = None if self._is_large else self._blueprint.new_vector()
        self.gauge = Gauge(self._blueprint)
        self._gradients = [] if self._gradient is None else self._views(self._gradient)
        self._stepper = Stepper(optimizer, self._parameters)
        # The size of each parameter, if a step needs nothing but gradients (no buffers, no clipping); else
        # None.
        is_plain = [group.role for group in self._blueprint.moving_groups] == [TRAINED]
        self._row_counts = (
            [parameter.numel() for parameter in self._parameters]
            if is_plain and clip_norm is None and not self._is_large
            else None
        )
        # The parts that must be finite after a step. A buffer that was not finite at the start need not be:
        # masks often contain minus infinity.
        self._watched = [
            can_hold_nan(group.dtype) and group.count > 0 and (group.role == TRAINED or is_finite(part))
            for group, part in zip(self._blueprint.moving_groups, flat.moving.parts, strict=True)
        ]
        moving = list(zip(flat.moving.parts, self._watched, strict=True))
        self._undo = None if self._is_large else Undo(moving, optimizer)
        self._snapshots: dict[bool, tuple[int, memoryview]] = {}
        # The readers of the memory in which the state is now.
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
        """Whether a step can be rolled back. Of a large model there is no copy to go back to."""
        return self._undo is not None

    def body_of(self, total: Total) -> memoryview:
        """The sum of a step as bytes, for the step log."""
        body: memoryview = total.contribution.vector.raw.numpy().data
        return body

    def replay(self, batches: int, body: bytes, absent: frozenset[int], loss_sum: float) -> None:
        """Apply a step again from the sum that the step log has of it."""
        (vector,) = self._blueprint.vectors(bytearray(body), 1)
        self.apply([Total(batches, Contribution(vector, absent, loss_sum))])

    def apply(self, totals: list[Total]) -> list[float]:
        """Step the optimizer with each of these sums. Returns the sum of the sample losses of each step.

        If the optimizer raises, or a parameter, a buffer or the optimizer's state is not finite afterwards
        (StepNotFinite), all of these steps are rolled back if possible: then `is_whole` is true.
        """
        if self.scheduler is not None and len(totals) > 1:
            raise ValueError("a schedule wants to know of each step before the next")
        if self._undo is not None:
            self._undo.save(self._stepper.tensors, self.version)
        self.is_whole = False
        try:
            self._step_all(totals)
            self._require_finite(max([total.contribution.norm for total in totals]), len(totals))
        except (Exception, SystemExit):
            self._roll_back()
            raise
        if self.scheduler is not None:
            self.scheduler.step()
        self.version += len(totals)
        self.is_whole = True
        return [total.contribution.loss_sum for total in totals]

    def apply_all(self, steps: list[list[Total]]) -> tuple[list[list[float]], BaseException | None]:
        """Apply steps in order until one fails. Returns the losses of those applied, and the error if any.

        All steps are applied at first with one check after the last: a number that is not finite stays so
        in later steps. If that fails, they are applied one by one.
        """
        if self._undo is not None and self.scheduler is None and len(steps) > 1:
            try:
                sums = iter(self.apply([total for totals in steps for total in totals]))
                return [list(islice(sums, len(totals))) for totals in steps], None
            except (Exception, SystemExit) as error:
                if not self.is_whole:
                    return [], error
        losses: list[list[float]] = []
        try:
            # One by one, so that the steps before the one that fails are applied.
            losses.extend(map(self.apply, steps))
        except (Exception, SystemExit) as error:
            return losses, error
        return losses, None

    def _roll_back(self) -> None:
        """Restore the state of `version` if that is possible; then `is_whole` is true again."""
        if self._undo is not None and self._undo.is_possible:
            self._undo.restore()
            self.flat.reclaim()
            self.is_whole = True

    def _step_all(self, totals: list[Total]) -> None:
        """Make one step after another; without copying gradients where the optimizer allows that."""
        counts = self._row_counts
        is_quick = counts is not None and self._stepper.is_known()
        for total in totals:
            if is_quick and counts is not None and not total.contribution.absent:
                self._stepper.step_with(total.contribution.vector.parts[0].split_with_sizes(counts))
            else:
                self._step(total)
                is_quick = counts is not None and self._stepper.is_known()

    def _step(self, total: Total) -> None:
        contribution = total.contribution
        absent = contribution.absent
        self._move_away_from_readers()
        gradient, views = self._gradient, self._gradients
        if gradient is None:
            gradient = contribution.vector
            views = self._views(gradient)
        else:
            for part, summed in zip(gradient.parts, contribution.vector.parts, strict=True):
                part.copy_(summed)
        for i, parameter, view in zip(self._blueprint.trained, self._parameters, views, strict=True):
            wanted = None if i in absent else view
            # Reading the attribute costs less than setting it, and it rarely changes.
            if parameter.grad is not wanted:
                parameter.grad = wanted
        if self._clip_norm is not None:
            self._clip(gradient, self._clip_norm)
        if self._is_large:
            # The stepper would gain nothing here, and would keep the vector alive.
            fast_optimizer.step(self.optimizer)
            is_in_place = False
        else:
            is_in_place = self._stepper.step()
        if not is_in_place:
            self.flat.gather()
        self._advance_buffers(gradient, total.batches)
        if self._is_large:
            for parameter in self._parameters:
                parameter.grad = None

    def _require_finite(self, norm: float, steps: int) -> None:
        """Raise StepNotFinite if the steps that were made changed anything to a number that is not finite."""
        undo, version = self._undo, self.version + steps
        if not (undo.accept(self._stepper.tensors, version) if undo else self._is_large_state_finite(norm)):
            what = f"step {self.version + 1} made the weights or the optimizer's state"
            raise StepNotFinite(f"{what} infinite or not a number")

    def _is_large_state_finite(self, norm: float) -> bool:
        """Check the parameters and buffers, and the optimizer's state if `norm` requires that."""
        for part, is_watched in zip(self.flat.moving.parts, self._watched, strict=True):
            if is_watched and not is_finite(part):
                return False
        is_tame = norm < TAME_NORM and type(self.optimizer) in _AVERAGING_OPTIMIZERS
        if is_tame or not fast_optimizer.is_torchs(self.optimizer):
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
            # With several dtypes, or a coarse one, the result depends on where norms are rounded: let torch
            # do it.
            torch.nn.utils.clip_grad_norm_(self._parameters, norm_max)
            return
        # The same computation on the whole vector at once: seven times as fast for a small model.
        gradient = vector.parts[0]
        norm = torch.linalg.vector_norm(gradient)
        gradient.mul_(torch.clamp(norm_max / (norm + 1e-6), max=1.0))

    def _advance_buffers(self, vector: Vector, count: int) -> None:
        """Change buffers of floats by the mean of the batches' changes, and counters by their sum."""
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
        """A copy of this version as bytes, of a small model made once for all; `whole`: with fixed parts."""
        if self._is_large:
            return self.flat.snapshot(whole=whole)
        cached = self._snapshots.get(whole)
        if cached is None or cached[0] != self.version:
            cached = self._snapshots[whole] = (self.version, self.flat.snapshot(whole=whole))
        return cached[1]

    def read_state(self, *, whole: bool) -> tuple[memoryview, Callable[[], None]] | None:
        """The parameters of this version without a copy, and a function to call when they have been read.

        They do not change until then: a step that is applied earlier moves the state to other memory. None if
        the caller must use `snapshot`.
        """
        memory = self.flat.memory(whole=whole) if self._is_large else None
        if memory is None:
            return None
        readers = self._readers
        readers.begun += 1

        def done() -> None:
            readers.done += 1

        return memory, done

    def _move_away_from_readers(self) -> None:
        """Move the state to other memory if it is still being read, so that a step can change it."""
        if self._readers.begun != self._readers.done:
            self._readers = _Readers()
            self.flat.move()

    def weights_sha256(self) -> str:
        return weights_sha256(self.flat.module)
