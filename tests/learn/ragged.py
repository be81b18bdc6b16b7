"""Ragged text: samples of unlike lengths, padded by the job, whose batches weigh their tokens."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

WORDS, HIDDEN = 13, 8
IGNORED = -100


class Text(NamedTuple):
    """A padded batch; labels of padding, and of what is not to be learned, are ignored."""

    words: Tensor
    labels: Tensor


class Sentences(Dataset[list[int]]):
    """Sentences of 2 to 17 words; of every eighth nothing is to be learned (its first word is 0)."""

    def __init__(self, samples: int = 46) -> None:
        chance = random.Random(5)
        self.sentences = [
            [0 if i % 8 == 0 else chance.randrange(1, WORDS), *chance.choices(range(WORDS), k=1 + i * 7 % 16)]
            for i in range(samples)
        ]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> list[int]:
        return self.sentences[index]


def collate(samples: list[list[int]]) -> Text:
    words = pad_sequence([torch.tensor(sample[:-1]) for sample in samples], batch_first=True)
    labels = [torch.tensor(sample[1:] if sample[0] else [IGNORED] * (len(sample) - 1)) for sample in samples]
    return Text(words, pad_sequence(labels, batch_first=True, padding_value=IGNORED))


def tokens(batch: Text) -> Tensor:
    """What a batch weighs."""
    return (batch.labels != IGNORED).sum()


class Reader(nn.Module):
    """Reads a sentence from left to right."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.read = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(HIDDEN, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.drop(self.read(self.embedding(words))[0]))


def loss(model: nn.Module, batch: Text) -> Tensor:
    """The mean over the tokens of a batch; not a number if there are none."""
    return cross_entropy(model(batch.words).flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)


def loss_sum(model: nn.Module, batch: Any) -> Tensor:
    """The sum over the tokens of a batch, for a plain loop."""
    return cross_entropy(
        model(batch.words).flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
