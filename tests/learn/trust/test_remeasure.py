"""Metrics that are measured again: the same bits are right, rounding is, and a lie is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from w5xde import Job
from w5xde.config import Settings
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.trust.remeasure import Remeasurer

ROWS = 16


def measure(net: nn.Module, batch: Any) -> dict[str, Any]:
    return {"accuracy": (batch[0] > 0).float().mean(), "loss": net(batch[0]).square().mean()}


class Setting:
    """A remeasurer, the parameters and batches of a lease, and what is measured in them."""

    def __init__(self, measured: Any = measure) -> None:
        job = Job(
            model=lambda: nn.Linear(1, 1),
            data=lambda: TensorDataset(torch.ones(8, 1)),
            loss=lambda net, batch: net(batch[0]).square().mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            validation=lambda: TensorDataset(
                torch.randn(2 * ROWS, 1, generator=torch.Generator().manual_seed(3))
            ),
            measure=measured,
        )
        prepared = prepare(job, Settings(batch_size=ROWS, canary=False))
        validation = prepared.validation
        assert validation is not None
        self.params = Replica(prepared.learner.snapshot(whole=True))
        self.batches = [(number, ROWS, validation.read(number)) for number in range(2)]
        trainer = prepared.make_trainer()
        trainer.load(self.params.state, whole=True)
        self.rows = [trainer.measure(value, number) for number, _, value in self.batches]
        self._remeasurer = Remeasurer(prepared.make_trainer(), validation.names, "fp32")

    def check(self, rows: list[list[float]]) -> tuple[str, str]:
        return self._remeasurer.check(rows, self.params, self.batches)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ((0.0, 0.0), ""),
        ((0.0, 1e-4), ""),
        ((1 / ROWS, 0.0), ""),  # a sample that lies between two answers
        ((0.0, 1.0), "loss of validation batch 1"),
        ((0.4, 0.0), "accuracy of validation batch 1"),
        ((0.0, float("nan")), "loss of validation batch 1 is nan"),
        ((float("inf"), 0.0), "accuracy of validation batch 1 is inf"),
    ],
)
def test_rounding_is_right_and_a_lie_is_not(change: tuple[float, float], wrong: str) -> None:
    setting = Setting()
    first, second = setting.rows
    found = setting.check([first, [value + by for value, by in zip(second, change, strict=True)]])
    assert found[1] == ""
    assert found[0].startswith(wrong)
    assert bool(found[0]) == bool(wrong)


def test_numbers_that_are_not_finite_can_be_right() -> None:
    setting = Setting(lambda net, batch: {"loss": float("nan"), "worst": float("inf")})
    assert setting.check(setting.rows) == ("", "")


def test_what_comes_out_differently_here_is_not_held_against_a_node() -> None:
    calls = iter(range(1000))
    setting = Setting(lambda net, batch: {"loss": float(next(calls))})
    wrong, unknown = setting.check([[5000.0], [6000.0]])
    assert wrong == ""
    assert "differently each time" in unknown


def test_what_fails_here_is_not_held_against_a_node() -> None:
    calls = iter(range(1000))

    def fails_later(net: nn.Module, batch: Any) -> dict[str, float]:
        # The first batch is tried, and both are measured, before they are measured again.
        if next(calls) > 2:
            raise OSError("not here")
        return {"loss": 1.0}

    setting = Setting(fails_later)
    wrong, unknown = setting.check(setting.rows)
    assert wrong == ""
    assert "not here" in unknown
