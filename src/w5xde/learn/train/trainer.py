"""The trainer: parameters and a lease of batches in, one update out. What a node does.

Every batch is computed on its own: under its own seed, from the buffers of the version, with its weight in
the step. The gradients of a lease are then added in the canonical tree, so that it does not matter which
batches came to this node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from w5xde.learn.job.job import BatchFailed, Job, describe
from w5xde.learn.model.device import to_device
from w5xde.learn.model.digest import same_loss
from w5xde.learn.model.layout import Blueprint, FlatModel, Row, Vector
from w5xde.learn.model.seeding import seed_numpy, seed_python, torch_seeder
from w5xde.learn.train.recording.lookahead import Ahead, Batch, Key, Known
from w5xde.learn.train.recording.record import is_plain
from w5xde.learn.train.recording.shapes import CHANGED, Recordings, Shape, tensors_of
from w5xde.messages import MOVING, TRAINED, Rules
from w5xde.tree import Span, batch_seed, halves

# Vectors that were sent are used again: as many as travel together, if they are small.
SPARE_MAX = 128
SPARE_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class Task:
    """One lease, unpacked: batches `span` of a step of `count` batches and `samples` samples."""

    epoch: int
    span: Span
    count: int
    samples: int
    # For each batch: its index in the epoch, its samples, and the batch itself.
    batches: Sequence[tuple[int, int, Any]]


@dataclass(slots=True)
class Outcome:
    """What a task gave."""

    vector: Vector
    loss_sum: float
    absent: list[int]


class Trainer:
    """Owns a node's copy of the model. One thread uses it at a time."""

    def __init__(self, job: Job, flat: FlatModel, rules: Rules, device: torch.device) -> None:
        self._job = job
        self._flat = flat
        self._rules = rules
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._autocasts = rules.precision == "bf16"
        # A batch's weight in its step, as the tensor that backward starts from; there are few different ones.
        self._weights: dict[float, Tensor] = {}
        self._seed_torch = torch_seeder(device)
        self._spare: list[Vector] = []
        self._spare_max = max(4, min(SPARE_MAX, SPARE_BYTES // max(1, flat.blueprint.moving_bytes)))
        self._buffers = _Buffers(flat)
        self._trained = flat.blueprint.trained
        self._parameters = [flat.tensors[i] for i in self._trained]
        # Which of the parameters each part of a vector holds.
        self._gradient_groups = [
            [self._trained.index(i) for i in group.entries]
            for group in flat.blueprint.moving_groups
            if group.role == TRAINED
        ]
        self._steady = [*flat.module.parameters(), *flat.module.buffers()]
        self._recordings = Recordings() if self._may_record() else None
        self._ahead = (
            Ahead(self._recordings, flat.blueprint, self._gradient_groups, self._scale, self._is_right)
            if self._recordings is not None
            else None
        )

    def _may_record(self) -> bool:
        rules = self._rules
        draws = rules.seeds_python or rules.seeds_numpy
        changes = any(group.role == MOVING for group in self._flat.blueprint.moving_groups)
        return rules.recording == "auto" and self._on_cpu and not draws and not changes

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def blueprint(self) -> Blueprint:
        return self._flat.blueprint

    @property
    def module(self) -> nn.Module:
        """The node's own copy of the model."""
        return self._flat.module

    def memory(self, count: int, *, whole: bool) -> memoryview | None:
        """The memory that a version of so many bytes would be loaded into, if others can write it."""
        return self._flat.memory(whole=whole) if count == self._flat.byte_count(whole=whole) else None

    def load(self, raw: bytearray | memoryview, *, whole: bool, in_place: bool = False) -> None:
        """Take over a version of the parameters, which may have been received into `memory` already."""
        self._flat.load(raw, whole=whole, in_place=in_place)
        if self._ahead is not None:
            self._ahead.forget()
        self._buffers.remember(whole=whole)

    def look_ahead(self, tasks: Sequence[Task]) -> None:
        """These tasks come next: what of them can be computed together, is."""
        if self._ahead is not None:
            self._ahead.compute(
                Batch((task.epoch, index), samples / task.samples, value)
                for task in tasks
                for index, samples, value in task.batches
            )

    def fill(self, write: Callable[[FlatModel], None]) -> None:
        """Let the parameters and buffers be what somebody writes there, until a whole version is loaded."""
        write(self._flat)
        self._flat.reclaim()
        self._buffers.remember(whole=True)

    def gradients(self, batch: Any, key: Key) -> list[Tensor | None]:
        """The gradients of one batch, as torch leaves them at the parameters, and nothing changed by it."""
        self._seed(key)
        try:
            self._backward(to_device(batch, self._device), 1.0)
            return [parameter.grad for parameter in self._parameters]
        except (Exception, SystemExit) as error:
            raise BatchFailed(describe(error)) from error
        finally:
            self._buffers.undo()
            for parameter in self._parameters:
                parameter.grad = None

    def compute(self, task: Task) -> Outcome:
        """The weighted sum of the gradients of a task's batches."""
        absent = set(self._trained)
        vector, loss_sum = self._sum(task, task.span, absent)
        return Outcome(vector, loss_sum, sorted(absent))

    def _sum(self, task: Task, span: Span, absent: set[int]) -> tuple[Vector, float]:
        """The gradients of a part of the task, added in the canonical tree, and the sum of its losses."""
        if span.count > 1:
            left, right = halves(span)
            vector, loss_sum = self._sum(task, left, absent)
            other, other_loss_sum = self._sum(task, right, absent)
            vector.add_(other)
            self.recycle(other)
            return vector, loss_sum + other_loss_sum
        index, samples, batch = task.batches[span.start - task.span.start]
        try:
            vector, loss = self._one(batch, (task.epoch, index), samples / task.samples, absent)
        except (Exception, SystemExit) as error:
            # Whatever went wrong, the next batch starts from the version's buffers again.
            self._buffers.undo()
            raise error if isinstance(error, BatchFailed) else BatchFailed(describe(error)) from error
        if not math.isfinite(loss):
            raise BatchFailed(f"the loss of batch {index} is {loss}")
        return vector, samples * loss

    def _one(self, batch: Any, key: Key, weight: float, absent: set[int]) -> tuple[Vector, float]:
        """One batch: its weighted gradients and its loss. By its recording, if there is one."""
        known = self._ahead.take(key, weight) if self._ahead is not None else None
        if known is not None:
            if absent:
                absent.intersection_update([self._trained[i] for i in known.absent])
            return known.vector, known.loss
        found = self._recordings.find(batch) if self._recordings is not None else None
        if found is None:
            return self._one_as_always(batch, key, weight, absent)
        shape, inputs = found
        if shape.recording is None:
            return self._watch(shape, batch, key, weight, absent)
        inputs.append(self._scale(weight))
        try:
            loss, gradients = shape.recording.run(inputs)
        except Exception:
            # It has given nothing: what was recorded does not fit this batch, or the batch itself is wrong.
            shape.give_up()
            return self._one_as_always(batch, key, weight, absent)
        vector, value = self._join(gradients), loss.item()
        if absent:
            absent.intersection_update([self._trained[i] for i in shape.recording.absent])
        if shape.is_next_compared():
            real, real_value = self._one_as_always(batch, key, weight, absent)
            if not _is_same((vector, value), (real, real_value)):
                if shape.differs():
                    raise BatchFailed(CHANGED)
                return real, real_value
            self.recycle(real)
        return vector, value

    def _watch(
        self, shape: Shape, batch: Any, key: Key, weight: float, absent: set[int]
    ) -> tuple[Vector, float]:
        self._seed(key)
        batch = to_device(batch, self._device)
        inputs = [*tensors_of(batch), self._scale(weight)]
        loss = shape.watch(inputs, self._steady, self._parameters, lambda: self._backward(batch, weight))
        if loss is None:
            self._buffers.undo()
            return self._one_as_always(batch, key, weight, absent)
        watched, value = self._collect(absent), loss.item()
        if shape.recording is None:
            return watched, value
        # Some kernels take another way while somebody watches, so what counts is what nobody has seen.
        real, real_value = self._one_as_always(batch, key, weight, absent)
        if not _is_same((watched, value), (real, real_value)):
            shape.give_up()
        self.recycle(watched)
        return real, real_value

    def _one_as_always(self, batch: Any, key: Key, weight: float, absent: set[int]) -> tuple[Vector, float]:
        self._seed(key)
        loss = self._backward(to_device(batch, self._device), weight)
        return self._collect(absent), loss.item()

    def _is_right(self, batch: Batch, known: Known) -> bool:
        """Whether a batch gives that when it is computed as always."""
        try:
            real, loss = self._one_as_always(batch.value, batch.key, batch.weight, set())
        except (Exception, SystemExit):
            self._buffers.undo()
            return False
        is_same = _is_same((known.vector, known.loss), (real, loss))
        self.recycle(real)
        return is_same

    def recycle(self, vector: Vector) -> None:
        """Give back a vector that has been sent."""
        if isinstance(vector, Row):
            vector.block.take_back(vector)
        elif len(self._spare) < self._spare_max:
            self._spare.append(vector)

    def _seed(self, key: Key) -> None:
        seed = batch_seed(self._rules.seed, *key)
        self._seed_torch(seed)
        if self._rules.seeds_python:
            seed_python(seed)
        if self._rules.seeds_numpy:
            seed_numpy(seed)

    def _backward(self, batch: Any, weight: float) -> Tensor:
        """The loss; the gradients of `loss * weight` are at the parameters then."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._autocasts:
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                loss = self._job.loss(self._flat.module, batch)
        else:
            loss = self._job.loss(self._flat.module, batch)
        self._run_backward(loss, weight)
        return loss

    def _run_backward(self, loss: Tensor, weight: float) -> None:
        """Gradients of `loss * weight`.

        Torch's own `backward` takes a fifth of a small model's time before it reaches its engine, and given a
        gradient it first imports a package for symbolic algebra: so a plain loss goes to the engine at once.
        """
        if not is_plain(loss) or not self._on_cpu:
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            return
        Variable._execution_engine.run_backward(
            (loss,), (self._scale(weight),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    def _scale(self, weight: float) -> Tensor:
        scale = self._weights.get(weight)
        if scale is None:
            scale = self._weights[weight] = torch.tensor(weight, dtype=torch.float32)
        return scale

    def _collect(self, absent: set[int]) -> Vector:
        """This batch's gradients, and how it changed the buffers, as one vector."""
        # An unused parameter counts as zero in the sum; that it was unused is told beside it.
        vector = self._join(
            [
                torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
                if (gradient := p.grad) is None
                else gradient.reshape(-1)
                for p in self._parameters
            ]
        )
        if absent:
            absent.difference_update(
                [i for i, p in zip(self._trained, self._parameters, strict=True) if p.grad is not None]
            )
        self._buffers.differences(vector.parts[len(self._gradient_groups) :])
        return vector

    def _join(self, gradients: list[Tensor]) -> Vector:
        """The gradients of all parameters as one vector."""
        vector = self._spare.pop() if self._spare else self._flat.blueprint.new_vector(self._device)
        for part, group in zip(vector.parts, self._gradient_groups, strict=False):
            torch.cat([gradients[i] for i in group], out=part)
        return vector


def _is_same(one: tuple[Vector, float], other: tuple[Vector, float]) -> bool:
    """Bit by bit: also that a loss is not a number, and how."""
    return one[0].is_same(other[0]) and same_loss(one[1], other[1])


_UNEXPECTED = (
    "buffer {} changed, which it did not do in the first batch; buffers that change must do so in every batch"
)


class _Buffers:
    """Buffers of the version: every batch starts from them and leaves a difference."""

    def __init__(self, flat: FlatModel) -> None:
        self._flat = flat
        blueprint = flat.blueprint
        entries = blueprint.layout.entries
        self._groups = [
            (group, part)
            for group, part in zip(blueprint.moving_groups, flat.moving.parts, strict=True)
            if group.role == MOVING
        ]
        self._before = [part.clone() for _, part in self._groups]
        owners = {
            f"{prefix}.{name}" if prefix else name: (module, name)
            for prefix, module in flat.module.named_modules()
            for name in module._buffers
        }
        self._bound = [
            (entries[i].name, flat.tensors[i], *owners[entries[i].name], entries[i].role == MOVING)
            for i in range(len(entries))
            if entries[i].name in owners
            and flat.tensors[i] is owners[entries[i].name][0]._buffers.get(owners[entries[i].name][1])
        ]
        self._versions: list[int] = []
        self.remember(whole=True)

    def remember(self, *, whole: bool) -> None:
        """A new version was loaded: this is what batches start from now."""
        for before, (_, part) in zip(self._before, self._groups, strict=True):
            before.copy_(part)
        if whole:
            # Still buffers are known to be right only now: one that was overwritten since stays found out.
            self._versions = [tensor._version for _, tensor, _, _, moving in self._bound if not moving]

    def undo(self) -> None:
        """Forget what a batch did that was not finished, buffers it replaced included."""
        for _, tensor, module, local, _ in self._bound:
            module._buffers[local] = tensor
        self._restore()

    def _restore(self) -> None:
        for before, (_, part) in zip(self._before, self._groups, strict=True):
            part.copy_(before)

    def differences(self, parts: list[Tensor]) -> None:
        """Write into `parts` what the last batch changed, and undo it in the model."""
        if not self._bound:
            return
        with torch.no_grad():
            self._rebind()
            for out, before, (group, part) in zip(parts, self._before, self._groups, strict=True):
                if group.dtype is torch.bool:
                    out.copy_(part)
                else:
                    # Equal means no difference, for infinities too (masks are often minus infinity).
                    torch.sub(part, before, out=out)
                    out.masked_fill_(part == before, 0)
            self._restore()

    def _rebind(self) -> None:
        """Take over buffers that the forward pass replaced, and refuse changes nobody expects."""
        still = iter(self._versions)
        for name, tensor, module, local, moving in self._bound:
            now = module._buffers[local]
            if now is not tensor and now is not None:
                if now.shape != tensor.shape or now.dtype != tensor.dtype:
                    raise BatchFailed(f"buffer {name} changed its shape or dtype")
                module._buffers[local] = tensor
                if moving:
                    tensor.copy_(now)
                elif not torch.equal(tensor, now):
                    raise BatchFailed(_UNEXPECTED.format(name))
            if not moving and tensor._version != next(still):
                raise BatchFailed(_UNEXPECTED.format(name))
