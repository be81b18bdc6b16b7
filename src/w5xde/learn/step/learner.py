"""The learner: folds updates in the canonical tree, steps the optimizer, publishes versions.

The one owner of the model that is trained. One thread uses it at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from w5xde.learn.model.digest import weights_sha256
from w5xde.learn.model.layout import FlatModel, Vector
from w5xde.learn.step import without_compiler as lean
from w5xde.learn.step.fast_optimizer import Stepper
from w5xde.learn.step.finite import Gauge, can_hold_nan, is_finite
from w5xde.learn.step.rollback import Undo
from w5xde.messages import MOVING, TRAINED
from w5xde.tree import PairwiseTree, Span

# From here on memory that is copied is worth a thought.
LARGE_BYTES = 1024 * 1024
# Sums of gradients below this are finite, and so are their squares, in float32 and wider.
TAME_NORM = 1e15
# Optimizers whose state stays finite if it was and the gradient is tame: it holds means of it and its square.
_TAMED = (SGD, Adam, AdamW)


class Contribution(NamedTuple):
    """What came for a span: its vector, the trained entries without any gradient, the sum of its losses."""

    vector: Vector
    absent: frozenset[int]
    loss_sum: float
    # The norm of its gradients is at most this, and all its numbers are finite; infinite if nobody looked.
    norm: float = math.inf
    # The step in which it was added to its neighbour already: the vector is both of them.
    added_in: int | None = None


class Total(NamedTuple):
    """A whole step, folded; batches that were set aside count among its `batches`."""

    batches: int
    contribution: Contribution


class _Readers:
    """How many began to read the state where it lies, and how many are done: each counted by one thread."""

    def __init__(self) -> None:
        self.begun = self.done = 0


class Spoiled(ArithmeticError):
    """A step that would leave numbers that are not finite. `Learner.is_whole` says whether it was undone."""


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
        # Entries that an update may say it has no gradient for.
        self.trained = frozenset(self._blueprint.trained)
        self._parameters = [flat.tensors[i] for i in self._blueprint.trained]
        # A small model's gradients have their own place, so that a step always finds them there; a large
        # one's are used where they arrived, because copying them would cost as much as a step.
        self._is_large = self.vector_bytes >= LARGE_BYTES
        self._gradient = None if self._is_large else self._blueprint.new_vector()
        self.gauge = Gauge(self._blueprint)
        self._gradients = [] if self._gradient is None else self._views(self._gradient)
        # Of a vector's parts: the buffers that move by the mean of what the batches did to them.
        self._drifting = [
            i
            for i, group in enumerate(self._blueprint.moving_groups)
            if group.role == MOVING and (group.dtype.is_floating_point or group.dtype.is_complex)
        ]
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
        # Batches that are steps of their own need no tree: by step, or stretch of steps, and place in it.
        self._apart: dict[int, dict[int, Contribution]] = {}
        # A batch that was set aside has its place in the tree, with nothing in it.
        self._steps: dict[int, PairwiseTree[Contribution | None]] = {}
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

    def vectors(self, body: bytearray | memoryview, count: int) -> list[Vector]:
        """Updates as they arrived, one behind the other, without copying them."""
        rows = (
            torch.frombuffer(body, dtype=torch.uint8).view(count, self.vector_bytes)
            if count and self.vector_bytes
            else torch.empty(count, self.vector_bytes, dtype=torch.uint8)
        )
        parts = [part.unbind(0) for part in self._blueprint.parts(rows)]
        return [Vector(raw, [part[i] for part in parts]) for i, raw in enumerate(rows.unbind(0))]

    def vector(self, raw: torch.Tensor) -> Vector:
        """One update, of which these are the bytes."""
        return Vector.over(raw, self._blueprint)

    def fold(
        self, step: int, count: int, span: Span, contribution: Contribution | None, staleness: int = 0
    ) -> None:
        """Give what came for a span of a step its place in the tree; None: nothing will ever come."""
        if contribution is not None and staleness:
            self._temper(contribution.vector, staleness)
        tree = self._steps.get(step)
        if tree is None:
            tree = self._steps[step] = PairwiseTree(count, _merge)
        tree.put(span, contribution)
        if contribution is None and all(value is None for _, value in tree) and tree.is_complete:
            del self._steps[step]  # all of it was set aside: nobody will ask for it

    def neighbour(self, step: int, span: Span) -> Vector | None:
        """What is there for exactly this span of a step."""
        there = self._steps[step].get(span) if step in self._steps else None
        return there.vector if there is not None else None

    def keep(self, step: int, first: int, contributions: list[Contribution], staleness: int = 0) -> None:
        """What came for batches of a stretch that are steps of their own, from the `first` of it on."""
        kept = self._apart.setdefault(step, {})
        for place, contribution in enumerate(contributions, first):
            if self._drifting and staleness + place:
                self._temper(contribution.vector, staleness + place)
            kept[place] = contribution

    def _temper(self, vector: Vector, staleness: int) -> None:
        """So many steps saw the same buffers as this one: they move by the mean of what all of them did.

        Each in full would pull them the same way again and again, past where they belong and back: from
        sixteen steps on a running variance swings further each time, until it is below zero.
        """
        for i in self._drifting:
            vector.parts[i].div_(staleness + 1)

    def totals(self, step: int) -> list[Total]:
        """All batches are there: their sum, or of a stretch each, to be applied in this order.

        One that is not finite is `Spoiled`.
        """
        kept = self._apart.pop(step, None)
        if kept is not None:
            return [self._total(step + place, 1, kept[place]) for place in sorted(kept)]
        tree = self._steps.pop(step)
        contribution = tree.take(Span(0, tree.count))
        if contribution is None:
            raise ValueError(f"nothing came for step {step}")
        return [self._total(step, tree.count, contribution)]

    def _total(self, step: int, batches: int, contribution: Contribution) -> Total:
        is_tame = contribution.norm < TAME_NORM and (batches == 1 or not self._drifting)
        if not is_tame and not self.gauge.is_finite(contribution.vector):
            raise Spoiled(f"the gradient of step {step + 1} is not finite")
        return Total(batches, contribution)

    @property
    def undoes(self) -> bool:
        """Whether a step that spoils the state can be undone: not if a copy of it would be too large."""
        return self._undo is not None

    def drop(self, step: int) -> None:
        """Nobody will ask for what was folded of this step."""
        self._apart.pop(step, None)
        self._steps.pop(step, None)

    def replay(self, batches: int, body: bytes, absent: frozenset[int], loss_sum: float) -> None:
        """Apply a step once more, from the sum that was kept of it."""
        (vector,) = self.vectors(bytearray(body), 1)
        self.apply([Total(batches, Contribution(vector, absent, loss_sum))])

    def apply(self, wholes: list[Total]) -> list[float]:
        """Step the optimizer, for each of a stretch. Returns the sum of the losses of each step's samples.

        If the optimizer raises, or a parameter, a buffer or the optimizer's state is not finite then
        (`Spoiled`), all of it is undone if that is possible.
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
        are_same = True
        for i, parameter, view in zip(self._blueprint.trained, self._parameters, views, strict=True):
            wanted = None if i in absent else view
            # Asking costs less than setting, and they rarely change.
            if parameter.grad is not wanted:
                parameter.grad = wanted
                are_same = False
        if self._clip_norm is not None:
            self._clip(gradient, self._clip_norm)
        if self._is_large:
            lean.step(self.optimizer)  # nothing to gain there, and the stepper would keep the vector alive
            is_in_place = False
        else:
            is_in_place = self._stepper.step(same_gradients=are_same)
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
            raise Spoiled(f"{what} infinite or not a number")

    def _is_sound(self, norm: float) -> bool:
        """Of a large model: one pass over the parameters, and over the rest only if the gradient was wild."""
        for part, is_watched in zip(self.flat.moving.parts, self._watched, strict=True):
            if is_watched and not is_finite(part):
                return False
        if (norm < TAME_NORM and type(self.optimizer) in _TAMED) or not lean.is_torchs(self.optimizer):
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
        """The parameters of this version as bytes that stay as they are; made once for all nodes."""
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


def _merge(left: Contribution | None, right: Contribution | None) -> Contribution | None:
    if left is None or right is None:
        return left or right
    return Contribution(
        # One that was added while it arrived has its neighbour's vector.
        left.vector if left.vector is right.vector else left.vector.add_(right.vector),
        left.absent & right.absent,
        left.loss_sum + right.loss_sum,
        left.norm + right.norm,
    )
