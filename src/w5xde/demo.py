"""The demo: three nodes learn handwritten digits, and get the same weights as one process, bit for bit.

`alone` is a plain PyTorch loop without leases, network or flat buffers. In sync mode a pool of processes must
end with the same sha256 as this loop; the demo checks that before the user's eyes.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from w5xde.api import run_coordinator
from w5xde.cli.view import make_view
from w5xde.config import Settings
from w5xde.datasets import digits
from w5xde.errors import TrainingError
from w5xde.learn.data.sources import MapSource
from w5xde.learn.job.job import Job
from w5xde.learn.model.device import threads
from w5xde.learn.model.digest import weights_sha256
from w5xde.tree import Span, batch_seed, halves

EPOCHS = 20
STEP_BATCHES = 4


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(512, 10),
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def accuracy(model: nn.Module) -> dict[str, float]:
    images, labels = digits("test").tensors
    return {"accuracy": (model(images).argmax(1) == labels).float().mean().item()}


job = Job(
    model=build_model,
    data=digits,
    loss=loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
    evaluate=accuracy,
)


def run_demo(settings: Settings) -> dict[str, Any]:
    """Train with nodes, then in one process, and raise TrainingError if the weights differ."""
    settings = msgspec.structs.replace(settings, epochs=EPOCHS, batches_per_step=STEP_BATCHES)
    view = make_view(settings)
    result = run_coordinator(job, settings, watcher=view, name="w5xde.demo:job")
    view.show_result(result)
    view.say("the same in one process, with a plain PyTorch loop …")
    with threads(settings.threads):
        lonely = alone(settings)
        measured = accuracy(lonely.eval())
    summary = result.summary | {"alone_sha256": weights_sha256(lonely), "alone_metrics": measured}
    if summary["alone_sha256"] != summary["weights_sha256"]:
        raise TrainingError(
            "the weights of one process differ from those of the pool",
            code="W5-312",
            why=f"sha256 {summary['alone_sha256'][:16]}… alone, {summary['weights_sha256'][:16]}… together",
        )
    count = sum(1 for node in summary["nodes"] if node["batches"])
    view.say(
        f"[bold green]same weights[/] from {count} nodes and from one process: "
        f"sha256 {summary['weights_sha256'][:16]}…, test accuracy {result.metrics['accuracy']:.1%}",
        markup=True,
    )
    if settings.page and sys.stdin.isatty() and sys.stdout.isatty():
        view.say("the page stays open until Ctrl-C")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return summary


def alone(settings: Settings) -> nn.Module:
    """A plain loop over the same batches, adding gradients in the same tree."""
    torch.manual_seed(settings.seed)
    model = build_model().train()
    source = MapSource(digits(), batch_size=settings.batch_samples, seed=settings.seed, shuffle=True)
    optimizer = job.optimizer(model.parameters())
    batches = -(-source.samples // settings.batch_samples)
    for epoch, indices in itertools.islice(_steps(settings, batches), settings.steps):
        step = [(i, source.read(epoch, i)) for i in indices]
        samples = sum(len(batch[0]) for _, batch in step)
        gradients = []
        for i, batch in step:
            torch.manual_seed(batch_seed(settings.seed, epoch, i))
            share = loss(model, batch) * (len(batch[0]) / samples)
            gradients.append(torch.autograd.grad(share, list(model.parameters())))
        for parameter, gradient in zip(model.parameters(), _add(gradients), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


def _steps(settings: Settings, batches: int) -> Iterator[tuple[int, range]]:
    """The epoch and the batches of each step, up to the epoch limit if there is one."""
    limit = settings.epoch_limit
    for epoch in itertools.count() if limit is None else range(limit):
        for first in range(0, batches, settings.step_batches):
            yield epoch, range(first, min(first + settings.step_batches, batches))


def _add(gradients: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The sum of the batches' gradients, added in the canonical tree."""
    if len(gradients) == 1:
        return gradients[0]
    left, right = halves(Span(0, len(gradients)))
    sums = zip(_add(gradients[: left.stop]), _add(gradients[right.start :]), strict=True)
    return tuple(a + b for a, b in sums)
