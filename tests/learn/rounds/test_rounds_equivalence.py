"""Rounds: whichever nodes help, the same bits, and those of a plain program of rounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RAdam, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, SequentialLR, StepLR

from tests.learn import jobs
from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import train_in_pool
from tests.learn.reference import differences
from tests.learn.rounds.pool import RoundsNode, check_rounds, same_for_any_pool, train_rounds
from tests.learn.summing import Complete, Lent
from w5xde.config import Settings
from w5xde.errors import JobError, RemoteProtocolError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.runtime.coordinator.round_parameters import RoundParameters
from w5xde.runtime.coordinator.setup import build_plan, build_reader
from w5xde.tree import Span


def exact(**more: Any) -> Settings:
    """Rounds whose differences travel as they are."""
    usual = {"compress": "none", "epochs": 4, "local_steps": 3, "batches_per_step": 4}
    return settings(mode="rounds", **{**usual, **more})


def test_a_plain_network_is_the_plain_programs_whoever_helps() -> None:
    trained = check_rounds(make(mlp()), exact())
    assert trained.losses[-1] < trained.losses[0]
    assert min(trained.answers[kind] for kind in ("taken", "lost", "late")) > 0


OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "fused adamw": lambda p: AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.003, momentum=0.9, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=0.05),
    "adadelta": lambda p: Adadelta(p, lr=1.0),
    "adamax": lambda p: Adamax(p, lr=0.01),
    "radam": lambda p: RAdam(p, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_every_known_optimizer_is_handed_over(kind: str) -> None:
    check_rounds(make(mlp(), optimizer=OPTIMIZERS[kind]), exact())


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8])
def test_a_round_has_any_number_of_columns(columns: int) -> None:
    check_rounds(make(mlp()), exact(batches_per_step=columns, local_steps="grow"))


@pytest.mark.parametrize(
    ("samples", "batch_size", "columns"), [(13, 4, 2), (17, 4, 4), (3, 8, 4), (29, 1, 7), (33, 8, 4)]
)
def test_short_batches_and_steps_weigh_what_they_hold(samples: int, batch_size: int, columns: int) -> None:
    job = make(mlp(), data=lambda: jobs.points(samples=samples))
    check_rounds(job, exact(batch_size=batch_size, batches_per_step=columns, local_steps="grow"))


@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_the_rate_can_be_set(rate: float) -> None:
    check_rounds(make(mlp(), optimizer=OPTIMIZERS["adamw"]), exact(round_rate=rate))


def test_rounds_grow() -> None:
    trained = check_rounds(make(mlp()), exact(epochs=40, local_steps="grow"))
    # Of 3 whole steps and a short one: at first a round of 2, one of 1 and the short one; from step 150 on
    # one of 3 and the short one.
    assert 80 < len(trained.losses) < 120


def test_dropout_is_drawn_from_the_seed_of_the_batch() -> None:
    check_rounds(make(mlp(lambda: nn.Dropout(0.4))), exact())


def test_batch_norm_runs_on_within_a_column_and_is_averaged_over_columns() -> None:
    trained = check_rounds(make(mlp(lambda: nn.BatchNorm1d(16))), exact())
    assert int(trained.module.get_buffer("1.num_batches_tracked")) == 4 * 13


def test_buffers_of_every_kind() -> None:
    same_for_any_pool(make(jobs.Memories), exact())


def test_gradients_are_clipped_at_every_step() -> None:
    # Torch rounds the norm of each parameter first, and we that of all together.
    check_rounds(make(mlp()), exact(clip_norm=0.05), within=1e-6)


def test_statistics_that_average_all_batches_average_those_of_all_columns() -> None:
    job = make(mlp(lambda: nn.BatchNorm1d(16, momentum=None)))
    trained = check_rounds(job, exact(), within=1e-6)
    assert int(trained.module.get_buffer("1.num_batches_tracked")) == 4 * 13


SCHEDULES = {
    "steps": lambda o: StepLR(o, 3, 0.5),
    "cosine": lambda o: CosineAnnealingLR(o, 12),
    "one cycle, which changes momenta too": lambda o: OneCycleLR(o, 0.05, total_steps=40),
    "two in a row": lambda o: SequentialLR(o, [StepLR(o, 2, 0.5), CosineAnnealingLR(o, 8)], [4]),
}


@pytest.mark.parametrize("optimizer", [lambda p: AdamW(p, lr=0.01), lambda p: SGD(p, lr=0.05, momentum=0.9)])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_go_by_step_number(kind: str, optimizer: Any) -> None:
    check_rounds(make(mlp(), optimizer=optimizer, scheduler=SCHEDULES[kind]), exact())


def test_a_rate_that_is_a_tensor_is_not_changed_by_looking_ahead() -> None:
    def optimizer(params: Any) -> Adam:
        return Adam(params, lr=torch.tensor(0.01), foreach=False)

    prepared = prepare(make(mlp(), optimizer=optimizer, scheduler=SCHEDULES["cosine"]), exact())
    assert prepared.rounds is not None
    first = prepared.rounds.step_rates(0, 3)
    prepared.rounds.step_rates(0, 2)
    assert prepared.rounds.step_rates(0, 3) == first


def test_complex_parameters_are_refused_where_their_state_would_be_lost() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.phase.abs()

    with pytest.raises(JobError, match="rounds cannot hand the state of Adam over") as caught:
        prepare(make(Complex, optimizer=OPTIMIZERS["adam"]), exact())
    assert caught.value.code == "W5-235"
    prepare(make(Complex, optimizer=OPTIMIZERS["momentum"]), exact())


def test_negative_second_moments_and_raw_vectors_are_refused() -> None:
    prepared = prepare(make(mlp(), optimizer=OPTIMIZERS["adam"]), exact(compress="auto"))
    learner = prepared.learner
    vector = learner.vectors.new_vector()
    vector.raw.zero_()
    assert learner.gauge.norm(vector) == 0.0
    vector.parts[-1][0] = -1e-9
    assert learner.gauge.norm(vector) == math.inf
    reader = build_reader(learner, exact(compress="auto"))
    with pytest.raises(RemoteProtocolError, match="not agreed on"):
        reader.read(bytearray(learner.vector_bytes), ["none"], [learner.vector_bytes], 1)


def test_groups_have_rates_of_their_own() -> None:
    def optimizer(params: Any) -> AdamW:
        weights = [p for p in params if p.dim() > 1]
        others = [p for p in params if p.dim() == 1]
        return AdamW([{"params": weights, "lr": 0.01}, {"params": others, "lr": 0.0, "weight_decay": 0.0}])

    check_rounds(make(mlp(), optimizer=optimizer), exact())


def test_frozen_parameters_stay_and_tied_ones_stay_tied() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3))
        model[2].weight = model[1].weight
        model[0].bias.requires_grad_(False)
        return model

    check_rounds(make(tied, optimizer=lambda p: AdamW([q for q in p if q.requires_grad], lr=0.01)), exact())


def test_parameters_that_get_no_gradient_have_no_state() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    check_rounds(make(Unused, optimizer=lambda p: Adam(p, lr=0.01)), exact())


@pytest.mark.parametrize("codec", ["auto", "q4", "bf16", "up: q4 | zstd:1, down: none", "up: none, down: q4"])
def test_codecs_of_both_directions_give_the_same_bits_to_any_pool(codec: str) -> None:
    job = make(mlp(lambda: nn.BatchNorm1d(16)), optimizer=lambda p: AdamW(p, lr=0.01))
    same_for_any_pool(job, exact(compress=codec))


def test_a_round_of_one_column_and_one_step_is_a_plain_step_of_sgd() -> None:
    one = make(mlp(), optimizer=lambda p: SGD(p, lr=0.1))
    rounds = train_rounds(one, exact(batches_per_step=1, local_steps=1, round_rate=1.0), nodes=1, seed=1)
    plain = train_in_pool(one, settings(batches_per_step=1, epochs=4), nodes=1, seed=1)
    assert max(differences(rounds.module, plain.module).values()) < 1e-6


def test_nodes_that_come_back_follow_by_differences_and_new_ones_get_everything() -> None:
    trained = train_rounds(make(mlp()), exact(epochs=8, local_steps=1), nodes=7, seed=3)
    assert trained.answers["Difference"] > 4 * trained.answers["Params"] >= 4 * 7


def test_statistics_that_were_damaged_at_a_node_are_found_by_the_hash() -> None:
    job, rules = make(mlp(), optimizer=lambda p: AdamW(p, lr=0.01)), exact(batches_per_step=1)
    prepared = prepare(job, rules)
    assert prepared.rounds is not None
    parameters = RoundParameters(prepared.learner, prepared.rounds, rules.directions.down)
    node, reader = RoundsNode(job, prepared, parameters), build_reader(prepared.learner, rules)
    plan = build_plan(prepared, rules)

    def make_round() -> None:
        step = plan.next_step()
        assert step is not None
        _, contribution = node.compute(reader, step, 0)
        prepared.sums.add(Lent(0, step, Span(0, 1)), contribution, 0)
        prepared.learner.apply([prepared.sums.total(Complete(step, [(0, 1, "node", 0)]))])

    make_round()
    make_round()
    columns = node.worker.parts.columns
    assert columns is not None
    assert columns._last is not None
    statistics = columns._rules.hand_over._entries[0]
    columns.vectors.entries_in(columns._last, [statistics])[0][0] *= 2
    with pytest.raises(AssertionError, match="dropped=True"):
        make_round()
