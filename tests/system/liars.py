"""Lying nodes: a loss that is honest in the coordinator, and in some of the node processes gives a lie.

The lies keep what the node says of its loss honest, so that only the gradient gives them away.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from w5xde.learn.trust.canary import SAMPLES

Loss = Callable[[nn.Module, Any], Tensor]
_OURS = os.getpid()
# What a batch takes while not all nodes are at work.
_UNHURRIED_S = 0.2


def _no_number(net: nn.Module, loss: Tensor) -> Tensor:
    return loss + (next(net.parameters()) * 0).sqrt().sum()


def _endless(net: nn.Module, loss: Tensor) -> Tensor:
    weight = next(net.parameters())
    return loss + (weight - weight.detach()).sqrt().sum()


def _times(factor: float) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda net, loss: factor * loss + (1 - factor) * loss.detach()


class _Replay:
    """The very gradient of the first batch, whatever was asked for."""

    def __init__(self) -> None:
        self._old: tuple[Tensor, ...] | None = None

    def __call__(self, net: nn.Module, loss: Tensor) -> Tensor:
        parameters = list(net.parameters())
        if self._old is None:
            self._old = torch.autograd.grad(loss, parameters)
        pull = sum((p * old).sum() for p, old in zip(parameters, self._old, strict=True))
        return loss.detach() + pull - torch.as_tensor(pull).detach()


def _alternating() -> Callable[[nn.Module, Tensor], Tensor]:
    turns = itertools.cycle([make() for name, make in LIES.items() if name != ALTERNATING])

    def lie(net: nn.Module, loss: Tensor) -> Tensor:
        return next(turns)(net, loss)

    return lie


ALTERNATING = "all in turn"
LIES: dict[str, Callable[[], Callable[[nn.Module, Tensor], Tensor]]] = {
    "not a number": lambda: _no_number,
    "infinite": lambda: _endless,
    "sign flipped": lambda: _times(-1),
    "a thousand times too large": lambda: _times(1000),
    "zeros": lambda: _times(0),
    "against, as large as is believed": lambda: _times(-6),
    "an old one": _Replay,
    ALTERNATING: _alternating,
}
NOT_FINITE = ("not a number", "infinite")


class Lies:
    """A loss that is honest here, and in `liars` of the `nodes` processes a lie.

    If it is not finite they lie only once all are at work, or two liars may be the only ones there: what
    fails on both is taken for bad data. Until then nobody hurries, or the run may be over before the last is
    there. And each lies only after so many `honest_batches`.
    """

    def __init__(
        self, folder: Path, name: str, honest: Loss, *, nodes: int, liars: int, honest_batches: int = 0
    ) -> None:
        self._folder = folder
        self._honest = honest
        self._lie = LIES[name]()
        self._nodes = nodes if name in (*NOT_FINITE, ALTERNATING) else 0
        self._liars = liars
        self._honest_batches = honest_batches
        self._is_liar: bool | None = None
        self._computed = 0

    def is_liar(self, batch: Any) -> bool:
        """Whether this process lies about this batch: not the coordinator, and nobody about the canary."""
        # Who lies computes the canary well, which is smaller than any batch.
        if os.getpid() == _OURS or len(batch[0]) <= SAMPLES:
            return False
        if self._is_liar is None:
            self._is_liar = self._becomes_liar()
            (self._folder / f"here-{os.getpid()}").touch()
        return self._is_liar

    def __call__(self, net: nn.Module, batch: Any) -> Tensor:
        loss = self._honest(net, batch)
        is_liar = self.is_liar(batch)
        if self._is_liar is None:
            return loss
        self._computed += 1
        if not self._are_all_here():
            time.sleep(_UNHURRIED_S)
            return loss
        if not is_liar or self._computed <= self._honest_batches:
            return loss
        return self._lie(net, loss)

    def liars(self) -> set[int]:
        """Which processes lie."""
        return {int(path.read_text()) for path in self._folder.glob("liar-*")}

    def _are_all_here(self) -> bool:
        return len(list(self._folder.glob("here-*"))) >= self._nodes

    def _becomes_liar(self) -> bool:
        for number in range(self._liars):
            try:
                file = os.open(self._folder / f"liar-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                continue
            os.write(file, str(os.getpid()).encode())
            os.close(file)
            return True
        return False
