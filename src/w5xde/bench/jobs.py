"""The jobs that benchmarks train, and helpers to read their batches.

The seed job is that of `examples/seed_mlp.py` at a constant learning rate: a schedule would cost every
contestant 20 µs a step, and tell nothing about the distribution of work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from w5xde.datasets import digits, python_docs
from w5xde.learn.data.sources import MapSource
from w5xde.learn.job.build import build_source
from w5xde.learn.job.job import Job

BATCH_SIZE = 32
SEED = 0
# Batches that a contestant reads beforehand and then cycles through. The seed job has 32.
BATCHES_READ_MAX = 256


def classify(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


# --- the first system's benchmark: 430 parameters, a thousand samples ---------------------------------


def seed_model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10))


def seed_data() -> TensorDataset:
    numbers = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
    return TensorDataset(numbers, numbers.sum(1).floor().long() % 10)


def seed_optimizer(params: Any) -> Optimizer:
    return torch.optim.Adam(params, lr=0.005, betas=(0.0, 0.99), fused=True)


seed = Job(model=seed_model, data=seed_data, loss=classify, optimizer=seed_optimizer)

# --- a model of 25 million parameters -----------------------------------------------------------------

LARGE_WIDTH = 2875
LARGE_LAYERS = 3
LARGE_SAMPLES = 512


def large_model() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, LARGE_WIDTH), nn.ReLU()]
    for _ in range(LARGE_LAYERS):
        layers += [nn.Linear(LARGE_WIDTH, LARGE_WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(LARGE_WIDTH, 10))


def large_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(LARGE_SAMPLES, 64, generator=generator)
    return TensorDataset(inputs, inputs[:, :10].argmax(1))


def large_optimizer(params: Any) -> Optimizer:
    return torch.optim.Adam(params, lr=1e-4, fused=True)


large = Job(model=large_model, data=large_data, loss=classify, optimizer=large_optimizer)

# --- a text model of any size: its gradients compress as real ones do ---------------------------------

TEXT_CONTEXT = 64
TEXT_SYMBOLS = 128
TEXT_HEADS = 4


class Writer(nn.Module):
    """A transformer of two layers that predicts the next symbol, as in the text example."""

    future: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(TEXT_SYMBOLS, width)
        self.places = nn.Embedding(TEXT_CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, TEXT_HEADS, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.guess = nn.Linear(width, TEXT_SYMBOLS, bias=False)
        future = torch.ones(TEXT_CONTEXT, TEXT_CONTEXT).triu(1).bool()
        self.register_buffer("future", future, persistent=False)
        nn.init.normal_(self.symbols.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        seen = self.layers(self.symbols(symbols) + self.places.weight, mask=self.future)
        guesses: Tensor = self.guess(seen)
        return guesses


class Windows(Dataset[Tensor]):
    """All windows of a text that are one symbol longer than the context of the model."""

    def __init__(self, symbols: Tensor) -> None:
        self.symbols = symbols

    def __len__(self) -> int:
        return len(self.symbols) - TEXT_CONTEXT

    def __getitem__(self, start: int) -> Tensor:
        return self.symbols[start : start + TEXT_CONTEXT + 1]


def text_data() -> Windows:
    return Windows(torch.tensor([min(ord(symbol), TEXT_SYMBOLS - 1) for symbol in python_docs()]))


def guess_next(model: nn.Module, windows: Tensor) -> Tensor:
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def text_job(parameters: int) -> Job:
    """A text model of about this many parameters, which are 24 · width² + 346 · width."""
    width = (math.sqrt(346**2 + 4 * 24 * parameters) - 346) / (2 * 24)
    heads = max(1, round(width / TEXT_HEADS))
    return Job(
        model=lambda: Writer(TEXT_HEADS * heads),
        data=text_data,
        loss=guess_next,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.003, fused=True),
    )


# The last part of the text, which a model does not see if its loss there is measured.
HELD_OUT_PART = 0.1


def split_text() -> tuple[Windows, Windows]:
    """The windows to learn from, and those of the held-out end of the text."""
    symbols = text_data().symbols
    cut = round((1 - HELD_OUT_PART) * len(symbols))
    return Windows(symbols[:cut]), Windows(symbols[cut:])


def split_text_job(parameters: int) -> Job:
    """A text model of about this many parameters, which learns from all but the held-out text."""
    return replace(text_job(parameters), data=lambda: split_text()[0])


def held_out_windows(count: int) -> Tensor:
    """Evenly spaced windows of the held-out text."""
    _, windows = split_text()
    return torch.stack([windows[int(at)] for at in torch.linspace(0, len(windows) - 1, count)])


TEXT_PARAMETERS = 110_000
TEXT_BATCH_SIZE = 16


def text_optimizer(params: Any) -> Optimizer:
    # As people write it: torch then steps tensor by tensor on a CPU.
    return torch.optim.AdamW(params, lr=0.003, weight_decay=0.01)


# A size between the seeds' network and the large model: 107,160 parameters in 27 tensors.
text = replace(text_job(TEXT_PARAMETERS), optimizer=text_optimizer)

# --- handwritten digits: a network as in the digits example, and a convolutional one --------------------


def digits_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def conv_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def adam(rate: float) -> Callable[[Any], Optimizer]:
    return lambda params: torch.optim.Adam(params, lr=rate)


digits_job = Job(model=digits_model, data=digits, loss=classify, optimizer=adam(0.003))
conv_job = Job(model=conv_model, data=digits, loss=classify, optimizer=adam(0.003))

# --- helpers for contestants -------------------------------------------------------------------


def read_batches(job: Job, batch_size: int, *, epochs: int = 1) -> list[Any]:
    """The batches that a run would lend, read beforehand, so that reading is not measured."""
    source = build_source(job, SEED, batch_size, shuffle=True)
    if not isinstance(source, MapSource):
        raise TypeError("a benchmark's job has a map-style data set")
    batches = -(-source.samples // batch_size)
    places = [(epoch, batch) for epoch in range(epochs) for batch in range(batches)]
    return [source.read(*place) for place in places[:BATCHES_READ_MAX]]


def loss_of(job: Job, model: nn.Module, batch_size: int) -> float:
    """The mean loss over all data, or over the part that `read_batches` reads."""
    batches = read_batches(job, batch_size)
    with torch.no_grad():
        losses = [(float(job.loss(model, batch)), len(batch[0])) for batch in batches]
    return sum(loss * samples for loss, samples in losses) / sum(samples for _, samples in losses)


def parameter_count(job: Job) -> int:
    return sum(parameter.numel() for parameter in job.model().parameters())


# --- a gradient that costs nothing, to see what moving it costs -----------------------------------------

EXCHANGE_SAMPLES = 4096
# Bytes of optimizer state for each parameter.
OPTIMIZERS = {"sgd": 0, "momentum": 4, "adam": 8}


class Flat(nn.Module):
    """One large parameter."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))


class _Ready(torch.autograd.Function):
    """A loss with a ready-made gradient: backward computes and copies nothing."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        # Not saved for backward: it is no part of the graph.
        ctx.weight, ctx.gradient = weight, gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[None, None]:
        # Assigned, because autograd would copy a returned gradient that something else refers to.
        ctx.weight.grad = ctx.gradient
        return None, None


def exchange_job(parameters: int, optimizer: str = "sgd") -> Job:
    """A job whose batches cost nothing to compute, so that only the exchange is measured."""
    makers: dict[str, Any] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-6),
        "momentum": lambda params: torch.optim.SGD(params, lr=1e-6, momentum=0.9),
        "adam": lambda params: torch.optim.Adam(params, lr=1e-6, fused=True),
    }

    # Noise, which compresses no better than real gradients. Made once, for all processes forked from here.
    noise = torch.randn(parameters, generator=torch.Generator().manual_seed(SEED)).mul_(1e-3)

    def ready(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = _Ready.apply(model.get_parameter("weight"), noise)  # type: ignore[no-untyped-call]
        return loss

    return Job(
        model=lambda: Flat(parameters),
        data=lambda: TensorDataset(torch.zeros(EXCHANGE_SAMPLES, 1)),
        loss=ready,
        optimizer=makers[optimizer],
    )
