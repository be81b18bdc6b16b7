"""Where a loss is: the step, the epoch and the batch that it is computed for, the same on every node.

Code that calls a loss says where it is (`at`); the loss reads it with `current`, which users know as
`w5xde.current()`. Knows no models, and not what a batch holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from w5xde.errors import JobError


@dataclass(frozen=True, slots=True)
class Position:
    """The place of a batch in its run. All numbers count from 0.

    step   the optimizer step that the batch belongs to, as the run was planned
    epoch  its epoch
    batch  its number in the epoch
    steps  how many steps the run has; None if that is not known
    """

    step: int
    epoch: int
    batch: int
    steps: int | None


# Of this thread: the coordinator computes leases again on a thread of its own.
_position: ContextVar[Position | None] = ContextVar("position", default=None)
_reads: ContextVar[int] = ContextVar("reads", default=0)


@contextmanager
def at(position: Position) -> Iterator[None]:
    """Let `current` return this position until the block ends."""
    token = _position.set(position)
    try:
        yield
    finally:
        _position.reset(token)


def current() -> Position:
    """Where the loss is that calls this: step, epoch, batch, and the number of steps.

    The same on every node, and in every computation of the batch.
    """
    _reads.set(_reads.get() + 1)
    position = _position.get()
    if position is None:
        raise JobError(
            "w5xde.current() was called outside of a loss",
            code="W5-244",
            why="only a loss is computed for a step and a batch",
            fix="call it inside loss(model, batch), or in the model's forward pass",
        )
    return position


def reads() -> int:
    """How often `current` was called in this thread, so that others can tell whether a loss did."""
    return _reads.get()
