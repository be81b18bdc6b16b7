"""Contestants that learn until a loss is reached: a plain loop, DDP over gloo, and w5xde.

Each copies its parameters at marks, with the time, and computes the losses of the copies after its end: so
only learning is timed. The clock starts with the first step: at the first lease of a run of w5xde, and before
the first forward pass of a loop. Starting processes, importing torch, building the model, and reading the
batches of a loop (but not those of w5xde) come before that and are not counted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from w5xde.api import Watcher, run_coordinator
from w5xde.bench.contestants.ddp import agree, data_parallel, run_group
from w5xde.bench.contestants.product import runs_folder, settings_for
from w5xde.bench.measure.curves import AVERAGED_MARKS, Curve, CurveMark, reached, seems_reached
from w5xde.bench.measure.processes import Line, run_apart
from w5xde.config import Settings
from w5xde.learn.data.sources import MapSource
from w5xde.learn.job.build import build_model, build_source
from w5xde.learn.job.job import Job
from w5xde.learn.model.device import use_threads
from w5xde.runtime.coordinator.body import Coordinator

# Marks that are still made when the training loss says that the target is reached.
MARKS_MORE = AVERAGED_MARKS
# A run of w5xde is looked at this many times in the time of a mark of the plain loop, and at most so often.
LOOKS_PER_MARK = 4
LOOK_SECONDS_MIN = 0.004
# More than any run lasts; the watcher ends it sooner.
SECONDS_MORE = 60.0
# Counts of samples are multiples of the mean size of a batch, which is not a whole number.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class LearnTask:
    """What a contestant must learn, and when it may end."""

    job: Job
    batch_size: int
    seed: int
    # Samples of the training data on which losses are computed; 0: only time and traffic are of interest.
    probe_samples: int
    mark_samples: float
    samples_max: float
    seconds_max: float
    # How long a mark takes the plain loop; it says how often a run must be looked at.
    mark_seconds: float = 0.0
    # The loss to reach, and the training loss that tells it; None: learn to the end.
    target: float | None = None
    hint: float | None = None
    # Makes the samples on which losses are computed, instead of some of the training data.
    held_out: Callable[[], Any] | None = None
    # Bytes that the links of all nodes have carried so far; int() is 0.
    count_bytes: Callable[[], int] = int

    @property
    def source(self) -> MapSource:
        found = build_source(self.job, self.seed, self.batch_size, shuffle=True)
        if not isinstance(found, MapSource):
            raise TypeError("a benchmark's job has a map-style data set")
        return found

    def probe(self) -> Any:
        """The samples on which losses are computed."""
        if self.held_out is not None:
            return self.held_out()
        source = self.source
        places = torch.linspace(0, source.samples - 1, min(self.probe_samples, source.samples)).long()
        return source.read_indices(places, 0, 0)


class Snapshots:
    """Copies of a model's parameters, one for each mark, with the time and the training loss until then."""

    def __init__(self, task: LearnTask) -> None:
        self._task = task
        model = build_model(task.job, task.seed)
        self._copies = [copy_of(model)]
        # The losses on the fixed samples are not known before the end.
        self.marks = [CurveMark(0.0, 0, 0.0)]
        self._loss_sum, self._steps = 0.0, 0
        self._marks_left: int | None = None

    @property
    def next_samples(self) -> float:
        """The samples after which the next copy is due."""
        done = math.floor(self.marks[-1].samples / self._task.mark_samples + ROUNDING)
        return (done + 1 - ROUNDING) * self._task.mark_samples

    def add(self, copy: list[Tensor], seconds: float, samples: float, loss_sum: float, steps: int) -> None:
        """Keep a copy; `loss_sum` is the sum of the training losses of all `steps` so far."""
        made = steps - self._steps
        training_loss = (loss_sum - self._loss_sum) / made if made else None
        if self._task.probe_samples:
            self._copies.append(copy)
        self.marks.append(CurveMark(seconds, samples, 0.0, training_loss, self._task.count_bytes()))
        self._loss_sum, self._steps = loss_sum, steps
        if self._marks_left is not None:
            self._marks_left -= 1
        elif seems_reached(self.marks, self._task.hint):
            self._marks_left = MARKS_MORE

    @property
    def is_complete(self) -> bool:
        """Whether the run may end."""
        last, task = self.marks[-1], self._task
        is_late = last.samples >= task.samples_max * (1 - ROUNDING) or last.seconds >= task.seconds_max
        return is_late or self._marks_left == 0

    def curve(self) -> Curve:
        """Compute the losses of the copies, in order, as far as they are needed."""
        task = self._task
        if not task.probe_samples:
            return Curve(self.marks, seconds=self.marks[-1].seconds)
        # One thread: several would wait for each other where other processes have the cores.
        use_threads(1)
        model, probe = build_model(task.job, task.seed).eval(), task.probe()
        shown: list[CurveMark] = []
        for mark, copy in zip(self.marks, self._copies, strict=True):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), copy, strict=True):
                    parameter.copy_(value)
                mark.loss = float(task.job.loss(model, probe))
            shown.append(mark)
            # The average of a mark needs its later neighbours.
            if task.target is not None and reached(shown[: -(AVERAGED_MARKS // 2)], task.target):
                break
        return Curve(shown, ended_by_hint=self._marks_left == 0, seconds=self.marks[-1].seconds)


def copy_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# --- loops --------------------------------------------------------------------------------------------


Step = Callable[[Any], float]


def learn_plain(task: LearnTask, *, threads: int = 1) -> Curve:
    """A plain loop in one process, with this many torch threads."""

    def learn(line: Line) -> Curve:
        use_threads(threads)
        model = build_model(task.job, task.seed)
        return loop(task, model, training_step(task.job, model), batches_of(task))

    return msgspec.convert(run_apart(learn, "the plain loop", task.seconds_max), Curve)


def learn_ddp(task: LearnTask, processes: int) -> Curve:
    """DistributedDataParallel over gloo: a step is a batch of each process."""

    def learn(rank: int) -> Curve | None:
        model = build_model(task.job, task.seed)
        parallel = data_parallel(model)
        batches = batches_of(task, rank, processes)
        step = training_step(task.job, parallel)
        found = loop(task, model, step, batches, parts=processes, is_first=rank == 0, agree=agree)
        return found if rank == 0 else None

    return msgspec.convert(run_group(learn, processes, task.seconds_max)[0], Curve)


def training_step(job: Job, model: nn.Module, optimizer: Optimizer | None = None) -> Step:
    """A function that learns from a batch and returns its loss."""
    stepper = job.optimizer(model.parameters()) if optimizer is None else optimizer

    def step(batch: Any) -> float:
        loss = job.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        stepper.step()
        stepper.zero_grad()
        return loss.item()

    return step


def samples_per_batch(samples: int, batch_size: int) -> float:
    """The mean size of a batch: the last batch of an epoch is often smaller."""
    return samples / -(-samples // batch_size)


def batches_of(task: LearnTask, first: int = 0, stride: int = 1) -> list[Any]:
    """Every `stride`-th batch of all that are learnt at most, read beforehand."""
    source = task.source
    in_epoch = -(-source.samples // task.batch_size)
    count = math.ceil(task.samples_max * in_epoch / source.samples) + 2 * stride
    return [source.read(*divmod(number, in_epoch)) for number in range(first, count, stride)]


def loop(
    task: LearnTask,
    model: nn.Module,
    step: Step,
    batches: Iterable[Any],
    *,
    parts: int = 1,
    period: int = 1,
    is_first: bool = True,
    agree: Callable[[bool], bool] = bool,
) -> Curve:
    """Train until it may end; of several processes, which make marks together, the first decides.

    Marks are made after multiples of `period` steps: only then do all processes have the same model.
    """
    snapshots = Snapshots(task)
    step_samples = parts * samples_per_batch(task.source.samples, task.batch_size)
    loss_sum, due = 0.0, snapshots.next_samples
    began = time.monotonic()
    for steps, batch in enumerate(batches, 1):
        loss_sum += step(batch)
        samples = steps * step_samples
        if samples < due or steps % period:
            continue
        # Copies take microseconds, and count: everybody makes them.
        snapshots.add(copy_of(model), time.monotonic() - began, samples, loss_sum, steps)
        due = snapshots.next_samples
        if agree(snapshots.is_complete):
            break
    return snapshots.curve() if is_first else Curve([])


# --- w5xde --------------------------------------------------------------------------------------------


def learn_ours(task: LearnTask, **settings: Any) -> Curve:
    """A run of w5xde with these settings."""

    def learn(line: Line) -> Curve:
        watcher = MarkWatcher(task)
        coordinate(task, watcher, **settings)
        return watcher.snapshots.curve()

    return msgspec.convert(run_apart(learn, "w5xde", task.seconds_max + SECONDS_MORE), Curve)


def coordinate(task: LearnTask, watcher: Watcher, **settings: Any) -> dict[str, Any]:
    """Run a coordinator with these settings until its watcher stops it; returns its summary."""
    with runs_folder(None) as runs:
        chosen = settings_for(
            runs,
            batch_size=task.batch_size,
            seed=task.seed,
            seconds=task.seconds_max + SECONDS_MORE,
            **settings,
        )
        return run_coordinator(task.job, chosen, watcher=watcher, name="w5xde.bench:learn").summary


class MarkWatcher(Watcher):
    """Copies the parameters of a run at its marks, between two steps, and ends the run."""

    def __init__(self, task: LearnTask) -> None:
        self.task = task
        self.snapshots = Snapshots(task)
        self._look_seconds = max(LOOK_SECONDS_MIN, task.mark_seconds / LOOKS_PER_MARK)

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._look()

    def _look(self) -> None:
        coordinator = self._coordinator
        if coordinator.is_over:
            return
        self._loop.call_later(self._look_seconds, self._look)
        if coordinator.status().samples >= self.snapshots.next_samples:
            coordinator.look(lambda model: (time.monotonic(), copy_of(model)), self._found)

    def _found(self, seen: tuple[float, list[Tensor]]) -> None:
        at, copy = seen
        status = self._coordinator.status()
        began_at = self._loop.time() - status.seconds
        # A second look may have been on its way while the first was answered.
        if status.samples < self.snapshots.next_samples:
            return
        loss_sum = (status.loss_average or 0.0) * status.step
        self.snapshots.add(copy, at - began_at, status.samples, loss_sum, status.step)
        if self.snapshots.is_complete:
            self._coordinator.stop("learnt")
