"""The trainer: takes parameters and the batches of a lease, and gives one update.

Each batch is computed on its own: under its own seed, from the buffers of the version, with its weight in the
step. The gradients of a lease are added in the canonical tree, so that the sum does not depend on the node
that computed it. Knows no sockets, leases or clocks. Small batches have a fast path (`recording.fast_path`),
which gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from w5xde.learn.data.batch_types import BatchTypes
from w5xde.learn.job.job import BatchFailed, Job, describe
from w5xde.learn.model.device import to_device
from w5xde.learn.model.layout import Blueprint, FlatModel, Vector
from w5xde.learn.model.route import is_large
from w5xde.learn.model.seeding import seed_numpy, seed_python, torch_seeder
from w5xde.learn.torch_private import backward
from w5xde.learn.train.batch import BatchGradient, BatchId, WeightedBatch
from w5xde.learn.train.buffer_changes import BufferChanges
from w5xde.learn.train.flags import ModelFlags
from w5xde.learn.train.gradient_sink import GradientSink
from w5xde.learn.train.manners import Manners
from w5xde.learn.train.measuring import in_order, measure_batch
from w5xde.learn.train.position import Position, at
from w5xde.learn.train.recording.fast_path import FastPath
from w5xde.learn.train.vectors import GradientVectors, Slots
from w5xde.learn.train.weighing import add_weights, counted, weigh
from w5xde.message_types import Call
from w5xde.messages import Rules
from w5xde.tree import Span, batch_seed, halves


@dataclass(slots=True)
class Task:
    """One lease, unpacked: batches `span` of a step of `count` batches and `samples` samples."""

    epoch: int
    span: Span
    count: int
    samples: int
    # For each batch: its index in the epoch, its samples, and the batch itself.
    batches: Sequence[tuple[int, int, Any]]
    # Whether the squared norm of each batch's gradient is wanted.
    measures: bool = False
    # How many steps are planned before this one.
    step: int = 0
    # What each batch weighs, once that is known, if the job weighs batches; else a batch weighs its samples.
    weights: list[float] | None = None

    def batch(self, place: int) -> WeightedBatch:
        """The batch at a place of the span, counted from 0."""
        index, samples, value = self.batches[place]
        share = samples / self.samples
        if self.weights is not None:
            # A batch that is a step of its own is the mean of that step, whatever it weighs.
            alone = float(self.weights[place] > 0)
            share = alone if self.count == 1 else self.weights[place] / self.samples
        return WeightedBatch(self.epoch, index, share, value, self.step)

    @property
    def weight(self) -> float | None:
        """The sum of the weights of its batches."""
        return None if self.weights is None else add_weights(self.weights, self.span)


def alone_tasks(epoch: int, step: int, batches: Sequence[tuple[int, int, Any]]) -> list[Task]:
    """A task for each batch, of which each makes a step of its own: the first step has the number `step`."""
    return [
        Task(epoch, Span(0, 1), 1, each[1], [each], step=step + number) for number, each in enumerate(batches)
    ]


@dataclass(slots=True)
class Outcome:
    """The update that a task gives: weighted gradients and buffer changes, added over its batches."""

    vector: Vector
    # Each batch's mean loss times its samples, or times its weight if the job weighs batches, added.
    loss_sum: float
    # The layout's trained entries that had no gradient in any batch.
    absent: list[int]
    # The squared norm of each batch's gradient, before its weight, if the task wants them.
    squares: list[float] = field(default_factory=list)
    # The sum of the weights of its batches, if the job weighs batches.
    weight: float | None = None


class Trainer:
    """Owns a node's copy of the model. One thread uses it at a time."""

    def __init__(
        self, job: Job, flat: FlatModel, rules: Rules, device: torch.device, slots: Slots | None = None
    ) -> None:
        """`slots` is memory for vectors that the coordinator reads where they are."""
        self._job = job
        self._flat = flat
        self._rules = rules
        self._device = device
        self._weight = job.weight if rules.weight_unit else None
        self._autocasts = rules.precision == "bf16"
        self._seed_torch = torch_seeder(device)
        self._parameters = [flat.tensors[entry] for entry in flat.blueprint.trained]
        self._buffers = BufferChanges(flat)
        self._vectors = GradientVectors(flat.blueprint, device, slots)
        self._manners = Manners(job, rules, ModelFlags(flat.module, self._parameters), self._new_fast_path)
        is_joined_early = device.type == "cpu" and is_large(flat.blueprint.moving_bytes)
        self._sink = GradientSink(flat) if is_joined_early else None
        # Whether each batch continues with the buffers of the batch before, as in a plain loop, instead of
        # those of the version. Then vectors have no changes of buffers.
        self.keeps_buffers = False
        # Gradients that were computed before `compute` is called for their batches.
        self._ahead: dict[BatchId, BatchGradient] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def flat(self) -> FlatModel:
        """The node's own copy of the model, as one vector."""
        return self._flat

    @property
    def blueprint(self) -> Blueprint:
        return self._flat.blueprint

    @property
    def module(self) -> nn.Module:
        """The node's own copy of the model."""
        return self._flat.module

    @cached_property
    def types(self) -> BatchTypes:
        """The types that batches of the job may be made of."""
        return BatchTypes.of(self._job)

    # --- parameters -------------------------------------------------------------------------------

    def memory(self, count: int, *, whole: bool) -> memoryview | None:
        """The memory into which `load` would copy a version of `count` bytes, if callers can write there."""
        return self._flat.memory(whole=whole) if count == self._flat.byte_count(whole=whole) else None

    def load(self, raw: bytearray | memoryview, *, whole: bool, in_place: bool = False) -> None:
        """Load a version of the parameters; `in_place`: the caller wrote it into `memory` already."""
        self._flat.load(raw, whole=whole, in_place=in_place)
        self._buffers.remember(whole=whole)
        self._ahead.clear()

    def reset_buffers(self) -> None:
        """Let batches start from the buffers that the model holds now."""
        self._buffers.remember(whole=False)

    def fill(self, write: Callable[[FlatModel], None]) -> None:
        """Let `write` set the parameters and buffers, until a whole version is loaded."""
        write(self._flat)
        self._flat.reclaim()
        self._buffers.remember(whole=True)
        self._ahead.clear()

    def _new_fast_path(self, rules: Rules) -> FastPath:
        return FastPath(self._flat, rules, self._vectors, self._backward, self._compute_plainly)

    # --- gradients --------------------------------------------------------------------------------

    def take_call(self, call: Call | None) -> None:
        """Compute the next tasks as this call of a pool says; None: they are of a run, which has no calls.

        Raises RemoteProtocolError if the call does not fit the job or its model.
        """
        self._manners.take(call)

    def compute_together(self, tasks: Sequence[Task]) -> None:
        """Compute small batches of the next tasks together now; `compute` then takes their gradients."""
        if self._weight is not None:
            tasks = [task for task in tasks if self._can_weigh(task)]
        each = (task.batch(place) for task in tasks for place in range(len(task.batches)))
        batches = [batch for batch in each if batch.weight]
        self._ahead = self._manners.now.fast_path.compute(batches) if len(batches) > 1 else {}

    def compute(self, task: Task) -> Outcome:
        """The weighted sum of the gradients of a task's batches."""
        squares: list[float] = []
        self._weigh(task)
        total = self._sum(task, task.span, squares)
        trained = self._flat.blueprint.trained
        absent = [trained[number] for number in sorted(total.absent)]
        return Outcome(total.vector, total.loss, absent, squares, task.weight)

    def _weigh(self, task: Task) -> None:
        """Find out what the batches of a task weigh, if the job says that. Raises BatchFailed."""
        if self._weight is None or task.weights is not None:
            return
        # On copies, as the loss gets them: sums round differently by the alignment of memory.
        found = [
            weigh(self._weight, to_device(value, self._device), f"batch {index}")
            for index, _, value in task.batches
        ]
        task.weights = [counted(weight / self._rules.weight_unit) for weight in found]

    def _can_weigh(self, task: Task) -> bool:
        try:
            self._weigh(task)
        except BatchFailed:
            return False  # `compute` says why
        return True

    def gradients(self, batch: Any, key: tuple[int, int]) -> list[Tensor | None]:
        """The gradients of one batch, as torch leaves them at the parameters; the model does not change."""
        try:
            self._backward(WeightedBatch(*key, 1.0, batch), to_device(batch, self._device))
            return [parameter.grad for parameter in self._parameters]
        except (Exception, SystemExit) as error:
            raise BatchFailed(describe(error)) from error
        finally:
            self._buffers.undo()
            for parameter in self._parameters:
                parameter.grad = None

    def measure(self, batch: Any, number: int) -> list[float]:
        """What the job measures in a batch of its validation set; the model does not change."""
        rules, measure = self._rules, self._job.measure
        if measure is None:
            raise BatchFailed("this job has no measure()")
        try:
            found = measure_batch(
                measure,
                self._flat.module,
                to_device(batch, self._device),
                seed=rules.seed,
                number=number,
                is_bf16=self._autocasts,
            )
        except (Exception, SystemExit) as error:
            raise BatchFailed(describe(error)) from error
        finally:
            self._buffers.undo()
        return in_order(found, rules.metrics)

    def recycle(self, vector: Vector) -> None:
        """Take back a vector that has been sent."""
        self._vectors.recycle(vector)

    def _sum(self, task: Task, span: Span, squares: list[float]) -> BatchGradient:
        """The gradients of a span, added in the canonical tree; `loss` is the sum over its samples.

        Adds the squared norm of each batch to `squares`, if the task wants them.
        """
        if span.count > 1:
            first, second = halves(span)
            left = self._sum(task, first, squares)
            try:
                right = self._sum(task, second, squares)
            except BatchFailed:
                self.recycle(left.vector)
                raise
            left.vector.add_(right.vector)
            self.recycle(right.vector)
            return BatchGradient(left.vector, left.loss + right.loss, left.absent & right.absent)
        place = span.start - task.span.start
        index, samples, _ = task.batches[place]
        try:
            found = self._compute_batch(task.batch(place))
        except (Exception, SystemExit) as error:
            raise error if isinstance(error, BatchFailed) else BatchFailed(describe(error)) from error
        if not math.isfinite(found.loss):
            self.recycle(found.vector)
            raise BatchFailed(f"the loss of batch {index} is {found.loss}")
        if task.measures and task.weights is None:
            weight = samples / task.samples
            squares.append(self._vectors.square(found.vector) / (weight * weight))
        counted = samples if task.weights is None else task.weights[place]
        return BatchGradient(found.vector, counted * found.loss, found.absent)

    def _compute_batch(self, batch: WeightedBatch) -> BatchGradient:
        if not batch.weight:
            return self._run_forward(batch)
        ahead = self._ahead.pop(batch.id, None)
        if ahead is not None:
            return ahead
        return self._manners.now.fast_path.compute([batch]).get(batch.id) or self._compute_plainly(batch)

    def _compute_plainly(self, batch: WeightedBatch) -> BatchGradient:
        """Seed, forward, backward, and collect the gradients and buffer changes."""
        if self._sink is not None:
            return self._compute_into(self._sink, batch)
        loss = self._backward(batch, to_device(batch.value, self._device))
        try:
            return self._collect(loss)
        except BaseException:
            self._buffers.undo()
            raise

    def _run_forward(self, batch: WeightedBatch) -> BatchGradient:
        """A batch that weighs nothing changes the buffers alone; its loss may be a mean of nothing."""
        vector = self._vectors.take()
        try:
            with at(self._position_of(batch)):
                self._loss(batch, to_device(batch.value, self._device))
            vector.raw.zero_()
            self._take_buffers(vector)
            return BatchGradient(vector, 0.0, frozenset(range(len(self._parameters))))
        except BaseException:
            self._buffers.undo()
            self.recycle(vector)
            raise

    def _compute_into(self, sink: GradientSink, batch: WeightedBatch) -> BatchGradient:
        """The same for a large model, whose gradients go into their vector while they are computed."""
        vector = self._vectors.take()
        try:
            with at(self._position_of(batch)):
                loss = self._loss(batch, to_device(batch.value, self._device))
                sink.open(vector)
                backward(loss, batch.weight)
            absent = sink.close()
            self._take_buffers(vector)
            return BatchGradient(vector, loss.item(), absent)
        except BaseException:
            sink.discard()
            self._buffers.undo()
            self.recycle(vector)
            raise

    def _backward(self, batch: WeightedBatch, value: Any) -> Tensor:
        """The loss of a batch whose value is on our device; leaves weighted gradients in the parameters."""
        try:
            # Backward too: a checkpoint computes a part of the loss again there.
            with at(self._position_of(batch)):
                loss = self._loss(batch, value)
                backward(loss, batch.weight)
        except BaseException:
            # The next batch starts from the version's buffers again.
            self._buffers.undo()
            raise
        return loss

    def _position_of(self, batch: WeightedBatch) -> Position:
        return Position(batch.step, batch.epoch, batch.number, self._rules.steps)

    def _loss(self, batch: WeightedBatch, value: Any) -> Tensor:
        """The loss of a batch, computed under its seed and from parameters without gradients."""
        self._seed(batch)
        for parameter in self._parameters:
            parameter.grad = None
        if self._autocasts:
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                return self._manners.now.loss(self._flat.module, value)
        return self._manners.now.loss(self._flat.module, value)

    def _seed(self, batch: WeightedBatch) -> None:
        seed = batch_seed(self._rules.seed, batch.epoch, batch.number)
        self._seed_torch(seed)
        rules = self._manners.now.rules
        if rules.seeds_python:
            seed_python(seed)
        if rules.seeds_numpy:
            seed_numpy(seed)

    def _take_buffers(self, vector: Vector) -> None:
        """Put the buffer changes of the last batch into its vector, or let the buffers stay as they are."""
        if self.keeps_buffers:
            self._buffers.keep()
        else:
            self._buffers.take(self._vectors.buffer_parts(vector))

    def _collect(self, loss: Tensor) -> BatchGradient:
        """The last batch's gradients and buffer changes as one vector."""
        gradients = [parameter.grad for parameter in self._parameters]
        # A parameter without a gradient counts as zero in the sum; the update names it besides.
        rows = [
            parameter.detach().new_zeros(1, parameter.numel())
            if gradient is None
            else gradient.reshape(1, -1)
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        (vector,) = self._vectors.join(rows)
        self._take_buffers(vector)
        absent = frozenset([number for number, gradient in enumerate(gradients) if gradient is None])
        return BatchGradient(vector, loss.item(), absent)
