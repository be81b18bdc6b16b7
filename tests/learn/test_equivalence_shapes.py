"""Equivalence with the plain loop, continued: kinds of model and batch, precision, and where data is read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.learn import jobs
from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import check_equivalence, train_in_pool


def test_a_convolutional_network_with_weights_in_another_memory_format() -> None:
    check_equivalence(make(jobs.convolutions, data=jobs.images), settings())


def test_a_transformer() -> None:
    trained = check_equivalence(
        make(jobs.Attention, data=jobs.tokens, loss=jobs.foretell), settings(epochs=3)
    )
    assert trained.losses[-1] < trained.losses[0]


def test_an_lstm() -> None:
    check_equivalence(make(jobs.Recurrent, data=jobs.tokens, loss=jobs.foretell), settings())


def test_complex_parameters() -> None:
    check_equivalence(make(jobs.Waves), settings())


def test_batches_of_dicts_tuples_strings_and_numbers_arrive_as_they_were() -> None:
    check_equivalence(make(mlp(), data=jobs.Records, loss=jobs.read_records), settings())


def test_a_loss_that_draws_from_python_and_numpy() -> None:
    check_equivalence(make(mlp(), loss=jobs.drop_at_random), settings())


def test_augmentation_draws_from_the_seed_of_the_batch() -> None:
    check_equivalence(make(mlp(), data=jobs.Noisy), settings())


def test_a_loss_of_shape_one_counts_as_a_scalar() -> None:
    job = make(mlp(), loss=lambda model, batch: jobs.classify(model, batch).reshape(1))
    plain = train_in_pool(make(mlp()), settings(), nodes=2, seed=0)
    assert train_in_pool(job, settings(), nodes=2, seed=0).sha256 == plain.sha256


# Sharp although autocast is coarse: gradients come rounded to bfloat16, and a handful of those is added
# in float32 without any further rounding.
def test_bf16_autocast() -> None:
    job = make(mlp(lambda: nn.LayerNorm(16)))
    trained = check_equivalence(job, settings(precision="bf16"))
    assert trained.sha256 != train_in_pool(job, settings(), nodes=1, seed=0).sha256


@pytest.mark.parametrize("data", [jobs.points, jobs.Records, jobs.Noisy])
def test_data_read_at_the_node_gives_the_same_bits_as_data_sent(data: type) -> None:
    loss = jobs.read_records if data is jobs.Records else jobs.classify
    job = make(mlp(lambda: nn.Dropout(0.2)), data=data, loss=loss)
    sent = train_in_pool(job, settings(), nodes=3, seed=5)
    read = train_in_pool(job, settings(data="local"), nodes=2, seed=6)
    assert sent.sha256 == read.sha256


def test_a_model_in_half_precision_trains_the_same_whoever_helps() -> None:
    job = make(lambda: mlp()().bfloat16(), data=lambda: jobs.points(torch.bfloat16))
    hashes = {train_in_pool(job, settings(), nodes=n, seed=n).sha256 for n in (1, 2, 3, 7)}
    assert len(hashes) == 1
