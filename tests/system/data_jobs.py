"""Jobs with data as people have it: DataLoaders, ragged text, samplers, weights, named batches."""

from __future__ import annotations

import os
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

import w5xde
from tests.learn import ragged

SAMPLES = 60


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


# --- ragged text, weighted by its tokens, in batches by length ----------------------------------------


def by_length(dataset: Any, epoch: int, seed: int) -> list[list[int]]:
    """Sentences of about one length together, at most 40 words a batch."""
    chance = random.Random(seed)
    batches: list[list[int]] = [[]]
    for i in sorted(range(len(dataset)), key=lambda i: (len(dataset[i]), chance.random())):
        if batches[-1] and len(dataset[i]) * (len(batches[-1]) + 1) > 40:
            batches.append([])
        batches[-1].append(i)
    chance.shuffle(batches)
    return batches


text = w5xde.Job(
    model=ragged.Reader,
    data=lambda: DataLoader(ragged.Sentences(), batch_size=4, shuffle=True, collate_fn=ragged.collate),
    loss=ragged.loss,
    optimizer=optimizer,
    weight=ragged.tokens,
)
bucketed = w5xde.Job(
    model=ragged.Reader,
    data=ragged.Sentences,
    loss=ragged.loss,
    optimizer=optimizer,
    collate=ragged.collate,
    sampler=by_length,
    weight=ragged.tokens,
)


# --- named samples, drawn by weight -------------------------------------------------------------------


class Sample(NamedTuple):
    numbers: Tensor
    label: Tensor


class Samples(Dataset[Sample]):
    """Samples that are the same whenever they are read."""

    def __init__(self) -> None:
        self._numbers = torch.randn(SAMPLES, 300, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        numbers = self._numbers[index]
        return Sample(numbers, (numbers.sum() > 0).long())


def classify(model: nn.Module, batch: Sample) -> Tensor:
    return cross_entropy(model(batch.numbers), batch.label)


def drawing() -> DataLoader[Any]:
    # Another order, for a run that is resumed by mistake with another sampler.
    weights = torch.arange(1.0, 1.0 + SAMPLES).flip([0] if os.environ.get("TEST_OTHER_SAMPLER") else [])
    sampler = WeightedRandomSampler(weights.tolist(), 70)
    return DataLoader(Samples(), batch_size=4, sampler=sampler, drop_last=True, num_workers=1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))


drawn = w5xde.Job(model=network, data=drawing, loss=classify, optimizer=optimizer)


class FromGlobals(Sampler[int]):
    """Draws from torch's global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES).tolist())


globally = w5xde.Job(
    model=network,
    data=Samples,
    loss=classify,
    optimizer=optimizer,
    sampler=FromGlobals(),
    weight=lambda batch: 1,
)
