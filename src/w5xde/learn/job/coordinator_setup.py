"""From a job to something the coordinator can train, or a sentence that says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from w5xde.config import Settings
from w5xde.errors import JobError
from w5xde.learn.data.sources import MapSource, Source
from w5xde.learn.job.build import another, build_model, build_source, call
from w5xde.learn.job.first_batch import Trial, refuse_unsavable, try_first_batch
from w5xde.learn.job.job import Job, describe
from w5xde.learn.model import layout as layouts
from w5xde.learn.model.digest import same_bits
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.model.seeding import as_before
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.robust_mean import RobustSums
from w5xde.learn.step.sums import StepSums, TreeSums
from w5xde.learn.torch_private import avoid_compiler_import
from w5xde.learn.train.trainer import Trainer
from w5xde.learn.trust.canary import ExpectedCanary, NoCanary
from w5xde.messages import STILL, TRAINED, Rules


class ModelParameters(list[nn.Parameter]):
    """What `optimizer(params)` gets: the parameters, and their names for those who make groups."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters())
        self._module = module

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._module.named_parameters()


@dataclass(slots=True)
class Prepared:
    """Everything the coordinator needs of a job."""

    learner: Learner
    source: Source
    rules: Rules
    evaluate: Callable[[nn.Module], dict[str, float]] | None
    # The model once more, for those who need one of their own.
    copy_model: Callable[[], nn.Module]
    # One who computes what nodes compute, with a model of its own.
    make_trainer: Callable[[], Trainer]
    # Whether the loss draws from torch's generator: other kinds of devices draw other numbers.
    draws_torch: bool
    # How long the first batch took to read, which decides where batches are read; and to compute.
    read_seconds: float
    batch_seconds: float
    # The norm of the first batch's gradient on the initial weights.
    own_norm: float
    # What nodes compute before they are lent anything; or why there is no such thing, if that is news.
    canary: ExpectedCanary | None
    canary_trouble: str
    # What stands for the sum of a step's gradients, if it is not their sum.
    sums: StepSums


def prepare(job: Job, settings: Settings) -> Prepared:
    """Build model, data and optimizer and try the first batch."""
    module = build_model(job, settings.seed)
    source = build_source(job, settings.seed, settings.batch_size, settings.shuffle)
    if settings.data == "local" and not isinstance(source, MapSource):
        raise JobError(
            "--data local needs a map-style data set, and data() returned an iterable one",
            code="W5-204",
            fix="use --data stream, or return a data set with __len__ and __getitem__",
        )
    # What no batch could make right (lazy, sparse, nothing to train) is told before the first one runs.
    refuse_unsavable(layouts.describe(module, set()))
    trial = try_first_batch(job, another(job, module, settings.seed), source, settings)
    layout = layouts.describe(module, layouts.moving_buffers(module, trial.changed))
    rules = _rules(settings, source, trial)
    canary, trouble = None, ""
    if settings.canary:
        # Before there is anything else of the model's size.
        copy = FlatModel(another(job, module, settings.seed), layout)
        canary, trouble = _expect(job, copy, rules, source, trial)
        del copy
    flat = FlatModel(module, layout)
    avoid_compiler_import()
    optimizer = _build_optimizer(job, module)
    scheduler = _build_scheduler(job, optimizer)

    def copy_model() -> nn.Module:
        return another(job, module, settings.seed)

    def make_trainer() -> Trainer:
        cpu = torch.device("cpu")
        return Trainer(job, FlatModel(copy_model(), flat.blueprint.layout, cpu), rules, cpu)

    learner = Learner(flat, optimizer, scheduler, settings.clip_norm)
    rule = settings.robust_rule
    return Prepared(
        learner=learner,
        source=source,
        rules=rules,
        evaluate=_build_evaluate(job, copy_model),
        copy_model=copy_model,
        make_trainer=make_trainer,
        draws_torch=trial.draws_torch,
        read_seconds=trial.read_seconds,
        batch_seconds=trial.batch_seconds,
        own_norm=trial.gradient_norm,
        canary=canary,
        canary_trouble=trouble,
        sums=RobustSums(flat.blueprint, learner.gauge, rule)
        if rule is not None
        else TreeSums(flat.blueprint, learner.gauge),
    )


def _rules(settings: Settings, source: Source, trial: Trial) -> Rules:
    return Rules(
        mode=settings.mode,
        seed=settings.seed,
        precision=settings.precision,
        threads=settings.threads,
        data=settings.data,
        compress=settings.directions.up,
        recording=settings.recording,
        seeds_python=trial.draws_python,
        seeds_numpy=trial.draws_numpy,
        data_samples=source.samples or 0,
        data_digest=source.fingerprint()
        if settings.data == "local" and isinstance(source, MapSource)
        else "",
    )


def _expect(
    job: Job, flat: FlatModel, rules: Rules, source: Source, trial: Trial
) -> tuple[ExpectedCanary | None, str]:
    """The canary, computed on a model that is of no use afterwards; or why this job has none."""
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
    """Buffers that never change are what model() makes of them, until a node is sent ours."""
    buffers = dict(other.named_buffers())
    for entry, ours in zip(flat.blueprint.layout.entries, flat.tensors, strict=True):
        if entry.role == STILL and not same_bits(ours, buffers[entry.name]):
            raise NoCanary(f"model() makes buffer {entry.name} another one each time")


def _build_optimizer(job: Job, module: nn.Module) -> Optimizer:
    optimizer = call("optimizer()", job.optimizer, ModelParameters(module))
    if not isinstance(optimizer, Optimizer):
        raise JobError(
            f"optimizer() returned a {type(optimizer).__name__}",
            code="W5-202",
            fix="return a torch.optim.Optimizer",
        )
    if isinstance(optimizer, (LBFGS, SparseAdam)):
        raise JobError(
            f"{type(optimizer).__name__} cannot be used here",
            code="W5-227",
            why="it needs to evaluate the loss again, or sparse gradients, inside its step",
            fix="use an optimizer whose step() takes the gradients as they are (SGD, Adam, AdamW, …)",
        )
    own = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        if any(id(parameter) not in own for parameter in group["params"]):
            raise JobError(
                "the optimizer holds parameters that are not the model's",
                code="W5-227",
                fix="build it from the parameters it is given:  optimizer=lambda params: SGD(params, lr=…)",
            )
    return optimizer


def _build_scheduler(job: Job, optimizer: Optimizer) -> Any:
    if job.scheduler is None:
        return None
    scheduler = call("scheduler()", job.scheduler, optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise JobError(
            "ReduceLROnPlateau cannot be used here: it wants a metric at each step",
            code="W5-228",
            fix="use a schedule over steps, for example CosineAnnealingLR or OneCycleLR",
        )
    if not isinstance(scheduler, LRScheduler):
        raise JobError(
            f"scheduler() returned a {type(scheduler).__name__}",
            code="W5-202",
            fix="return a torch.optim.lr_scheduler.LRScheduler",
        )
    return scheduler


def _build_evaluate(
    job: Job, another: Callable[[], nn.Module]
) -> Callable[[nn.Module], dict[str, float]] | None:
    """The evaluation, made to return a dict of numbers whatever the user's returns."""
    function = job.evaluate
    if function is None:
        return None

    def evaluate(trained: nn.Module) -> dict[str, float]:
        trained.eval()
        with torch.no_grad():
            found = function(trained)
        if not isinstance(found, dict):
            found = {"score": found}
        return {str(key): float(value) for key, value in found.items()}

    # Tried at once on a copy: an evaluation that fails after an hour of training helps nobody.
    state = torch.get_rng_state()
    try:
        evaluate(another())
    except Exception as error:
        raise JobError(
            f"evaluate() failed on the untrained model: {describe(error)}",
            code="W5-229",
            fix="evaluate(model) must return a number or a dict of numbers",
        ) from error
    finally:
        torch.set_rng_state(state)
    return evaluate
