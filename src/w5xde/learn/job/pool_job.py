"""The job of a pool: a model and named losses. The user's own loop has the data and the optimizers.

Imports no torch, like `job.py`. Knows nothing of how a pool computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from w5xde.errors import JobError
from w5xde.learn.job.job import Job

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


# The most parts of a call, as many as a step may have batches.
PARTS_MAX = 65536


def _refuse(*_: object) -> NoReturn:
    raise JobError(
        "this is a pool, and its file has the loop that trains",
        code="W5-270",
        why="a pool computes gradients for a loop of your own; it has no data and no optimizer",
        fix="run the file with python; other machines help with  w5xde join TICKET FILE",
    )


@dataclass(frozen=True, kw_only=True)
class PoolJob(Job):
    """What nodes compute for a pool: one of these losses, of a part of a batch."""

    losses: Mapping[str, Callable[[Module, Any], Tensor]]
    data: Callable[[], Any] = field(default=_refuse)
    loss: Callable[[Module, Any], Tensor] = field(default=_refuse)
    optimizer: Callable[[Any], Any] = field(default=_refuse)

    def __post_init__(self) -> None:
        given: Any = self.losses
        if not isinstance(given, Mapping) or not given:
            raise _no_losses(f"losses is {given!r}")
        for name, loss in given.items():
            if not isinstance(name, str) or not 0 < len(name) <= 64:
                raise _no_losses(f"{name!r} is no name for a loss")
            if not callable(loss):
                raise _no_losses(f"losses[{name!r}] is {type(loss).__name__}, not a function")

    def with_loss(self, name: str) -> PoolJob:
        """The same job with this loss as its only one."""
        return replace(self, loss=self.losses[name])


def _no_losses(what: str) -> JobError:
    return JobError(
        what,
        code="W5-270",
        fix='give each loss a name:  w5xde.Pool(model, losses={"loss": lambda model, part: …})',
    )
