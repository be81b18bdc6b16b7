"""Builds the model, the data and the optimizer of a job, the same in every process.

Errors of user code become JobErrors. Knows nothing of the run: the caller passes the seed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from w5xde.errors import JobError
from w5xde.learn.data.sources import Source
from w5xde.learn.job.job import Job, call
from w5xde.learn.job.job_data import JobData
from w5xde.learn.model.seeding import seed_everything
from w5xde.learn.rounds.columns import ColumnRules, Columns
from w5xde.learn.rounds.hand_over import HandOver
from w5xde.learn.torch_private import avoid_compiler_import
from w5xde.learn.train.trainer import Trainer
from w5xde.messages import Rules
from w5xde.specs.data_settings import BATCH_SAMPLES
from w5xde.specs.planned_run import UNKNOWN, PlannedRun

T = TypeVar("T")


class ModelParameters(list[nn.Parameter]):
    """The argument of `optimizer(params)`: the parameters, and their names for optimizers with groups.

    `module` is the model itself, and `run` how long the run will be.
    """

    def __init__(self, module: nn.Module, run: PlannedRun) -> None:
        super().__init__(module.parameters())
        self.module = module
        self.run = run

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()


def build_columns(job: Job, trainer: Trainer, rules: Rules, run: PlannedRun = UNKNOWN) -> Columns:
    """What computes the columns of rounds on the model of a trainer; ValueError if the rules are unknown."""
    hand_over = HandOver(rules.hand_over, trainer.blueprint.layout)
    return Columns(
        trainer, ColumnRules(hand_over, lambda: build_optimizer(job, trainer.module, run), rules.clip_norm)
    )


def build_model(job: Job, seed: int) -> nn.Module:
    """The module that `model()` returns under this seed, in training mode."""
    seed_everything(seed)
    module = call_for(nn.Module, "torch.nn.Module", "model()", job.model)
    if not module.training:
        # Pretrained models often come in evaluation mode. But layers that model() put in evaluation mode
        # inside a training model (frozen BatchNorm) must stay there.
        module.train()
    return module


def copy_module(job: Job, module: nn.Module, seed: int) -> nn.Module:
    """A second instance of the same model, for trials that may leave state in it."""
    try:
        return copy.deepcopy(module)
    except Exception:
        # torch cannot copy a module that holds results of arithmetic (old weight_norm does).
        return build_model(job, seed)


def build_optimizer(job: Job, module: nn.Module, run: PlannedRun = UNKNOWN) -> Optimizer:
    """The optimizer that `optimizer(params)` returns for this module, in a run of this length."""
    avoid_compiler_import()
    parameters = ModelParameters(module, run)
    optimizer = call_for(Optimizer, "torch.optim.Optimizer", "optimizer()", job.optimizer, parameters)
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


def build_source(job: Job, seed: int, batch_size: int | None, shuffle: bool) -> Source:
    """The source of batches for the data that `data()` returns under this seed.

    Without a batch size, that of its DataLoader or the default.
    """
    data = JobData.of(job, seed)
    return data.open(seed, batch_size or data.parts.batch_size or BATCH_SAMPLES, shuffle=shuffle)


def call_for(kind: type[T], kind_name: str, what: str, function: Callable[..., Any], *arguments: Any) -> T:
    """As `call`; JobError also if the result is not of this kind."""
    return require_kind(kind, kind_name, what, call(what, function, *arguments))


def require_kind(kind: type[T], kind_name: str, what: str, found: Any) -> T:
    """What a function of the user's returned, which must be of this kind."""
    if not isinstance(found, kind):
        raise JobError(
            f"{what} returned a {type(found).__name__}", code="W5-202", fix=f"return a {kind_name}"
        )
    return found
