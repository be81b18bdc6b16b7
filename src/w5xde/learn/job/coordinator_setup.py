"""Sets a job up for training on the coordinator, or refuses it with a JobError that says why.

Knows nothing of nodes, sockets or threads.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from w5xde.config import Settings
from w5xde.errors import JobError, UsageError
from w5xde.learn.data.samples import SampleFormat
from w5xde.learn.data.sources import MapSource, Source
from w5xde.learn.job.build import (
    build_columns,
    build_model,
    build_optimizer,
    copy_module,
    require_kind,
)
from w5xde.learn.job.cacheable import sample_format
from w5xde.learn.job.code.offer import JobOffer
from w5xde.learn.job.first_batch import Trial, refuse_unsavable, try_first_batch
from w5xde.learn.job.job import Job, call, describe
from w5xde.learn.job.job_data import JobData, settle
from w5xde.learn.job.weight_trial import try_weight
from w5xde.learn.model import layout as layouts
from w5xde.learn.model.digest import same_bits
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.model.route import VectorRoute
from w5xde.learn.model.seeding import as_before
from w5xde.learn.model.state_memory import StatePlace
from w5xde.learn.rate.batch_scaling import BatchScaling, require_kept, scale_for_batch
from w5xde.learn.rate.plateau import choose_metric, is_stepped_by_metric
from w5xde.learn.rate.rates import require_rates
from w5xde.learn.rounds.columns import Columns
from w5xde.learn.rounds.hand_over import HandOver, choose_hand_over, usual_rate
from w5xde.learn.rounds.rounds import Rounds
from w5xde.learn.step import flat_steps
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.robust_mean import RobustSums
from w5xde.learn.step.sums import StepSums, TreeSums
from w5xde.learn.train.measuring import metrics_of
from w5xde.learn.train.trainer import Trainer
from w5xde.learn.train.validation_set import ValidationSet, build_validation
from w5xde.learn.trust.canary import ExpectedCanary, NoCanary
from w5xde.messages import STILL, TRAINED, Rules
from w5xde.specs.planned_run import PlannedRun
from w5xde.specs.round_settings import ROUNDS


@dataclass(slots=True)
class Prepared:
    """Everything that the coordinator needs of a job."""

    learner: Learner
    source: Source
    # As they are used: with what the job's DataLoader says, and what the defaults are.
    settings: Settings
    rules: Rules
    evaluate: Callable[[nn.Module], dict[str, float]] | None
    # The names of the metrics that an evaluation returns; and that which steps the schedule, if one does.
    metrics: list[str]
    plateau_metric: str
    # Makes another instance of the model.
    copy_model: Callable[[], nn.Module]
    # Makes a trainer that computes as a node does, with another instance of the model.
    make_trainer: Callable[[], Trainer]
    # In rounds mode: makes what computes columns as a node does.
    make_columns: Callable[[], Columns]
    # Whether the loss draws from torch's generator, which gives other numbers on other kinds of devices.
    draws_torch: bool
    # Seconds to read the first batch, which decide where batches are read, and to compute it.
    read_seconds: float
    batch_seconds: float
    # The norm of the first batch's gradient on the initial weights.
    own_norm: float
    # How far an optimizer step with that gradient moves the parameters; 0 if unknown, and in sync mode.
    own_step_norm: float
    # The batch that a node computes before it gets a lease; or why there is none, if the user must know.
    canary: ExpectedCanary | None
    canary_trouble: str
    # Puts the updates of a step together: the sum, or with --robust the robust mean.
    sums: StepSums
    # The form of the samples that nodes keep; None: every batch is sent whole.
    samples: SampleFormat | None = None
    # The validation set that nodes measure; None: the coordinator evaluates, or nobody does.
    validation: ValidationSet | None = None
    # What --scale-for-batch changed in the optimizer.
    scaling: BatchScaling | None = None
    # In rounds mode: the replica of the nodes, which the learner moves on.
    rounds: Rounds | None = None
    # What the user should know about the data.
    notes: Sequence[str] = ()
    # What nodes that join are told of the job.
    offer: JobOffer = field(default_factory=JobOffer)

    @property
    def settled(self) -> dict[str, Any]:
        """Settings whose defaults the job decides, as they are now: a later version may decide otherwise."""
        if self.rounds is None:
            return {}
        codecs = f"up: {self.rules.compress}, down: {self.rounds.codec}"
        return {"round_rate": self.rounds.rate, "compress": codecs}


def prepare(job: Job, settings: Settings, place_state: StatePlace = lambda vector, whole: None) -> Prepared:
    """Build model, data and optimizer, and try the first batch.

    `place_state` may give memory for the state of the model, by the bytes of a vector and of the state.
    """
    module = build_model(job, settings.seed)
    data = settle(JobData.of(job, settings.seed), settings)
    source, settings = data.source, data.settings
    if settings.data == "local" and not isinstance(source, MapSource):
        raise JobError(
            "--data local needs a map-style data set, and data() returned an iterable one",
            code="W5-204",
            fix="use --data stream, or return a data set with __len__ and __getitem__",
        )
    # Refuse what no batch can make right (lazy, sparse, nothing to train) before the first batch runs.
    refuse_unsavable(layouts.describe(module, set()))
    tried = copy_module(job, module, settings.seed)
    run = _planned_run(source, settings)
    trial = try_first_batch(job, tried, source, settings, run.steps)
    own_step_norm, stepped = 0.0, None
    if settings.mode != "sync":
        own_step_norm, stepped = _first_step(job, tried, run)
    hand_over = choose_hand_over(build_optimizer(job, tried, run), stepped) if settings.mode == ROUNDS else ""
    del tried, stepped
    layout = layouts.describe(module, layouts.moving_buffers(module, trial.changed))
    samples = sample_format(source, settings)
    rules = _rules(settings, source, trial, samples, hand_over, run.steps)
    rules = msgspec.structs.replace(rules, weight_unit=try_weight(job, source, settings.mode))
    validation = _build_validation(job, module, source, settings)
    if validation is not None:
        rules = msgspec.structs.replace(rules, **_validation_rules(validation, rules))
    canary, trouble = None, ""
    if settings.canary:
        # First, while nothing else of the size of the model is in memory.
        copy = FlatModel(copy_module(job, module, settings.seed), layout)
        canary, trouble = _expect(job, copy, rules, source, trial)
        is_large = VectorRoute(copy.blueprint.moving_bytes).is_large
        del copy
        if is_large:
            # Its parts refer to each other: without this its memory would stay for a long time.
            gc.collect()
    flat = FlatModel(module, layout, place=place_state)
    optimizer = build_optimizer(job, module, run)
    scaling = scale_for_batch(optimizer, settings.step_batches) if settings.scale_for_batch else None
    if settings.mode == "async" and settings.delay_correction:
        require_rates(optimizer)
    scheduler = _build_scheduler(job, optimizer)
    if scaling is not None:
        require_kept(optimizer, scaling)

    def copy_model() -> nn.Module:
        return copy_module(job, module, settings.seed)

    evaluate, metrics = _build_evaluate(job, copy_model, validation)
    plateau_metric = choose_metric(scheduler, metrics, settings)

    def make_trainer() -> Trainer:
        cpu = torch.device("cpu")
        return Trainer(job, FlatModel(copy_model(), flat.blueprint.layout, cpu), rules, cpu)

    def make_columns() -> Columns:
        return build_columns(job, make_trainer(), rules, run)

    rounds = _build_rounds(settings, source, flat, optimizer, scheduler, hand_over)
    learner = Learner(flat, optimizer, scheduler, settings.clip_norm, rounds)
    rule = settings.robust_rule
    return Prepared(
        learner=learner,
        source=source,
        settings=settings,
        rules=rules,
        evaluate=evaluate,
        metrics=metrics,
        plateau_metric=plateau_metric,
        validation=validation,
        copy_model=copy_model,
        make_trainer=make_trainer,
        make_columns=make_columns,
        draws_torch=trial.draws_torch,
        read_seconds=trial.read_seconds,
        batch_seconds=trial.batch_seconds,
        own_norm=trial.gradient_norm,
        own_step_norm=own_step_norm,
        canary=canary,
        canary_trouble=trouble,
        sums=RobustSums(learner.vectors, learner.gauge, rule)
        if rule is not None
        else TreeSums(learner.vectors, learner.gauge, learner.averages),
        samples=samples,
        scaling=scaling,
        rounds=rounds,
        notes=data.notes,
    )


def _build_validation(
    job: Job, module: nn.Module, source: Source, settings: Settings
) -> ValidationSet | None:
    if job.validation is None:
        return None
    return build_validation(job, copy_module(job, module, settings.seed), source.recipe, settings)


def _validation_rules(validation: ValidationSet, rules: Rules) -> dict[str, Any]:
    """What nodes are told of the validation set, and if they read their own: by what they know it."""
    found: dict[str, Any] = {"metrics": validation.names}
    if rules.data == "local":
        source = validation.source
        with as_before():
            found |= {"validation_samples": source.samples, "validation_digest": source.fingerprint()}
    return found


def _planned_run(source: Source, settings: Settings) -> PlannedRun:
    return PlannedRun.of(
        samples=source.epoch_samples,
        batch_size=source.batch_size,
        step_batches=settings.step_batches,
        epoch_limit=settings.epoch_limit,
        step_limit=settings.steps,
    )


def _build_rounds(
    settings: Settings, source: Source, flat: FlatModel, optimizer: Optimizer, scheduler: Any, hand_over: str
) -> Rounds | None:
    """The replica of the nodes, in rounds mode."""
    if settings.mode != ROUNDS:
        return None
    _require_rounds_fit(settings, source)
    rate = settings.round_rate or usual_rate(hand_over)
    how = HandOver(hand_over, flat.blueprint.layout)
    # What a metric steps does not change within a round.
    schedule = None if is_stepped_by_metric(scheduler) else scheduler
    return Rounds(flat, optimizer, schedule, how, settings.directions.down, rate)


def _require_rounds_fit(settings: Settings, source: Source) -> None:
    """Refuse rounds of a constant length that no epoch, or not the run, has room for."""
    lengths = settings.round_lengths
    if lengths is None or lengths.growth:
        return
    if settings.steps is not None and lengths.most > settings.steps:
        raise _too_long(lengths.most, f"the run has {settings.steps} steps")
    if source.epoch_samples is not None:
        batches = -(-source.epoch_samples // source.batch_size)
        steps = max(1, batches // settings.step_batches)
        if lengths.most > steps:
            raise _too_long(
                lengths.most,
                f"an epoch has {steps} whole {'step' if steps == 1 else 'steps'}"
                f" ({batches} batches, {settings.step_batches} a step)",
            )


def _too_long(steps: int, why: str) -> UsageError:
    return UsageError(
        f"rounds of {steps} steps do not fit: {why}",
        code="W5-216",
        why="a round ends with its epoch and with the run, so that no round would ever be as long",
        fix="use a smaller --local-steps, or leave it out: rounds then grow as far as there is room",
    )


def _rules(
    settings: Settings,
    source: Source,
    trial: Trial,
    samples: SampleFormat | None,
    hand_over: str,
    steps: int | None,
) -> Rules:
    is_named = isinstance(source, MapSource) and (settings.data == "local" or samples is not None)
    return Rules(
        mode=settings.mode,
        seed=settings.seed,
        precision=settings.precision,
        threads=settings.threads,
        data="local" if settings.data == "local" else "cached" if samples is not None else "stream",
        compress=settings.directions.up,
        recording=settings.recording,
        seeds_python=trial.draws_python,
        seeds_numpy=trial.draws_numpy,
        data_samples=source.samples or 0,
        data_digest=source.fingerprint() if is_named and isinstance(source, MapSource) else "",
        sample_bytes=samples.sample_bytes if samples is not None else 0,
        hand_over=hand_over,
        clip_norm=settings.clip_norm or 0.0 if settings.mode == ROUNDS else 0.0,
        steps=steps,
    )


def _expect(
    job: Job, flat: FlatModel, rules: Rules, source: Source, trial: Trial
) -> tuple[ExpectedCanary | None, str]:
    """Compute the canary on a model that cannot be used afterwards; or why this job has none."""
    trainer = Trainer(job, flat, rules, torch.device("cpu"))
    dtypes = {entry.dtype for entry in flat.blueprint.layout.entries if entry.role == TRAINED}
    is_coarse = rules.precision == "bf16" or not dtypes.isdisjoint({"bfloat16", "float16"})
    try:
        if any(entry.role == STILL for entry in flat.blueprint.layout.entries):
            with as_before():
                _require_same_buffers(flat, build_model(job, rules.seed))
        return ExpectedCanary(trainer, flat, source, draws=trial.draws_torch, is_coarse=is_coarse), ""
    except NoCanary as error:
        return None, str(error)


def _require_same_buffers(flat: FlatModel, other: nn.Module) -> None:
    """Require that model() creates the same constant buffers each time: the canary needs them."""
    buffers = dict(other.named_buffers())
    for entry, ours in zip(flat.blueprint.layout.entries, flat.tensors, strict=True):
        if entry.role == STILL and not same_bits(ours, buffers[entry.name]):
            raise NoCanary(f"model() makes buffer {entry.name} another one each time")


def _first_step(job: Job, module: nn.Module, run: PlannedRun) -> tuple[float, Optimizer | None]:
    """How far an optimizer step moves the parameters of a model that has gradients, and that optimizer.

    0 and None if the step fails.
    """
    before = [parameter.detach().clone() for parameter in module.parameters()]
    try:
        optimizer = build_optimizer(job, module, run)
        flat_steps.step(optimizer)
    except Exception:
        return 0.0, None  # the first step in earnest will say why
    with torch.no_grad():
        moved = [now - old for now, old in zip(module.parameters(), before, strict=True)]
        return math.hypot(*(float(torch.linalg.vector_norm(each)) for each in moved)), optimizer


def _build_scheduler(job: Job, optimizer: Optimizer) -> LRScheduler | None:
    if job.scheduler is None:
        return None
    scheduler = call("scheduler()", job.scheduler, optimizer)
    if scheduler is None:
        return None
    return require_kind(LRScheduler, "torch.optim.lr_scheduler.LRScheduler", "scheduler()", scheduler)


def _build_evaluate(
    job: Job, copy_model: Callable[[], nn.Module], validation: ValidationSet | None
) -> tuple[Callable[[nn.Module], dict[str, float]] | None, list[str]]:
    """The evaluation of the job, which here always returns a dict of numbers, and their names.

    None if the job has none.
    """
    function = job.evaluate
    if validation is not None:
        return validation.evaluate, validation.names
    if function is None:
        return None, []

    def evaluate(trained: nn.Module) -> dict[str, float]:
        trained.eval()
        with torch.no_grad():
            return metrics_of(function(trained))

    # Try it now on a copy, so that it does not fail for the first time after an hour of training.
    try:
        with as_before():
            names = list(evaluate(copy_model()))
    except Exception as error:
        raise JobError(
            f"evaluate() failed on the untrained model: {describe(error)}",
            code="W5-229",
            fix="evaluate(model) must return a number or a dict of numbers",
        ) from error
    return evaluate, names
