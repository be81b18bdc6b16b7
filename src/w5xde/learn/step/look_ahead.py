"""Weights that look ahead: about where the parameters will be when a gradient that comes late is applied.

A gradient that is applied t updates after its version is computed on

    w + momentum · (t + 1) · (w - w one update before)        (2t for t + 1, if t is below 1)

The step that a late gradient makes goes on for as long as the momentum carries it, and so does its mistake:
with a momentum of 0.9 a delay of one update makes the largest stable rate 40 times smaller, and these weights
make that 13 times (docs/findings.md). Without momentum nothing is gained, and nothing is done. Keeps the
parameters of one update before, once somebody has asked for weights that look ahead. Does not know how late a
gradient will be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from w5xde.learn.model.layout import FlatModel
from w5xde.learn.model.state_memory import Readers
from w5xde.learn.step.finite import is_finite
from w5xde.messages import TRAINED

# Memory that nobody reads is kept for the next version, up to so many vectors: one may still be sent then.
IDLE_MAX = 2


def momentum_of(optimizer: Optimizer) -> float:
    """The least momentum of the optimizer's groups: SGD's `momentum`, or the first of Adam's betas."""
    return min((_momentum(group) for group in optimizer.param_groups), default=0.0)


def _momentum(group: dict[str, Any]) -> float:
    betas = group.get("betas")
    found = betas[0] if isinstance(betas, (tuple, list)) and betas else group.get("momentum")
    value = float(found) if isinstance(found, (int, float, Tensor)) else 0.0
    return value if 0.0 <= value <= 1.0 else 0.0


class LookAhead:
    """The last movement of the trained parameters of a model."""

    def __init__(self, flat: FlatModel, optimizer: Optimizer, *, can_roll_back: bool) -> None:
        self._flat = flat
        self._optimizer = optimizer
        self._can_roll_back = can_roll_back
        self._trained = [i for i, group in enumerate(flat.blueprint.moving_groups) if group.role == TRAINED]
        self._is_wanted = False
        # The parameters before the last steps, and how many updates these were; and those that were saved
        # before steps of which we have not heard yet.
        self._before: list[Tensor] | None = None
        self._updates = 1
        self._saved: list[Tensor] | None = None
        # Memory that was lent, and its readers.
        self._lent: list[tuple[Tensor, Readers]] = []

    def save(self) -> None:
        """Steps are about to be made: keep the parameters as they are."""
        if not self._is_wanted:
            return
        if not self._can_roll_back:
            # One copy is enough: if these steps fail, nobody asks for the version before them.
            self._saved, self._before = self._saved or self._before, None
        parts = [self._flat.moving.parts[i] for i in self._trained]
        if self._saved is None:
            self._saved = [torch.empty_like(part) for part in parts]
        for saved, part in zip(self._saved, parts, strict=True):
            saved.copy_(part)

    def moved(self, updates: int) -> None:
        """The steps were made; 0 updates: they tell nothing of the next ones."""
        if not updates:
            self._before = None
        elif self._saved is not None:
            self._before, self._saved = self._saved, self._before
            self._updates = updates

    def copy(self, *, whole: bool, ahead: float) -> memoryview | None:
        """A copy of the state whose trained parameters look ahead by so many updates.

        None if that is the state itself: the last movement is not known, the optimizer has no momentum, or
        the result would not be finite.
        """
        if not self._reach(ahead):
            return None
        count = self._flat.byte_count(whole=whole)
        target = torch.zeros(count, dtype=torch.uint8, device=self._flat.state.device)
        return target.cpu().numpy().data if self._write(target, ahead) else None

    def lend(self, ahead: float) -> tuple[memoryview, Callable[[], None]] | None:
        """What `copy` gives of the moving part, and a function to call when it has been read.

        Its memory is used again then: new memory would take longer than all else.
        """
        if not self._reach(ahead):
            return None
        idle = [each for each in self._lent if not each[1].are_there]
        memory, readers = idle[0] if idle else (torch.zeros_like(self._flat.moving.raw), Readers())
        busy = [each for each in self._lent if each[1].are_there]
        self._lent = [*busy, (memory, readers), *idle[1:IDLE_MAX]]
        if not self._write(memory, ahead):
            return None
        readers.begun += 1

        def done() -> None:
            readers.done += 1

        return memory.numpy().data, done

    def _reach(self, ahead: float) -> float:
        """How many of the last movements lie between the state and the weights ahead; 0: none is known."""
        self._is_wanted = True
        if self._before is None:
            return 0.0
        # An answer that is hardly ever late looks hardly ahead.
        return momentum_of(self._optimizer) * (ahead + min(ahead, 1.0)) / self._updates

    def _write(self, target: Tensor, ahead: float) -> bool:
        """Write the weights ahead, whose reach is not 0; False if they are not finite."""
        reach = self._reach(ahead)
        blueprint, parts = self._flat.blueprint, self._flat.moving.parts
        start, stop = blueprint.trained_bytes, len(target)
        target[start:].copy_(self._flat.state[start:stop])
        for i, before in zip(self._trained, self._before or (), strict=True):
            result = blueprint.moving_groups[i].values_in(target)
            # In one pass: before + (1 + reach) · (now - before).
            torch.lerp(before, parts[i], 1.0 + reach, out=result)
            if not is_finite(result):
                return False
        return True
