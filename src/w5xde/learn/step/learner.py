"""The learner: owns the model that is trained, applies the sums of steps to it, and gives copies of versions.

Only one thread uses it at a time. Knows no nodes and no leases, and does not add updates up (`sums.py` does).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from w5xde.learn.model.cumulative_averages import CumulativeAverages
from w5xde.learn.model.digest import weights_sha256
from w5xde.learn.model.layout import Blueprint, FlatModel, Vector
from w5xde.learn.model.route import VectorRoute
from w5xde.learn.model.state_memory import Readers
from w5xde.learn.rate.override import override_rates
from w5xde.learn.rate.plateau import is_stepped_by_metric
from w5xde.learn.rate.rates import learning_rates, scaled_rates
from w5xde.learn.step.bounds import StateBounds
from w5xde.learn.step.fast_optimizer import Stepper
from w5xde.learn.step.finite import Gauge, can_hold_nan, is_finite
from w5xde.learn.step.flat_steps import is_torchs
from w5xde.learn.step.look_ahead import LookAhead
from w5xde.learn.step.rollback import Undo
from w5xde.learn.step.sums import Contribution, Decided, StepNotFinite, Total, round_steps_of
from w5xde.messages import MOVING, TRAINED
from w5xde.specs.rate_override import RateOverride


class RoundKeeper(Protocol):
    """What the learner needs in rounds mode: `learn.rounds.rounds.Rounds`."""

    @property
    def vectors(self) -> Blueprint:
        """The layout of updates."""

    def advance(self, mean: Vector, version: int, steps: int) -> None:
        """The parameters have moved by the mean of a round's columns, which began after `version` steps."""

    def forget_rates(self) -> None:
        """The learning rate was changed, in another way than by the schedule."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the learner's own state."""

    def load_state(self, state: dict[str, Any], version: int) -> None:
        """Continue from a checkpoint of this version."""


class Learner:
    """Parameters, optimizer and schedule of the model that is trained, and its version."""

    def __init__(
        self,
        flat: FlatModel,
        optimizer: Optimizer,
        scheduler: Any = None,
        clip_norm: float | None = None,
        rounds: RoundKeeper | None = None,
    ) -> None:
        """With `rounds`, nodes make the steps of the optimizer, and updates are differences."""
        self.flat = flat
        self.rounds = rounds
        # The layout of updates.
        self.vectors = rounds.vectors if rounds is not None else flat.blueprint
        self.version = 0
        # Whether the state is that of `version`. False while a step changes it, and for good if a step failed
        # and cannot be rolled back: then the state is a mixture of two versions, or not finite, and must not
        # be saved or sent.
        self.is_whole = True
        self.optimizer = optimizer
        self.scheduler = scheduler
        # Whether the schedule is stepped with every step, and not by a metric.
        self._is_scheduled = scheduler is not None and not is_stepped_by_metric(scheduler)
        # The newest step whose metric has stepped the schedule.
        self.measured_step = 0
        self._clip_norm = clip_norm
        self._blueprint = flat.blueprint
        self.route = VectorRoute(flat.blueprint.moving_bytes)
        self._is_large = self.route.is_large
        self.gauge = Gauge(self.vectors)
        self._stepper = Stepper(optimizer, flat)
        groups = self._blueprint.moving_groups
        self._trained_parts = [i for i, group in enumerate(groups) if group.role == TRAINED]
        self._buffer_parts = [i for i, group in enumerate(groups) if group.role == MOVING]
        self.averages = CumulativeAverages(flat.module, self._blueprint)
        self._bounds = StateBounds(optimizer, [flat.moving.parts[i] for i in self._trained_parts])
        # The parts that must be finite after a step. A buffer that was not finite at the start need not be:
        # masks often contain minus infinity.
        self._watched = [
            can_hold_nan(group.dtype) and group.count > 0 and (group.role == TRAINED or is_finite(part))
            for group, part in zip(groups, flat.moving.parts, strict=True)
        ]
        # A large model is not copied: its bounds must do, or a step that breaks it ends the run.
        self._undo = None if self._is_large else Undo(flat, self._watched, optimizer)
        self._look_ahead = LookAhead(flat, optimizer, can_roll_back=self.can_roll_back)
        # Copies of one version, by whether they are whole and how far they look ahead.
        self._snapshots: dict[tuple[bool, float], memoryview] = {}
        self._snapshots_version = 0
        # The memory in which the state is now, whole or not; its readers, and those of the memory where the
        # state was at first.
        self._read_from: Vector | None = None
        self._memories: dict[bool, memoryview | None] = {}
        self._readers = self._first_readers = Readers()

    @property
    def vector_bytes(self) -> int:
        return self.vectors.moving_bytes

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each of the optimizer's groups, for the next step."""
        return learning_rates(self.optimizer)

    def override_rates(self, override: RateOverride) -> None:
        """Make the next steps with another learning rate, and scale the schedule likewise."""
        override_rates(self.optimizer, self.scheduler, override)
        if self.rounds is not None:
            self.rounds.forget_rates()

    def measured(self, step: int, value: float) -> list[float]:
        """Step a schedule by the metric of the weights of this step; returns the learning rates.

        The same step counts once: a run that is resumed may measure it again.
        """
        if step > self.measured_step:
            self.measured_step = step
            self.scheduler.step(value)
            if self.rounds is not None:
                self.rounds.forget_rates()
        return self.learning_rates

    @property
    def can_roll_back(self) -> bool:
        """Whether a step can be rolled back. Of a large model there is no copy to go back to."""
        return self._undo is not None

    def body_of(self, total: Total) -> memoryview:
        """The sum of a step as bytes, for the step log."""
        body: memoryview = total.contribution.vector.raw.numpy().data
        return body

    def replay(self, step: Decided, body: bytes, absent: frozenset[int], loss_sum: float) -> None:
        """Apply a step again from the sum that the step log has of it."""
        (vector,) = self.vectors.vectors(bytearray(body), 1)
        contribution = Contribution(vector, absent, loss_sum, self.gauge.norm(vector))
        total = Total(step.plan.count, contribution, step.rate, round_steps=round_steps_of(step.plan))
        self.apply([total])

    def apply(self, totals: list[Total]) -> list[float]:
        """Step the optimizer with each of these sums. Returns the sum of the sample losses of each step.

        If the optimizer raises, or a parameter, a buffer or the optimizer's state is not finite afterwards
        (StepNotFinite), all of these steps are rolled back if possible: then `is_whole` is true.
        """
        if self.rounds is not None:
            return [self._apply_round(total, self.rounds) for total in totals]
        if self._is_scheduled and len(totals) > 1:
            raise ValueError("a schedule wants to know of each step before the next")
        self._move_away_from_readers()
        trained = [self.flat.moving.parts[i] for i in self._trained_parts]
        norms = [total.contribution.norm for total in totals]
        steps = sum([total.steps for total in totals])
        # The bounds know the optimizer's steps, and hold for smaller rates; differences they do not know.
        is_known = not any(total.is_stretch for total in totals)
        if is_known and self._bounds.allow(self.version, norms, trained):
            self._advance_all_buffers(totals)
            self._step_all(totals)
        else:
            self._step_carefully(totals, steps)
        if self._is_scheduled:
            self.scheduler.step()
        # The movement of a stretch is that of many steps, and leases do not look ahead by it.
        self._look_ahead.moved(len(totals) if is_known else 0)
        self.version += steps
        self.is_whole = True
        return [total.contribution.loss_sum for total in totals]

    def skip(self) -> None:
        """Go on to the next version without a step."""
        self.version += 1

    def _apply_round(self, total: Total, rounds: RoundKeeper) -> float:
        """Move the parameters by the mean of a round's columns. Returns the sum of their losses."""
        mean = total.contribution.vector
        if self._undo is not None:
            self._undo.save(self._stepper.tensors, self.version)
        try:
            self._advance_all_buffers([total])
            self.is_whole = False
            for i in self._trained_parts:
                self.flat.moving.parts[i].add_(mean.parts[i])
            self._require_finite(total.steps)
        except (Exception, SystemExit):
            self._roll_back()
            raise
        rounds.advance(mean, self.version, total.steps)
        self.version += total.steps
        self.is_whole = True
        return total.contribution.loss_sum

    def _step_all(self, totals: list[Total]) -> None:
        if not any(total.is_stretch for total in totals):
            # Not before the buffers have advanced: steps that fail there leave this version as it is.
            self._look_ahead.save()
        self.is_whole = False
        has_stepped = False
        for total in totals:
            if total.is_stretch:
                self._add_difference(total)
                continue
            with nullcontext() if total.rate == 1.0 else scaled_rates(self.optimizer, total.rate):
                self._step(total, is_next=has_stepped)
            has_stepped = True

    def _step_carefully(self, totals: list[Total], steps: int) -> None:
        """Make steps that may leave numbers that are not finite: save the state before, look at it after."""
        if self._undo is not None:
            self._undo.save(self._stepper.tensors, self.version)
        try:
            self._advance_all_buffers(totals)
            self._step_all(totals)
            self._require_finite(steps)
        except (Exception, SystemExit):
            self._roll_back()
            raise

    def apply_all(self, totals: list[Total]) -> tuple[list[float], BaseException | None]:
        """Apply steps in order until one fails. Returns the losses of those applied, and the error if any.

        All steps are applied at first with one check after the last: a number that is not finite stays so
        in later steps. If that fails, they are applied one by one.
        """
        if self._undo is not None and not self._is_scheduled and len(totals) > 1:
            try:
                return self.apply(totals), None
            except (Exception, SystemExit) as error:
                if not self.is_whole:
                    return [], error
        losses: list[float] = []
        try:
            # One by one, so that the steps before the one that fails are applied.
            for total in totals:
                losses += self.apply([total])
        except (Exception, SystemExit) as error:
            return losses, error
        return losses, None

    def _roll_back(self) -> None:
        """Restore the state of `version` if that is possible; then `is_whole` is true again."""
        if self._undo is not None and self._undo.is_possible:
            self._undo.restore()
            self._stepper.forget()
            self.flat.reclaim()
            self.is_whole = True

    def _add_difference(self, total: Total) -> None:
        """Move the parameters by the difference that a node's own steps made; the optimizer does nothing."""
        for part, difference in zip(self.flat.moving.parts, total.contribution.vector.parts, strict=True):
            part.add_(difference, alpha=total.rate)

    def _step(self, total: Total, *, is_next: bool) -> None:
        contribution = total.contribution
        gradients = contribution.vector.parts
        if self._clip_norm is not None:
            gradients = self._clip(contribution, self._clip_norm)
        if not self._stepper.step(gradients, contribution.absent, is_next=is_next):
            self.flat.gather()

    def _require_finite(self, steps: int) -> None:
        """Raise StepNotFinite if the steps that were made changed anything to a number that is not finite."""
        undo, version = self._undo, self.version + steps
        if not (undo.accept(self._stepper.tensors, version) if undo else self._is_large_state_finite()):
            what = f"step {self.version + 1} made the weights or the optimizer's state"
            raise StepNotFinite(f"{what} infinite or not a number")

    def _is_large_state_finite(self) -> bool:
        """Check the parameters and buffers, and the optimizer's state if torch's optimizers made it."""
        for part, is_watched in zip(self.flat.moving.parts, self._watched, strict=True):
            if is_watched and not is_finite(part):
                return False
        return not is_torchs(self.optimizer) or all(
            is_finite(value.reshape(-1))
            for kept in self.optimizer.state.values()
            for value in kept.values()
            if isinstance(value, torch.Tensor) and can_hold_nan(value.dtype)
        )

    def _clip(self, contribution: Contribution, norm_max: float) -> list[torch.Tensor]:
        """The gradients, clipped; of a small model in a copy, because its sum is logged after the step."""
        parts = contribution.vector.parts
        if not self._is_large:
            parts = [part.clone() if i in self._trained_parts else part for i, part in enumerate(parts)]
        self._stepper.clip(parts, contribution.absent, norm_max)
        return parts

    def _advance_all_buffers(self, totals: list[Total]) -> None:
        """Advance the buffers by the changes of all these steps, before any of them changes the weights.

        Raises StepNotFinite, and leaves the buffers as they were, if they would not be finite.
        """
        parts = [self.flat.moving.parts[i] for i in self._buffer_parts]
        before = [part.clone() for part in parts]
        for total in totals if parts else ():
            self._advance_buffers(total.contribution.vector, total.batches)
        watched = [self.flat.moving.parts[i] for i in self._buffer_parts if self._watched[i]]
        if not all(map(is_finite, watched)):
            for part, kept in zip(parts, before, strict=True):
                part.copy_(kept)
            raise StepNotFinite(f"step {self.version + 1} made a buffer infinite or not a number")

    def _advance_buffers(self, vector: Vector, count: int) -> None:
        """Change buffers of floats by the mean of the batches' changes, and counters by their sum.

        Averages over all batches so far get the batches' values instead.
        """
        state = [self.flat.moving.parts[i] for i in self._buffer_parts]
        averages = self.averages.advanced(state, [vector.parts[i] for i in self._buffer_parts])
        for i, part in zip(self._buffer_parts, state, strict=True):
            dtype, change = self._blueprint.moving_groups[i].dtype, vector.parts[i]
            if dtype is torch.bool:
                part.copy_(change)
            elif dtype.is_floating_point or dtype.is_complex:
                part.add_(change / count)
            else:
                part.add_(change)
        self.averages.write(state, averages)

    def snapshot(self, *, whole: bool, ahead: float = 0.0) -> memoryview:
        """A copy of this version as bytes, of a small model made once for all; `whole`: with fixed parts.

        `ahead`: its trained parameters look ahead by so many updates, if the last movement is known.
        """
        if self._is_large:
            return self._copy(whole=whole, ahead=ahead)
        if self._snapshots_version != self.version:
            self._snapshots_version = self.version
            self._snapshots.clear()
        if (whole, ahead) not in self._snapshots:
            self._snapshots[whole, ahead] = self._copy(whole=whole, ahead=ahead)
        return self._snapshots[whole, ahead]

    def _copy(self, *, whole: bool, ahead: float) -> memoryview:
        found = self._look_ahead.copy(whole=whole, ahead=ahead) if ahead else None
        return self.flat.snapshot(whole=whole) if found is None else found

    def read_state(self, *, whole: bool, ahead: float = 0.0) -> tuple[memoryview, Callable[[], None]] | None:
        """The parameters of this version without a copy, and a function to call when they have been read.

        They do not change until then: a step that is applied earlier moves the state to other memory. None if
        the caller must use `snapshot`, as for a small model that looks ahead.
        """
        if ahead:
            can_lend = self._is_large and not whole and self.flat.state.device.type == "cpu"
            return self._look_ahead.lend(ahead) if can_lend else None
        if self._read_from is not self.flat.moving:
            self._read_from, self._memories = self.flat.moving, {}
        if whole not in self._memories:
            self._memories[whole] = self.flat.memory(whole=whole)
        memory = self._memories[whole]
        if memory is None:
            return None
        readers = self._readers
        readers.begun += 1

        def done() -> None:
            readers.done += 1

        return memory, done

    def _move_away_from_readers(self) -> None:
        """Move the state to other memory if it is still being read, so that a step can change it."""
        if self.flat.is_away and not self._first_readers.are_there:
            self._readers = self._first_readers
            self.flat.return_home()
        elif self._readers.are_there:
            self._readers = Readers()
            self.flat.move()

    def weights_sha256(self) -> str:
        return weights_sha256(self.flat.module)
