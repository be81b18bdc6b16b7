"""Builds the model and the data of a job, the same in every process. Errors of user code become JobErrors.

Knows nothing of the run: the caller passes the seed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from w5xde.errors import JobError
from w5xde.learn.data.sources import Source, open_source
from w5xde.learn.job.job import Job, describe
from w5xde.learn.model.seeding import seed_everything

T = TypeVar("T")


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


def build_source(job: Job, seed: int, batch_size: int, shuffle: bool) -> Source:
    """The source of batches for the data set that `data()` returns under this seed."""
    seed_everything(seed)
    return open_source(call("data()", job.data), batch_size=batch_size, seed=seed, shuffle=shuffle)


def call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's, which messages call `what`; whatever it raises becomes a JobError."""
    try:
        return function(*arguments)
    except JobError:
        raise
    except Exception as error:
        raise JobError(f"{what} failed: {describe(error)}", code="W5-202") from error


def call_for(kind: type[T], kind_name: str, what: str, function: Callable[..., Any], *arguments: Any) -> T:
    """As `call`; JobError also if the result is not of this kind."""
    found = call(what, function, *arguments)
    if not isinstance(found, kind):
        raise JobError(
            f"{what} returned a {type(found).__name__}", code="W5-202", fix=f"return a {kind_name}"
        )
    return found
