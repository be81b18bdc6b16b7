"""Contestants that send little: after every exchange all processes have the same model, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from w5xde.bench import jobs
from w5xde.bench.contestants.ddp import run_group
from w5xde.bench.rig.low_talk import MethodStart, method_of
from w5xde.learn.job.build import build_model

PROCESSES, PERIODS = 2, 4
# Of one number in the sum: the order of additions, and for PowerSGD also that of products.
TOLERANCE = 1e-5


def learn(name: str) -> list[list[list[float]]]:
    """The parameters of each process after every step, for some periods of a method."""

    def work(rank: int) -> list[list[float]]:
        model = build_model(jobs.seed, 0)
        method = method_of(name, MethodStart(jobs.seed, model, whole_steps=2))
        batches: list[Any] = jobs.read_batches(jobs.seed, 32)[rank::PROCESSES]
        found = []
        for batch in batches[: PERIODS * method.period]:
            method(batch)
            found.append(parameters_to_vector(model.parameters()).tolist())
        return found

    return run_group(work, PROCESSES, 30.0)


@pytest.mark.parametrize("name", ["ddp", "ddp-bf16", "powersgd-1"])
def test_who_averages_gradients_has_one_model_after_every_step(name):
    one, other = (torch.tensor(found) for found in learn(name))
    assert len(one) == PERIODS
    assert (one - other).abs().max() < TOLERANCE
    assert not one[0].equal(one[-1])


# In its first period post-local SGD sends whole gradients: the second is the first to be looked at.
@pytest.mark.parametrize("name", ["local-3", "diloco-3", "average-3"])
def test_who_exchanges_seldom_has_one_model_after_every_period_and_several_between(name):
    one, other = (torch.tensor(found).reshape(PERIODS, 3, -1) for found in learn(name))
    apart = (one - other).abs().amax(dim=2)
    for period in range(1, PERIODS):
        assert apart[period, 0] > TOLERANCE, f"period {period + 1}: no process learnt by itself"
        assert apart[period, -1] < TOLERANCE, f"period {period + 1}: the models were not brought together"


def test_an_average_is_the_mean_of_what_the_processes_learnt_alone():
    averaged = [torch.tensor(found).reshape(PERIODS, 3, -1) for found in learn("average-3")]
    alone = [torch.tensor(found)[:3] for found in learn("average-1000")]
    # Until the first exchange both are the same; then the averages have the mean.
    assert averaged[0][0, :2].equal(alone[0][:2])
    assert averaged[0][0, -1].allclose((alone[0][-1] + alone[1][-1]) / 2, atol=TOLERANCE)
