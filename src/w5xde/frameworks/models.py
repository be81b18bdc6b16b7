"""What a job of a framework has of its user: models, of which each process trains one, and types of batches.

Knows no framework.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn

from w5xde.errors import JobError


class HandedOut:
    """Remembers the models that were handed out, and hands out a copy of one that comes again."""

    def __init__(self) -> None:
        self._known: WeakSet[nn.Module] = WeakSet()

    def take(self, model: Any) -> Any:
        """The model itself if it is new, else a copy: a model outside of the function exists only once."""
        if not isinstance(model, nn.Module):
            return model
        if model in self._known:
            return copy.deepcopy(model)
        self._known.add(model)
        return model


def require_function(owner: str, given: Any, form: str) -> None:
    """Refuse an object where every process of a run calls a function; `form` is how to write that."""
    if isinstance(given, nn.Module) or not callable(given):
        raise JobError(
            f"{owner} was given a {type(given).__name__} itself, not a function that makes one",
            code="W5-291",
            why="every process of a run makes its own",
            fix=f"put lambda: in front of it:  {form}",
        )


def on_behalf_of(users: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that belongs to the module of the user's function: batches may have types of that module."""

    @functools.wraps(users, assigned=("__module__",), updated=())
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call
