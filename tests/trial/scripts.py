"""Scripts of many kinds, each twice: as the plain loop that somebody has, and as the job that it becomes.

The plain loops are ordinary PyTorch. They take batches of 12; the runs share each of these among nodes, as
four batches of 3. That is the same step, but for BatchNorm, which would normalise other batches: the loops of
the ResNet have batches of 3, and one of them accumulates the gradients of four.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import w5xde
from tests.frameworks import tiny_gpt2
from tests.learn.jobs import classify, foretell, images, points, tokens
from tests.learn.test_equivalence_data import seeded

SEED, EPOCHS = 0, 3
# One batch of a plain loop, shared among nodes.
SHARED = {"batch_size": 3, "batches_per_step": 4, "epochs": EPOCHS, "seed": SEED}


class Script(NamedTuple):
    """What somebody has, and what becomes of it."""

    before: Callable[[], nn.Module]
    after: Callable[[], w5xde.Job]
    flags: dict[str, int] = SHARED
    in_processes: bool = False
    # A pattern of names of tensors that differ from the loop's, for a reason that is told beside it.
    differ: str = ""


# --- a ResNet with BatchNorm ----------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(wider)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(wider)
        self.around = nn.Sequential(
            nn.Conv2d(channels, wider, 1, stride=2, bias=False), nn.BatchNorm2d(wider)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        inner = relu(self.norm(self.first(pictures)))
        return relu(self.second_norm(self.second(inner)) + self.around(pictures))


def resnet() -> nn.Module:
    return nn.Sequential(Block(1, 8), Block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))


def resnet_before() -> nn.Module:
    torch.manual_seed(SEED)
    model = resnet()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for _ in range(EPOCHS):
        for batch in DataLoader(images(), batch_size=3):
            classify(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def accumulating_before() -> nn.Module:
    torch.manual_seed(SEED)
    model = resnet()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batches = list(DataLoader(images(), batch_size=3))
    for _ in range(EPOCHS):
        for first in range(0, len(batches), 4):
            step = batches[first : first + 4]
            samples = sum(len(labels) for _, labels in step)
            for batch in step:
                (classify(model, batch) * len(batch[1]) / samples).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def resnet_after() -> w5xde.Job:
    return w5xde.Job(
        model=resnet,
        data=lambda: DataLoader(images(), batch_size=3),
        loss=classify,
        optimizer=lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    )


# --- GPT-2 from transformers, over texts of unlike lengths ----------------------------------------


def next_token(model: nn.Module, batch: Any) -> Tensor:
    """The mean over all tokens of a batch that are to be predicted."""
    loss: Tensor = model(**batch).loss
    return loss


def predicted(batch: Any) -> Tensor:
    """The number of these tokens: the first of a text has none before it."""
    return (batch["labels"][:, 1:] != tiny_gpt2.IGNORED).sum()


def gpt2_before() -> nn.Module:
    torch.manual_seed(SEED)
    model = tiny_gpt2.small()
    optimizer = AdamW(model.parameters(), lr=0.01, eps=1e-5)
    for _ in range(EPOCHS):
        for batch in DataLoader(tiny_gpt2.Texts(), batch_size=12, collate_fn=tiny_gpt2.pad):
            next_token(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def gpt2_after() -> w5xde.Job:
    return w5xde.Job(
        model=tiny_gpt2.small,
        data=tiny_gpt2.Texts,
        loss=next_token,
        optimizer=lambda params: AdamW(params, lr=0.01, eps=1e-5),
        collate=tiny_gpt2.pad,
        weight=predicted,
        settings={"shuffle": False},
    )


# --- LoRA: a frozen base, and small matrices beside it --------------------------------------------


class Adapted(nn.Module):
    """A linear layer that stays as it is, and an update of low rank that is trained."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.base(numbers) + numbers @ self.down.T @ self.up.T


def lora() -> nn.Module:
    return nn.Sequential(Adapted(nn.Linear(6, 32)), nn.GELU(), Adapted(nn.Linear(32, 3)))


def lora_before() -> nn.Module:
    torch.manual_seed(SEED)
    model = lora()
    optimizer = SGD([each for each in model.parameters() if each.requires_grad], lr=0.5, weight_decay=0.01)
    for _ in range(EPOCHS):
        for batch in DataLoader(points(), batch_size=12):
            classify(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def lora_after() -> w5xde.Job:
    return w5xde.Job(
        model=lora,
        data=lambda: DataLoader(points(), batch_size=12),
        loss=classify,
        optimizer=lambda params: SGD(
            [each for each in params if each.requires_grad], lr=0.5, weight_decay=0.01
        ),
    )


# --- a stream -------------------------------------------------------------------------------------


class Drawn(IterableDataset[Any]):
    """Samples that come one after the other, and have no numbers."""

    def __iter__(self) -> Iterator[Any]:
        chance = random.Random(4)
        for _ in range(41):
            numbers = torch.tensor([chance.gauss(0, 1) for _ in range(6)])
            yield numbers, (numbers.sum() > 0).long()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def stream_before() -> nn.Module:
    torch.manual_seed(SEED)
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for batch in DataLoader(Drawn(), batch_size=12):
            classify(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def stream_after() -> w5xde.Job:
    return w5xde.Job(
        model=network,
        data=lambda: DataLoader(Drawn(), batch_size=12),
        loss=classify,
        optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9),
    )


# --- a DataLoader that draws rare classes more often ----------------------------------------------


def balanced(generator: torch.Generator | None = None) -> DataLoader[Any]:
    labels = points().tensors[1]
    weights = 1.0 / labels.bincount()[labels]
    sampler = WeightedRandomSampler(weights.tolist(), 45, generator=generator)
    return DataLoader(points(), batch_size=12, sampler=sampler)


def sampler_before() -> nn.Module:
    torch.manual_seed(SEED)
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        # A run draws the order of an epoch from its own seed: the loop must draw the same.
        for batch in balanced(seeded(epoch, SEED)):
            classify(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def sampler_after() -> w5xde.Job:
    return w5xde.Job(
        model=network,
        data=balanced,
        loss=classify,
        optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9),
    )


# --- a compiled LSTM ------------------------------------------------------------------------------


class Reader(nn.Module):
    """Of cells, because torch.compile leaves nn.LSTM as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.cell = nn.LSTMCell(8, 12)
        self.out = nn.Linear(12, 11)

    def forward(self, text: Tensor) -> Tensor:
        hidden = state = torch.zeros(len(text), 12)
        found = []
        for word in self.embedding(text).unbind(1):
            hidden, state = self.cell(word, (hidden, state))
            found.append(hidden)
        return self.out(torch.stack(found, 1))


# With the compiler's default for BACKEND the results are as good, after a minute of compiling.
BACKEND = "aot_eager"


def lstm() -> nn.Module:
    return torch.compile(Reader(), backend=BACKEND)  # type: ignore[return-value]


def lstm_before() -> nn.Module:
    torch.manual_seed(SEED)
    model = lstm()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(EPOCHS):
        for batch in DataLoader(tokens(), batch_size=12):
            foretell(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def lstm_after() -> w5xde.Job:
    return w5xde.Job(
        model=lstm,
        data=lambda: DataLoader(tokens(), batch_size=12),
        loss=foretell,
        optimizer=lambda params: SGD(params, lr=0.5, momentum=0.9),
    )


SCRIPTS = {
    "ResNet with BatchNorm, one batch a step": Script(
        resnet_before, resnet_after, flags={**SHARED, "batches_per_step": 1}
    ),
    # Its loop moves running statistics by one batch after another, and a run by the mean of what the batches
    # of a step do to them. No weight depends on them.
    "ResNet with BatchNorm, four batches a step": Script(
        accumulating_before, resnet_after, in_processes=True, differ=r"running_(mean|var)$"
    ),
    "GPT-2, ragged text, `collate=` and `weight=`": Script(gpt2_before, gpt2_after),
    "LoRA on a frozen base": Script(lora_before, lora_after),
    "`IterableDataset`": Script(stream_before, stream_after, in_processes=True),
    "`DataLoader` with `WeightedRandomSampler`": Script(sampler_before, sampler_after, in_processes=True),
    "LSTM under `torch.compile`": Script(lstm_before, lstm_after, in_processes=True),
}
