"""Small jobs, each with one feature that a careless pool would get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, TensorDataset

from w5xde import Job
from w5xde.config import Settings

SAMPLES = 50  # with batches of 4 and steps of 5: a short last batch and a short last step
FEATURES, CLASSES = 6, 3


def settings(**changes: Any) -> Settings:
    """Batches of 4, steps of 5, two epochs; what a test says otherwise."""
    return Settings(**{"batch_size": 4, "batches_per_step": 5, "epochs": 2, "seed": 3} | changes)


def points(dtype: torch.dtype = torch.float32, samples: int = SAMPLES) -> TensorDataset:
    """Points on which `CLASSES` classes can be told apart."""
    numbers = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(numbers.to(dtype), (numbers.sum(1) * 2).floor().long() % CLASSES)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    pictures = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    return TensorDataset(pictures, (pictures.sum((1, 2, 3)) > 0).long())


def tokens() -> TensorDataset:
    """Sequences in which each token follows from the one before."""
    first = torch.randint(0, 11, (SAMPLES, 1), generator=torch.Generator().manual_seed(4))
    return TensorDataset((first + 3 * torch.arange(8)) % 11)


def classify(model: nn.Module, batch: Any) -> Tensor:
    numbers, labels = batch
    return cross_entropy(model(numbers), labels)


def foretell(model: nn.Module, batch: Any) -> Tensor:
    """The loss of guessing the next token."""
    (text,) = batch
    return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def sgd(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def make(
    model: Callable[[], nn.Module],
    *,
    data: Callable[[], Any] = points,
    loss: Callable[[nn.Module, Any], Tensor] = classify,
    optimizer: Callable[[Any], Optimizer] = sgd,
    **more: Any,
) -> Job:
    return Job(model=model, data=data, loss=loss, optimizer=optimizer, **more)


def mlp(*between: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A network with these layers between its two linear ones."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 16), *(layer() for layer in between), nn.ReLU(), nn.Linear(16, CLASSES)
        )

    return model


class Memories(nn.Module):
    """Buffers of every kind: constant, replaced, counted, set."""

    mask: Tensor
    table: Tensor
    ema: Tensor
    seen: Tensor
    negative: Tensor
    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mask", torch.triu(torch.full((CLASSES, CLASSES), -torch.inf), 1))
        self.register_buffer("table", torch.linspace(0, 1, 5000))
        self.register_buffer("ema", torch.zeros(FEATURES))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("negative", torch.tensor(False))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("scratch", torch.arange(3.0), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * numbers.mean(0)
        self.seen += len(numbers)
        self.negative |= numbers.sum() < -5
        self.phase = self.phase * torch.exp(1j * numbers.mean())
        attention = (self.mask + self.inner.weight @ self.inner.weight.T).softmax(-1)
        # Where it has been matters for where it goes, or wrong buffers would go unnoticed in the weights.
        return self.inner(numbers - self.ema) @ attention + self.table[self.seen] + self.phase.real.sum()


class Buffered(nn.Module):
    """A linear layer with one buffer, and something that is done to it in each forward pass."""

    memory: Tensor

    def __init__(
        self, start: Tensor, change: Callable[[Any, Tensor], Any], *, persistent: bool = True
    ) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("memory", start, persistent=persistent)
        self._change = change

    def forward(self, numbers: Tensor) -> Tensor:
        self._change(self, numbers)
        return self.inner(numbers)


def grow(model: Any, numbers: Tensor) -> None:
    model.memory = torch.cat([model.memory, numbers.mean().reshape(1)])


def highest(model: Any, numbers: Tensor) -> None:
    model.memory = torch.maximum(model.memory, numbers.max())


def count(model: Any, numbers: Tensor) -> None:
    model.memory += 1


def nothing(model: Any, numbers: Tensor) -> None:
    """As most buffers are treated."""


def write_the_same(model: Any, numbers: Tensor) -> None:
    model.memory.copy_(model.memory.clone())


def assign_the_same(model: Any, numbers: Tensor) -> None:
    model.memory = model.memory.clone()


class Unborn(nn.Module):
    """Makes its second layer, or a new weight for its first, when it is used."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, CLASSES)
        self._name = name

    def forward(self, numbers: Tensor) -> Tensor:
        made = nn.Parameter(self.get_parameter("first.weight").detach().clone())
        if self._name == "second":
            self.second = made
            return self.first(numbers) @ made @ made.T
        self.first.weight = made
        return self.first(numbers)


class Wilful(nn.Module):
    """Its answer depends on something that no other machine can know."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)
        self._kind = kind
        self._steps = 0
        self._last: Tensor | float = 0.0
        self._own = torch.Generator().manual_seed(1)

    def forward(self, numbers: Tensor) -> Tensor:
        if self._kind == "counts":
            self._steps += 1
            return self.inner(numbers) * self._steps
        if self._kind == "remembers":
            found = self.inner(numbers + self._last)
            self._last = numbers.mean()
            return found
        return self.inner(numbers + torch.randn(numbers.shape, generator=self._own))


class Hoarder(nn.Module):
    """Keeps what it computed, as many do to look at it later; from the start, if asked."""

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)
        self.kept = self.inner.weight * 2 if early else None

    def forward(self, numbers: Tensor) -> Tensor:
        self.kept = self.inner(numbers)
        return self.kept


class Tied(nn.Module):
    """An embedding whose weight is also the decoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 11)
        self.decoder.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.decoder(self.body(self.embedding(text)).tanh())


class Partly(nn.Module):
    """One layer that is never used, and one that is used only when the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(FEATURES, CLASSES)
        self.sometimes = nn.Linear(FEATURES, CLASSES)
        self.seldom = nn.Linear(FEATURES, CLASSES)
        self.never = nn.Linear(FEATURES, CLASSES)

    def forward(self, numbers: Tensor) -> Tensor:
        found = self.always(numbers)
        if numbers.sum() > 0:
            found = found + self.sometimes(numbers)
        if numbers.sum() > 6:
            found = found + self.seldom(numbers)
        return found


class Mixed(nn.Module):
    """A part in low precision, one in float32 and a head in float64."""

    def __init__(self, low: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.low = nn.Linear(FEATURES, 16, dtype=low)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES, dtype=torch.float64)

    def forward(self, numbers: Tensor) -> Tensor:
        found = self.low(numbers.to(self.low.weight.dtype)).float().tanh()
        return self.head(self.middle(found).tanh().double())


class Attention(nn.Module):
    """A small transformer with a causal mask."""

    causal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.place = nn.Parameter(0.1 * torch.randn(7, 16))
        self.attend = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.think = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.out = nn.Linear(16, 11)
        self.register_buffer("causal", torch.triu(torch.full((7, 7), -torch.inf), 1))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.place
        y = self.norms[0](x)
        x = x + self.attend(y, y, y, attn_mask=self.causal, need_weights=False)[0]
        return self.out(x + self.think(self.norms[1](x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(12, 11)

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(text))[0])


class Waves(nn.Module):
    """Complex weights, as in Fourier layers."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(FEATURES // 2 + 1, 5, dtype=torch.complex64) / 3)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head((torch.fft.rfft(numbers) @ self.spectrum).abs())


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, groups=2).to(memory_format=torch.channels_last),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


class Records(Dataset[Any]):
    """Samples as dicts with tensors, numbers, strings and tuples inside, like a real data set's."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        numbers, label = points()[i]
        return {
            "numbers": numbers,
            "about": ("odd" if i % 2 else "even", i / SAMPLES, [np.float32(i % 3), {"id": i}]),
            "label": label,
            "weight": 1.0 + i % 2,
            "many": i > 10,
        }


def read_records(model: nn.Module, batch: Any) -> Tensor:
    words, share, (third, inner) = batch["about"]
    if not (isinstance(words, tuple | list) and all(isinstance(word, str) for word in words)):
        raise TypeError(f"words came as {type(words).__name__}")
    odd = torch.tensor([word == "odd" for word in words])
    numbers = batch["numbers"] + (share + third + inner["id"] / SAMPLES).float().unsqueeze(1)
    each = cross_entropy(model(numbers), batch["label"], reduction="none")
    return (each * batch["weight"] * (1 + odd.float()) * (1 + batch["many"].float())).mean()


class Noisy(Dataset[Any]):
    """Augmentation that draws from all three global generators while a sample is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        numbers, label = points()[i]
        noise = torch.randn(FEATURES) + random.gauss(0, 1) + np.random.normal()  # noqa: NPY002
        return numbers + 0.1 * noise, label


def drop_at_random(model: nn.Module, batch: Any) -> Tensor:
    """A loss that draws from Python's and numpy's generators."""
    numbers, labels = batch
    keep = random.randrange(FEATURES)
    scale = np.random.uniform(0.5, 1.5)  # noqa: NPY002 - what users write
    return cross_entropy(model(numbers.roll(keep, 1) * scale), labels)
