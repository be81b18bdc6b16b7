"""Local steps are those of a plain loop; the node's parameters stay, and its optimizer keeps its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.learn.jobs import classify, make, mlp, points, settings
from tests.learn.pool import CPU, welcome_of
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.job import BatchFailed
from w5xde.learn.job.node_setup import NodeParts, prepare_node
from w5xde.learn.train.trainer import Task
from w5xde.tree import Span

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: AdamW(params, lr=0.01),
    "fused": lambda params: Adam(params, lr=0.01, betas=(0.0, 0.99), fused=True),
}


def batches(count: int) -> list[Any]:
    inputs, labels = points().tensors
    return [(inputs[4 * i : 4 * i + 4].clone(), labels[4 * i : 4 * i + 4].clone()) for i in range(count)]


def tasks(given: list[Any]) -> list[Task]:
    return [Task(0, Span(0, 1), 1, 4, [(i, 4, batch)]) for i, batch in enumerate(given)]


def node(optimizer: Callable[[Any], Optimizer]) -> NodeParts:
    job = make(mlp(), optimizer=optimizer)
    return prepare_node(job, welcome_of(prepare(job, settings(mode="async", canary=False))), CPU)


def state(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_stretches_are_those_of_a_plain_loop_that_returns_to_the_start(
    optimizer: Callable[[Any], Optimizer],
) -> None:
    parts = node(optimizer)
    plain = node(optimizer).trainer.module
    by_hand = optimizer(list(plain.parameters()))
    start = [parameter.detach().clone() for parameter in plain.parameters()]
    for stretch in range(2):
        with torch.no_grad():
            for parameter, before in zip(plain.parameters(), start, strict=True):
                parameter.copy_(before)
        given = batches(8)[stretch:]
        losses = []
        for batch in given:
            by_hand.zero_grad()
            loss = classify(plain, batch)
            loss.backward()
            by_hand.step()
            losses.append(4 * loss.item())
        found = parts.local_steps.compute(tasks(given))
        moved = state(plain) - torch.cat([each.reshape(-1) for each in start])
        torch.testing.assert_close(found.vector.parts[0], moved, rtol=1e-4, atol=1e-6)
        assert found.loss_sum == pytest.approx(sum(losses), rel=1e-5)
        assert torch.equal(state(parts.trainer.module), torch.cat([each.reshape(-1) for each in start]))


def test_a_stretch_that_fails_leaves_parameters_and_a_new_optimizer() -> None:
    parts = node(OPTIMIZERS["momentum"])
    before = state(parts.trainer.module)
    bad = [*batches(2), (torch.zeros(4, 3), torch.zeros(4))]
    with pytest.raises(BatchFailed):
        parts.local_steps.compute(tasks(bad))
    assert torch.equal(state(parts.trainer.module), before)
    afresh = node(OPTIMIZERS["momentum"]).local_steps.compute(tasks(batches(3))).vector
    assert torch.equal(parts.local_steps.compute(tasks(batches(3))).vector.parts[0], afresh.parts[0])


def test_steps_that_leave_the_numbers_fail() -> None:
    parts = node(lambda params: SGD(params, lr=1e38))
    with pytest.raises(BatchFailed):
        parts.local_steps.compute(tasks(batches(5)))
