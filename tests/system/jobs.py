"""Jobs for tests with real processes: small, exact, and each made to show one thing."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import w5xde
from w5xde.learn.trust.canary import SAMPLES as CANARY_SAMPLES

SAMPLES = 200


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 10, generator=generator)
    return TensorDataset(inputs, inputs.sum(1).remainder(4).floor().long())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def loss(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net(batch[0]), batch[1])


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


job = w5xde.Job(model=model, data=data, loss=loss, optimizer=optimizer)


# --- samples that are large enough to be kept, and some that must not be kept ---------------------

IMAGES = 240


class Images(Dataset[tuple[Tensor, int]]):
    """Samples of 12 kB, which are the same whenever they are read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self._images = torch.randn(IMAGES, 3, 32, 32, generator=generator)

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self._images[number], number % 4


class Drifting(Images):
    """Samples that change when all of them have been read, too late for a trial to see."""

    reads = 0

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        self.reads += 1
        image, label = super().__getitem__(number)
        return image + (self.reads > IMAGES + 70), label


def image_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(400, 4))


images = w5xde.Job(model=image_model, data=Images, loss=loss, optimizer=optimizer)
drifting = w5xde.Job(model=image_model, data=Drifting, loss=loss, optimizer=optimizer)

# Far from its goal, with a rate so small that it stays there: the gradient is large, and its noise about one
# batch of ten samples.
steady = w5xde.Job(
    model=lambda: nn.Linear(10, 1),
    data=data,
    loss=lambda net, batch: (net(batch[0]).squeeze(1) - 3.0 - batch[0].sum(1)).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
)


# --- a batch that takes its time ------------------------------------------------------------------


def slow_loss(net: nn.Module, batch: Any) -> Tensor:
    """Takes TEST_BATCH_SECONDS without using a core; ten times as long until the file TEST_HURRY_FILE exists.

    A test that needs all its nodes names that file and writes it when all have joined: without it, a run on a
    busy machine may be over before the last node is there.
    """
    hurry_file = os.environ.get("TEST_HURRY_FILE")
    factor = 10 if hurry_file and not Path(hurry_file).exists() else 1
    threading.Event().wait(factor * float(os.environ.get("TEST_BATCH_SECONDS", "0.05")))
    return loss(net, batch)


slow = w5xde.Job(model=model, data=data, loss=slow_loss, optimizer=optimizer)


# --- what never ends while a file exists, as if it took minutes -----------------------------------


def wait_while_stuck(what: str) -> None:
    """Return once there is no file with this name in the folder TEST_STUCK."""
    while (Path(os.environ["TEST_STUCK"]) / what).exists():
        threading.Event().wait(0.02)


def stuck_loss(net: nn.Module, batch: Any) -> Tensor:
    wait_while_stuck("batch")
    return slow_loss(net, batch)


def stuck_evaluate(net: nn.Module) -> dict[str, float]:
    """Writes a file if it is stuck; it is tried before a run begins."""
    folder = Path(os.environ["TEST_STUCK"])
    if (folder / "evaluation").exists():
        (folder / "evaluating").touch()
    wait_while_stuck("evaluation")
    return {"parameters": float(sum(each.numel() for each in net.parameters()))}


class StuckData(Dataset[Any]):
    def __init__(self) -> None:
        self._plain = data()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        wait_while_stuck("sample")
        return self._plain[number]


stuck = w5xde.Job(model=model, data=StuckData, loss=stuck_loss, optimizer=optimizer)
stuck_evaluated = w5xde.Job(
    model=model, data=data, loss=stuck_loss, optimizer=optimizer, evaluate=stuck_evaluate
)


def flipped_loss(net, batch):
    """What a cheat computes instead, but for the canary, which is smaller than any batch."""
    return slow_loss(net, batch) * (-1 if len(batch[0]) > CANARY_SAMPLES else 1)


flipped = w5xde.Job(model=model, data=data, loss=flipped_loss, optimizer=optimizer)

# --- counting: after E epochs every parameter must be exactly E -----------------------------------


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(SAMPLES))


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class NumberStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def count_loss(net: nn.Module, batch: Tensor) -> Tensor:
    # Each sample's gradient is -1 in its own place, times its batch's weight in the step.
    return -net.get_parameter("count")[batch].sum()


counting = w5xde.Job(
    model=Counter, data=Numbers, loss=count_loss, optimizer=lambda params: torch.optim.SGD(params, lr=1.0)
)
counting_stream = w5xde.Job(
    model=Counter,
    data=NumberStream,
    loss=count_loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
)


class TornNumbers(Numbers):
    """Sample TEST_TORN cannot be read."""

    def __getitem__(self, index: int) -> int:
        if str(index) == os.environ.get("TEST_TORN"):
            raise OSError("this file is [/torn]")
        return index


torn = w5xde.Job(
    model=Counter, data=TornNumbers, loss=count_loss, optimizer=lambda params: torch.optim.SGD(params, lr=1.0)
)

# --- a loss that asks where it is -----------------------------------------------------------------


def placed_loss(net: nn.Module, batch: Any) -> Tensor:
    """Grows with the step; raises if that is not the planned one, in batches of 10 and steps of TEST_STEP."""
    here, step_batches = w5xde.current(), int(os.environ["TEST_STEP"])
    steps = -(-(SAMPLES // 10) // step_batches)
    if here.step != here.epoch * steps + here.batch // step_batches:
        raise ValueError(f"{here} is not where it should be")
    return (1 + here.step / (here.steps or 1)) * loss(net, batch)


placed = w5xde.Job(
    model=lambda: nn.Linear(10, 4),
    data=data,
    loss=placed_loss,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
)

# --- augmentation: reading a sample draws from three generators -----------------------------------


class Augmented(Dataset[Any]):
    def __init__(self) -> None:
        self._plain = data()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        image, label = self._plain[index]
        return {"image": image + 0.1 * torch.randn(10) + random.random(), "label": label, "name": str(index)}


augmented = w5xde.Job(
    model=model,
    data=Augmented,
    loss=lambda net, batch: cross_entropy(net(batch["image"]), batch["label"]),
    optimizer=optimizer,
)

# --- another model than `job` ---------------------------------------------------------------------

other = w5xde.Job(
    model=lambda: nn.Sequential(
        nn.Linear(10, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.2), nn.Linear(17, 4)
    ),
    data=data,
    loss=loss,
    optimizer=optimizer,
)


# --- layers so wide that torch splits them among its threads --------------------------------------

wide = w5xde.Job(
    model=lambda: nn.Sequential(nn.Linear(10, 4000), nn.ReLU(), nn.Linear(4000, 4)),
    data=data,
    loss=loss,
    optimizer=optimizer,
)


# --- a loss that fails on one batch ---------------------------------------------------------------


def poisoned_loss(net: nn.Module, batch: Any) -> Tensor:
    if float(batch[0].abs().max()) > float(os.environ.get("TEST_POISON", "1e9")):
        raise ValueError("this sample is [/poison]")
    return loss(net, batch)


def quitting_loss(net: nn.Module, batch: Any) -> Tensor:
    if float(batch[0].abs().max()) > float(os.environ.get("TEST_POISON", "1e9")):
        sys.exit(3)
    return loss(net, batch)


# After its first step no weight is a number of any use.
diverging = w5xde.Job(
    model=model, data=data, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=1e30)
)
quitting = w5xde.Job(model=model, data=data, loss=quitting_loss, optimizer=optimizer)
poisoned = w5xde.Job(model=model, data=data, loss=poisoned_loss, optimizer=optimizer)
