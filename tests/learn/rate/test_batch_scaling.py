"""--scale-for-batch: the settings of the optimizer for a larger batch, never changed silently."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, SequentialLR, StepLR

from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import check_equivalence, train_in_pool
from tests.learn.reference import differences, train_plainly
from w5xde.errors import JobError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.rate.batch_scaling import scale_for_batch

LR, BETAS = 0.003, (0.9, 0.999)


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]


def refusal(optimizer: Optimizer, batches: int = 4) -> JobError:
    before = [group["lr"] for group in optimizer.param_groups]
    with pytest.raises(JobError) as caught:
        scale_for_batch(optimizer, batches)
    assert caught.value.code == "W5-233"
    # Nothing is half scaled.
    assert [group["lr"] for group in optimizer.param_groups] == before
    return caught.value


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam_gets_the_root_of_the_batches_and_their_power(kind: type[Adam]) -> None:
    optimizer = kind(weights(), lr=LR, betas=BETAS)
    found = scale_for_batch(optimizer, 4)
    (group,) = optimizer.param_groups
    assert group["lr"] == LR * math.sqrt(4)
    assert group["betas"] == (0.9**4, 0.999**4)
    assert found.text == "learning rate 0.003 × √4 = 0.006, betas (0.9, 0.999)⁴ = (0.6561, 0.996)"
    assert found.facts()["groups"][0]["lr_scaled"] == group["lr"]


def test_sgd_keeps_its_momentum_as_measured() -> None:
    optimizer = SGD(weights(), lr=0.1, momentum=0.9)
    assert scale_for_batch(optimizer, 16).text == "learning rate 0.1 × √16 = 0.4"
    assert optimizer.param_groups[0]["lr"] == 0.1 * math.sqrt(16)
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_each_group_is_scaled_by_its_own_rate() -> None:
    first, second = weights()
    optimizer = SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1)
    found = scale_for_batch(optimizer, 4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 1.0]
    assert found.text == "learning rate 0.1 × √4 = 0.2; learning rate 0.5 × √4 = 1"


def test_one_batch_a_step_needs_no_scaling() -> None:
    optimizer = Adam(weights(), lr=LR, betas=BETAS)
    scale_for_batch(optimizer, 1)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (LR, BETAS)


# --- what cannot be scaled ------------------------------------------------------------------------


class OwnAdam(Adam):
    """An optimizer of the user's: it may do anything with its settings."""


@pytest.mark.parametrize("kind", [RMSprop, OwnAdam])
def test_other_optimizers_are_refused_by_name(kind: type[Optimizer]) -> None:
    assert kind.__name__ in refusal(kind(weights(), lr=0.1)).what  # type: ignore[call-arg]


def test_more_batches_than_were_measured_are_refused_with_the_largest_number() -> None:
    error = refusal(AdamW(weights(), lr=LR), 9)
    assert "at most 8 batches a step with AdamW, not 9" in error.what
    assert "measured to train worse" in error.why
    assert "--batches-per-step 8" in error.fix
    assert "at most 16 batches a step with SGD, not 17" in refusal(SGD(weights(), lr=0.1), 17).what
    scale_for_batch(AdamW(weights(), lr=LR), 8)


def test_a_rate_in_a_tensor_is_refused_and_no_group_is_changed() -> None:
    first, second = weights()
    rate = torch.tensor(0.1)
    optimizer = SGD([{"params": [first], "lr": 0.1}, {"params": [second]}], lr=rate)
    assert "tensors" in refusal(optimizer).what
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert float(rate) == pytest.approx(0.1)


def test_an_optimizer_with_a_schedule_inside_is_refused() -> None:
    optimizer = SGD(weights(), lr=0.1)
    LambdaLR(optimizer, lambda step: 1.0)
    assert "schedule already" in refusal(optimizer).what


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=50),
        lambda optimizer: CyclicLR(optimizer, base_lr=0.1, max_lr=0.2, cycle_momentum=False),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_a_schedule_that_sets_rates_itself_is_refused(schedule: Any) -> None:
    job = make(mlp(), optimizer=lambda params: AdamW(params, lr=LR), scheduler=schedule)
    with pytest.raises(JobError) as caught:
        prepare(job, settings(batches_per_step=4, scale_for_batch=True))
    assert caught.value.code == "W5-233"
    assert "schedule" in caught.value.what


# --- training -------------------------------------------------------------------------------------


def warm_up(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def in_turn(optimizer: Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [warm_up(optimizer), StepLR(optimizer, 3, 0.5)], milestones=[5])


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "Adam": (
        lambda params, k: Adam(params, lr=LR, betas=BETAS),
        lambda params, k: Adam(params, lr=LR * math.sqrt(k), betas=(0.9**k, 0.999**k)),
    ),
    "fused AdamW": (
        lambda params, k: AdamW(params, lr=LR, betas=BETAS, fused=True),
        lambda params, k: AdamW(params, lr=LR * math.sqrt(k), betas=(0.9**k, 0.999**k), fused=True),
    ),
    "SGD": (
        lambda params, k: SGD(params, lr=0.05, momentum=0.9),
        lambda params, k: SGD(params, lr=0.05 * math.sqrt(k), momentum=0.9),
    ),
}


@pytest.mark.parametrize("schedule", [None, warm_up, in_turn], ids=["constant", "warm-up", "in turn"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scaled_run_has_the_bits_of_a_plain_loop_with_the_scaled_optimizer(
    name: str, schedule: Any
) -> None:
    """Two batches a step: a plain loop adds two gradients as the canonical tree does, bit for bit."""
    written, scaled = OPTIMIZERS[name]
    ours = make(mlp(), optimizer=lambda params: written(params, 2), scheduler=schedule)
    theirs = make(mlp(), optimizer=lambda params: scaled(params, 2), scheduler=schedule)
    given = settings(batches_per_step=2, epochs=3)
    run = train_in_pool(ours, settings(batches_per_step=2, epochs=3, scale_for_batch=True), nodes=3, seed=1)
    found = differences(run.module, train_plainly(theirs, given))
    assert set(found.values()) == {0.0}
    assert max(differences(run.module, train_plainly(ours, given)).values()) > 1e-4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_more_batches_a_step_have_the_bits_of_the_scaled_optimizer_whoever_helps(name: str) -> None:
    written, scaled = OPTIMIZERS[name]
    given = settings(batches_per_step=8, epochs=3)
    run = train_in_pool(
        make(mlp(), optimizer=lambda params: written(params, 8)),
        settings(batches_per_step=8, epochs=3, scale_for_batch=True),
        nodes=3,
        seed=1,
    )
    theirs = make(mlp(), optimizer=lambda params: scaled(params, 8))
    # Adam blows up the rounding of gradients near zero.
    assert check_equivalence(theirs, given, within=1e-6 if name == "SGD" else 1e-3).sha256 == run.sha256
