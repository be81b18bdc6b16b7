"""The core of a run, built from its job and its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import SGD, Adam, Optimizer

from tests.learn.jobs import make, mlp, settings
from w5xde.control import events as ev
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.runtime.coordinator.setup import build_core

OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], bool]] = {
    "momentum": (lambda params: SGD(params, lr=0.1, momentum=0.9), True),
    "adam": (Adam, True),
    "sgd": (lambda params: SGD(params, lr=0.1), False),
    "adam without momentum": (lambda params: Adam(params, betas=(0.0, 0.99)), False),
}


def in_turn(optimizer: Callable[[Any], Optimizer], **more: Any) -> tuple[float, float]:
    """Two nodes answer in turn: how far the last lease looks ahead, and the rate of the last step."""
    chosen = settings(**{"mode": "async", "batches_per_step": 1, "epochs": 10, "local_steps": "off"} | more)
    core = build_core(prepare(make(mlp(), optimizer=optimizer), chosen), chosen, 1, None)
    core.handle(ev.Joined("a"), 0.0)
    core.handle(ev.Joined("b"), 0.0)
    rates = []
    for number in range(8):
        oldest = min(core.view.leases, key=lambda lease: lease.id)
        effects = core.handle(ev.Answered(oldest.node, [oldest.id], 0.1), 0.1 * number)
        rates += [effect.rate for effect in effects if isinstance(effect, ev.Step)]
    return max(lease.ahead for lease in core.view.leases), rates[-1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_leases_look_ahead_if_the_optimizer_has_momentum_and_else_late_steps_are_smaller(name: str) -> None:
    optimizer, looks_ahead = OPTIMIZERS[name]
    assert in_turn(optimizer) == ((1.0, 1.0) if looks_ahead else (0.0, 1 / 1.5))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_the_delay_correction_nothing_looks_ahead_and_every_step_is_whole(name: str) -> None:
    assert in_turn(OPTIMIZERS[name][0], delay_correction=False) == (0.0, 1.0)
