"""The jobs of `bench learn`: the budget of the plain loop, and the rates at which each contestant is best.

The rates were tuned once, on the grids that `docs/findings.md` has, and are constants: a benchmark that tunes
itself would take hours. The job's rate is the best of a plain loop; DDP has its own batch size and rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from w5xde.bench import jobs
from w5xde.bench.contestants.learners import LearnTask, learn_plain, samples_per_batch
from w5xde.bench.measure.curves import Curve, Reached, reached, target_of, training_loss_at_target
from w5xde.learn.job.job import Job

# Marks in the budget of the plain loop: close enough to see when the target is reached.
MARKS = 60
# A contestant gives up after so many times the samples of the budget.
SAMPLES_FACTOR = 8
# The plain loop ends by its budget; this is only a limit for machines that are much slower than ours.
PLAIN_SECONDS_MAX = 600.0
# A contestant has at least so long: a run of w5xde takes its first second to get going.
PATIENCE_SECONDS_MIN = 4.0
PLAIN = "plain"

MakeOptimizer = Callable[[float], Callable[[Any], Optimizer]]


def seed_adam(rate: float) -> Callable[[Any], Optimizer]:
    return lambda params: torch.optim.Adam(params, lr=rate, betas=(0.0, 0.99), fused=True)


def text_adamw(rate: float) -> Callable[[Any], Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=rate, weight_decay=0.01)


@dataclass(frozen=True, slots=True)
class BatchAndRate:
    """The samples of a batch, and the rate for them."""

    batch_size: int
    rate: float


@dataclass(frozen=True, slots=True)
class LearnJob:
    """A job to learn: what is trained, for how long, and at which rates."""

    title: str
    base: Job
    optimizer: MakeOptimizer
    # The steps of the plain loop, and its rate and batch, which are ours too.
    budget: int
    plain: BatchAndRate
    # A plain loop, and each process of DDP, with the batch and the rate that reach the target soonest.
    plain_large: BatchAndRate
    ddp: BatchAndRate
    nodes: int
    # The best known settings of ours, and the batch and the rate for them.
    best: dict[str, Any]
    best_batch: BatchAndRate
    # Samples of the training data on which losses are computed.
    probe_samples: int
    # A contestant gives up after this many times the seconds of the plain loop, or after these seconds.
    patience: float = 4.0
    patience_seconds: float | None = None
    # A run ends when its training loss is below this part of the plain loop's at the target; what it has
    # reached is computed afterwards. Small losses are noisy.
    hint_part: float = 0.97
    # Makes the samples on which losses are computed, instead of some of the training data.
    held_out: Callable[[], Any] | None = None
    # Marks that are further apart than this many marks of the plain loop are not averaged.
    averaged_marks: float = math.inf

    def job(self, rate: float) -> Job:
        return replace(self.base, optimizer=self.optimizer(rate))


LEARN_JOBS: dict[str, LearnJob] = {
    "seed": LearnJob(
        "seeds' job, 430 parameters",
        jobs.seed,
        seed_adam,
        budget=8000,
        plain=BatchAndRate(32, 0.02),
        plain_large=BatchAndRate(1000, 0.08),
        ddp=BatchAndRate(100, 0.08),
        nodes=10,
        best={"batches_per_step": 32},
        best_batch=BatchAndRate(32, 0.08),
        probe_samples=1000,
        patience=20.0,
    ),
    "digits": LearnJob(
        "digits, 9,610 parameters",
        jobs.digits_job,
        jobs.adam,
        budget=1200,
        plain=BatchAndRate(32, 0.01),
        plain_large=BatchAndRate(128, 0.02),
        ddp=BatchAndRate(64, 0.02),
        nodes=2,
        best={"batches_per_step": 2, "scale_for_batch": True},
        best_batch=BatchAndRate(32, 0.01),
        probe_samples=1437,
        patience=6.0,
        hint_part=0.7,
    ),
    "text": LearnJob(
        "text, 107,160 parameters",
        jobs.text,
        text_adamw,
        budget=900,
        plain=BatchAndRate(jobs.TEXT_BATCH_SIZE, 0.006),
        plain_large=BatchAndRate(32, 0.0085),
        ddp=BatchAndRate(16, 0.0085),
        nodes=2,
        best={"batches_per_step": 2, "scale_for_batch": True},
        best_batch=BatchAndRate(jobs.TEXT_BATCH_SIZE, 0.006),
        probe_samples=128,
        patience=3.0,
    ),
    "conv": LearnJob(
        "convolutional net, 29,066 parameters",
        jobs.conv_job,
        jobs.adam,
        budget=360,
        plain=BatchAndRate(32, 0.004),
        plain_large=BatchAndRate(64, 0.008),
        ddp=BatchAndRate(32, 0.008),
        nodes=2,
        best={"batches_per_step": 2, "scale_for_batch": True},
        best_batch=BatchAndRate(32, 0.004),
        probe_samples=512,
        hint_part=0.6,
    ),
}


class SeedRound:
    """One job and one seed: the plain loop and its target, and when the other contestants reached it."""

    def __init__(self, job: LearnJob, seed: int, budget: float = 1.0) -> None:
        """The plain loop learns now, for this part of its budget."""
        self.budget = max(MARKS, round(job.budget * budget))
        trained = job.job(job.plain.rate)
        samples = self.budget * samples_per_batch(len(trained.data()), job.plain.batch_size)
        task = LearnTask(
            job=trained,
            batch_size=job.plain.batch_size,
            seed=seed,
            probe_samples=job.probe_samples,
            mark_samples=samples / MARKS,
            samples_max=samples,
            seconds_max=PLAIN_SECONDS_MAX,
            held_out=job.held_out,
        )
        self._averaged_samples = job.averaged_marks * task.mark_samples
        curve = learn_plain(task)
        marks = curve.marks
        self.target = target_of(marks)
        found = reached(marks, self.target)
        if found is None:
            raise ValueError("a curve reaches every loss that it has")
        self.plain_batches = self.budget * found.samples / samples
        self.curves: dict[str, Curve] = {PLAIN: curve}
        self.found: dict[str, Reached | None] = {PLAIN: found}
        self._task = replace(
            task,
            mark_seconds=marks[-1].seconds / MARKS,
            samples_max=SAMPLES_FACTOR * samples,
            seconds_max=job.patience_seconds or max(PATIENCE_SECONDS_MIN, job.patience * marks[-1].seconds),
            target=self.target,
            hint=job.hint_part * training_loss_at_target(marks),
        )

    def add(self, row: str, learn: Callable[[LearnTask], Curve]) -> None:
        """Let a contestant learn until the target, or until its patience ends."""
        curve = learn(self._task)
        found = reached(curve.marks, self.target, self._averaged_samples)
        if found is None and curve.ended_by_hint:
            # Its training loss was low by chance.
            curve = learn(replace(self._task, hint=None))
            found = reached(curve.marks, self.target, self._averaged_samples)
        self.curves[row], self.found[row] = curve, found

    def seconds(self, row: str) -> float | None:
        found = self.found.get(row)
        return found.seconds if found is not None else None

    def gave_up(self, row: str) -> bool:
        return row in self.found and self.found[row] is None

    @property
    def ddp_seconds(self) -> float | None:
        """The seconds of DDP, at least: its patience, if it did not reach the target. None: no such row."""
        return self._task.seconds_max if self.gave_up("ddp") else self.seconds("ddp")
